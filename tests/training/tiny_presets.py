"""Presets so small that a step takes milliseconds; for tests, in this process and in others."""

import dataclasses

from piston import presets
from piston.config import CosineDecaySchedule, MixtureDataConfig, TrainConfig
from piston.models.configs import GemmaSize, Pi0Config, Pi0FASTConfig, VisionSize
from piston.robots.image_text import ImageTextDataConfig
from piston.robots.simple import (
    FakeDataConfig,
    LeRobotLiberoDataConfig,
    LeRobotMetaworldDataConfig,
)

VISION = VisionSize(width=16, depth=1, mlp_dim=24, num_heads=2, patch=16)
GEMMA = GemmaSize(width=16, depth=2, mlp_dim=24, num_heads=2, num_kv_heads=1, head_dim=8)
SIZES = {
    "max_token_len": 8,
    "dtype": "float32",
    "vision": VISION,
    "vlm": GEMMA,
    "vocab_size": 300,
    "image_size": 32,
    "cameras": ("base_0_rgb", "left_wrist_0_rgb"),
    "tokenizer": "bytes",
}
PI0 = Pi0Config(
    **SIZES, action_dim=8, action_horizon=5, action_expert=dataclasses.replace(GEMMA, width=12)
)
PI05 = dataclasses.replace(PI0, pi05=True)
# Random samples hold their text and FAST tokens within the prompt's room.
KI = dataclasses.replace(PI05, targets=("text", "fast"), insulate=True, max_text_len=4)
# The same with room for real prompts, subtasks and codes.
MIXED = dataclasses.replace(
    KI,
    max_token_len=88,
    max_text_len=16,
    max_fast_len=56,
    fast_tokenizer="bytes",
    vocab_size=259 + 256 + 128,
)
FAST = Pi0FASTConfig(**SIZES, action_dim=8, action_horizon=5)
# A checkpoint of this one takes long enough to be killed while it is written.
SLOW_TO_SAVE = dataclasses.replace(PI0, vocab_size=300_000)

TINY = TrainConfig(
    name="tiny",
    exp_name="run",
    model=PI0,
    data=FakeDataConfig(),
    lr_schedule=CosineDecaySchedule(warmup_steps=2, peak_lr=1e-2, decay_steps=100, decay_lr=1e-3),
    batch_size=4,
    num_workers=0,
    num_train_steps=6,
    log_interval=1,
    save_interval=100,  # only the last step: saving takes as long as several steps
    keep_period=None,
    keep_last=10,
)

# Two robots of 7 and 4 action dimensions, and pictures; the folders are given where it is used.
MIXTURE = dataclasses.replace(
    TINY,
    name="tiny_mixture",
    model=MIXED,
    data=MixtureDataConfig(
        {
            "cups": LeRobotLiberoDataConfig(repo_id="cups", prompt_from_task=True, share=2),
            "drawers": LeRobotMetaworldDataConfig(
                repo_id="drawers", prompt_from_task=True, subtasks=True, share=1
            ),
            "pictures": ImageTextDataConfig(repo_id="pictures", share=1),
        }
    ),
    mask_padded_dims=True,
    mask_padded_steps=True,
    gradient_accumulation=2,
    noise_draws=2,
    validation_episodes=1,
    validation_interval=9,
)

SLOW = dataclasses.replace(TINY, name="tiny_slow_to_save", model=SLOW_TO_SAVE)
for preset in (TINY, SLOW, MIXTURE):
    if preset.name not in presets.names():
        presets.register(preset)
