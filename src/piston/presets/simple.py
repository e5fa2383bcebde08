"""Presets of the LIBERO simulation benchmark, of the UR5 arm, and of a robot of your own.

`--robot FILE` describes the robot of your own.
"""

import dataclasses
from typing import Any

from piston.config import AssetsConfig, CosineDecaySchedule, TrainConfig
from piston.models.configs import GEMMA, Pi0Config, Pi0FASTConfig
from piston.robots.description import DescribedRobotDataConfig
from piston.robots.simple import LeRobotLiberoDataConfig, LeRobotUR5DataConfig

_PLAIN = LeRobotLiberoDataConfig(repo_id="physical-intelligence/libero", prompt_from_task=True)
# The π0 and π0-FAST presets subtract the state from the actions, which are relative already.
_DELTA = dataclasses.replace(_PLAIN, extra_delta_transform=True)
_LORA = {"vlm": GEMMA["gemma_2b_lora"], "action_expert": GEMMA["gemma_300m_lora"]}
_BASE = "gs://openpi-assets/checkpoints/{}_base/params"
# LIBERO's two cameras keep their π0 slots on π0-FAST too.
_FAST = Pi0FASTConfig(
    action_dim=7, action_horizon=10, max_token_len=180, cameras=Pi0Config().cameras
)


def _low_memory(preset: TrainConfig) -> TrainConfig:
    """Train adapters of the matrices instead of the experts."""
    lora: dict[str, Any] = {expert: _LORA[expert] for expert in preset.model.experts}
    return dataclasses.replace(
        preset,
        name=f"{preset.name}_low_mem_finetune",
        model=dataclasses.replace(preset.model, **lora),
        allow_missing=("*lora*",),
        freeze=(*(f"{expert}.*" for expert in lora), "!*lora*"),
        ema_decay=None,
    )


_PI0_LIBERO = TrainConfig(
    name="pi0_libero", model=Pi0Config(), data=_DELTA, weights=_BASE.format("pi0")
)
_FAST_LIBERO = TrainConfig(
    name="pi0_fast_libero", model=_FAST, data=_DELTA, weights=_BASE.format("pi0_fast")
)
_PI05_LIBERO = TrainConfig(
    name="pi05_libero",
    # As released: the state is not written into the prompt here.
    model=Pi0Config(pi05=True, action_horizon=10, discrete_state_input=False),
    data=_PLAIN,
    weights=_BASE.format("pi05"),
    batch_size=256,
    lr_schedule=CosineDecaySchedule(
        warmup_steps=10_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5
    ),
    ema_decay=0.999,
)
_PI0_ROBOT = TrainConfig(
    name="pi0_robot",
    model=Pi0Config(),
    data=DescribedRobotDataConfig(prompt_from_task=True),
    weights=_BASE.format("pi0"),
    num_train_steps=20_000,
)

PRESETS = (
    _PI0_LIBERO,
    _low_memory(_PI0_LIBERO),
    _FAST_LIBERO,
    _low_memory(_FAST_LIBERO),
    _PI05_LIBERO,
    dataclasses.replace(
        _PI05_LIBERO,
        name="pi05_ki_libero",
        # The VLM, which writes the actions too, reads the state in the prompt.
        model=Pi0Config(pi05=True, action_horizon=10, targets=("fast",), insulate=True),
    ),
    TrainConfig(
        name="pi0_ur5",
        model=Pi0Config(),
        data=LeRobotUR5DataConfig(
            # The statistics that the base model was trained with on this arm.
            assets=AssetsConfig("gs://openpi-assets/checkpoints/pi0_base/assets", "ur5e"),
            prompt_from_task=True,
        ),
        weights=_BASE.format("pi0"),
    ),
    _PI0_ROBOT,
    _low_memory(_PI0_ROBOT),
    dataclasses.replace(
        _PI0_ROBOT, name="pi05_robot", model=Pi0Config(pi05=True), weights=_BASE.format("pi05")
    ),
)
