"""Presets small enough to run anywhere in seconds, on random samples."""

import dataclasses

from piston.config import TrainConfig
from piston.models.configs import Pi0Config, Pi0FASTConfig
from piston.models.variants import GEMMA, VISION
from piston.robots.simple import FakeDataConfig

_PI0 = Pi0Config(vision=VISION["dummy"], vlm=GEMMA["dummy"], action_expert=GEMMA["dummy"])
_PI05 = dataclasses.replace(_PI0, pi05=True)
_FAST = Pi0FASTConfig(action_dim=8, action_horizon=8, vision=VISION["dummy"], vlm=GEMMA["dummy"])
_DEBUG = TrainConfig(
    name="debug",
    exp_name="debug",
    model=_PI0,
    data=FakeDataConfig(),
    batch_size=2,
    num_train_steps=10,
    save_interval=100,
    overwrite=True,
)

PRESETS = (
    _DEBUG,
    dataclasses.replace(
        _DEBUG,
        name="debug_restore",
        weights="./checkpoints/debug/debug/9",
        save_interval=1_000,
    ),
    dataclasses.replace(
        _DEBUG, name="debug_pi05", exp_name="debug_pi05", model=_PI05, save_interval=1_000
    ),
    dataclasses.replace(_DEBUG, name="debug_fast", exp_name="debug_fast", model=_FAST),
)
