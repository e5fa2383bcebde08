"""One checkpoint of two robots, trained in seconds on sets that are recorded here.

The arm writes its subtask first: "reach" in front of a dark picture, "lift" in front of a bright
one. The cart has other keys, dimensions, statistics and another rate, and writes nothing. Questions
about the arm's pictures are the third part of the mixture.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from piston.config import AdamW, AssetsConfig, CosineDecaySchedule, MixtureDataConfig, TrainConfig
from piston.data.language import Question
from piston.data.record import Recorder
from piston.models.configs import GemmaSize, Pi0Config, VisionSize
from piston.robots import RobotInputs
from piston.robots.description import DescribedRobotDataConfig
from piston.robots.image_text import ImageTextDataConfig
from piston.training.loop import train_loop
from piston.transforms.normalize import NormStats, write_norm_stats

PIXELS, EPISODES, FRAMES, HORIZON, DIM = 32, 2, 16, 4, 4
DARK, BRIGHT = 30, 220
SUBTASKS = {DARK: "reach", BRIGHT: "lift"}
QUESTION = "how bright is it?"
ANSWERS = {DARK: "dark", BRIGHT: "bright"}
ARM = RobotInputs(
    name="three-joint arm",
    cameras={"front": "base_0_rgb"},
    state={"joints": ("base", "elbow", "gripper")},
    actions={"action": ("base", "elbow", "gripper")},
    columns={},
    relative=("base",),
    rate=10,
)
CART = RobotInputs(
    name="cart",
    cameras={"mast": "base_0_rgb", "bumper": "left_wrist_0_rgb"},
    state={"wheels": ("left", "right")},
    actions={"speed": ("left", "right")},
    columns={},
    rate=20,
)
ROBOTS = {"arm": ARM, "cart": CART}
PROMPTS = {"arm": "take the cup", "cart": "drive on"}
SPREADS = {"arm": 1.0, "cart": 5.0}  # of all numbers of a robot
_EXPERT = GemmaSize(width=32, depth=2, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=16)
MODEL = Pi0Config(
    action_dim=DIM,
    action_horizon=HORIZON,
    max_token_len=40,
    dtype="float32",
    vision=VisionSize(width=32, depth=0, mlp_dim=32, num_heads=2, patch=16, stem=8),
    vlm=_EXPERT,
    action_expert=_EXPERT,
    vocab_size=259,
    image_size=PIXELS,
    cameras=("base_0_rgb", "left_wrist_0_rgb"),
    tokenizer="bytes",
    targets=("text",),
    max_text_len=12,
)


def observation(of: str, number: int = 0, brightness: int = DARK, **more: Any) -> dict[str, Any]:
    """What a robot sends, without its name; the same for the same number."""
    table, random = ROBOTS[of], np.random.default_rng(number)
    images = {
        key: random.integers(brightness, brightness + 30, (PIXELS, PIXELS, 3), np.uint8)
        for key in table.cameras
    }
    ((key, names),) = table.state.items()
    state = SPREADS[of] * random.uniform(-1, 1, len(names)).astype(np.float32)
    return {**images, key: state, "prompt": PROMPTS[of], **more}


def record(folder: Path, robot: str) -> None:
    """Write a set of a robot; the arm's has subtasks and questions."""
    table, is_labelled = ROBOTS[robot], robot == "arm"
    camera = {"dtype": "image", "shape": (PIXELS, PIXELS, 3)}
    numbers = {
        key: {"dtype": "float32", "shape": (len(names),), "names": list(names)}
        for key, names in (*table.state.items(), *table.actions.items())
    }
    features = {**dict.fromkeys(table.cameras, camera), **numbers}
    (action,) = table.actions
    with Recorder(folder, table.rate, features, language=is_labelled) as recorder:
        for episode in range(EPISODES):
            for step in range(FRAMES):
                brightness = DARK if step < FRAMES // 2 else BRIGHT
                frame = observation(robot, 100 * episode + step, brightness)
                prompt = frame.pop("prompt")
                (state,) = (frame[key] for key in table.state)
                labels: dict[str, Any] = {}
                if is_labelled:
                    asked = [Question("front", QUESTION, ANSWERS[brightness])]
                    asked += [Question("front", "which cup?", "red")] * (step == 0)
                    labels = {"subtask": SUBTASKS[brightness], "questions": asked}
                recorder.add_frame({**frame, action: 0.5 * state}, prompt, **labels)
            recorder.save_episode()


def config(folder: Path, **changes: Any) -> TrainConfig:
    """The run; its sets and statistics are in the folder once `prepare` has been called."""
    robots = {
        name: DescribedRobotDataConfig(
            repo_id=str(folder / name),
            assets=AssetsConfig(assets_dir=str(folder / "assets"), asset_id=name),
            prompt_from_task=True,
            description=table,
            subtasks=name == "arm",
            share=2,
        )
        for name, table in ROBOTS.items()
    }
    questions = ImageTextDataConfig(repo_id=str(folder / "arm"), share=1)
    settings = {
        "name": "two_robots",
        "exp_name": "run",
        "model": MODEL,
        "data": MixtureDataConfig({**robots, "questions": questions}),
        "augmentation": False,
        "mask_padded_dims": True,
        "mask_padded_steps": True,
        "batch_size": 10,
        "num_workers": 0,
        "num_train_steps": 120,
        "log_interval": 20,
        "validation_episodes": 1,
        "validation_interval": 100,
        "save_interval": 1_000_000,
        "keep_period": None,
        "lr_schedule": CosineDecaySchedule(5, 1e-2, decay_steps=120, decay_lr=1e-3),
        "optimizer": AdamW(weight_decay=1e-4),
        "ema_decay": None,
        "checkpoint_base_dir": str(folder / "runs"),
    }
    return TrainConfig(**settings | changes)


def prepare(folder: Path) -> None:
    """Record the sets of both robots, and write statistics that are not alike."""
    for name, table in ROBOTS.items():
        record(folder / name, name)
        ones = SPREADS[name] * np.ones(table.action_dim)
        stats = NormStats(mean=0.1 * ones, std=0.6 * ones, q01=-ones, q99=ones)
        write_norm_stats(folder / "assets" / name, {"state": stats, "actions": stats})


def train(folder: Path, **changes: Any) -> Path:
    """Return the checkpoint of a new run."""
    prepare(folder)
    return train_loop(dataclasses.replace(config(folder), **changes))
