"""Small models that learn a simulated task on two CPU cores in minutes.

Built from the same model, transforms and loop as the full-size ones; only sizes differ, and a
convolutional stem stands in for the vision tower, which would need pre-training.
"""

import dataclasses

from piston.config import AdamW, CosineDecaySchedule, TrainConfig
from piston.models.configs import Pi0Config
from piston.models.variants import GemmaSize, VisionSize
from piston.robots.aloha import LeRobotAlohaDataConfig
from piston.robots.simple import LeRobotMetaworldDataConfig

_VLM = GemmaSize(width=128, depth=4, mlp_dim=512, num_heads=4, num_kv_heads=1, head_dim=16)
_EXPERT = dataclasses.replace(_VLM, width=64, mlp_dim=256)
_STEM = VisionSize(width=128, depth=0, mlp_dim=128, num_heads=4, patch=16, stem=16)
_ALOHA = Pi0Config(
    action_dim=14,
    action_horizon=16,
    max_token_len=48,
    # On CPUs without matrix units for bfloat16, float32 is faster at this size.
    dtype="float32",
    vision=_STEM,
    vlm=_VLM,
    action_expert=_EXPERT,
    vocab_size=259,
    image_size=96,
    cameras=("base_0_rgb",),
    tokenizer="bytes",
)

_METAWORLD = dataclasses.replace(
    _ALOHA,
    action_dim=4,
    action_horizon=8,
    max_token_len=24,
    image_size=64,
)


def _schedule(num_steps: int) -> CosineDecaySchedule:
    return CosineDecaySchedule(warmup_steps=50, peak_lr=2e-3, decay_steps=num_steps, decay_lr=2e-5)


_ALOHA_SIM = TrainConfig(
    name="tiny_aloha_sim",
    model=_ALOHA,
    data=LeRobotAlohaDataConfig(
        repo_id="data/aloha_transfer_cube",
        prompt_from_task=True,
        # The simulated robot's own conventions are as good as any for a model that starts from
        # nothing.
        adapt_to_pi=False,
        use_delta_joint_actions=False,
        norm_floor=0.01,
        # In demonstrations without errors the state alone tells what comes next, and a policy that
        # believes it looks past the picture.
        state_noise=0.02,
        action_stride=8,
    ),
    augmentation=False,
    batch_size=16,
    noise_draws=8,
    # Later on the gripper covers what it reaches for.
    start_frames=48,
    start_weight=3,
    num_workers=0,
    cache_frames=True,
    num_train_steps=1_500,
    log_interval=100,
    save_interval=1_000_000,
    keep_period=None,
    lr_schedule=_schedule(1_500),
    optimizer=AdamW(weight_decay=1e-4),
    ema_decay=0.99,
)

PRESETS = (
    _ALOHA_SIM,
    dataclasses.replace(
        _ALOHA_SIM,
        name="tiny_aloha_insertion",
        data=dataclasses.replace(_ALOHA_SIM.data, repo_id="data/aloha_insertion"),
        num_train_steps=3_000,
        lr_schedule=_schedule(3_000),
    ),
    dataclasses.replace(
        _ALOHA_SIM,
        name="tiny_metaworld",
        model=_METAWORLD,
        data=LeRobotMetaworldDataConfig(
            repo_id="data/metaworld", prompt_from_task=True, norm_floor=0.01
        ),
        batch_size=32,
        noise_draws=2,
        start_frames=0,
        start_weight=1,
        num_train_steps=2_600,
        lr_schedule=_schedule(2_600),
    ),
)
