"""Presets that fine-tune the base models on a robot of your own, which `--robot FILE` describes."""

import dataclasses

from piston.config import TrainConfig
from piston.models.configs import GEMMA, Pi0Config
from piston.robots.description import DescribedRobotDataConfig

_BASE = "gs://openpi-assets/checkpoints/{}_base/params"
_PI0 = TrainConfig(
    name="pi0_robot",
    model=Pi0Config(),
    data=DescribedRobotDataConfig(prompt_from_task=True),
    weights=_BASE.format("pi0"),
    num_train_steps=20_000,
)

PRESETS = (
    _PI0,
    dataclasses.replace(
        _PI0,
        name="pi0_robot_low_mem_finetune",
        model=Pi0Config(vlm=GEMMA["gemma_2b_lora"], action_expert=GEMMA["gemma_300m_lora"]),
        allow_missing=("*lora*",),
        freeze=("vlm.*", "action_expert.*", "!*lora*"),
        ema_decay=None,
    ),
    dataclasses.replace(
        _PI0, name="pi05_robot", model=Pi0Config(pi05=True), weights=_BASE.format("pi05")
    ),
)
