"""Presets so small that a step takes milliseconds; for tests, in this process and in others."""

import dataclasses

from piston import presets
from piston.config import CosineDecaySchedule, TrainConfig
from piston.models.configs import GemmaSize, Pi0Config, Pi0FASTConfig, VisionSize
from piston.robots.simple import FakeDataConfig

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

for preset in (TINY, dataclasses.replace(TINY, name="tiny_slow_to_save", model=SLOW_TO_SAVE)):
    if preset.name not in presets.names():
        presets.register(preset)
