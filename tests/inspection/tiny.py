"""A small world with a task, data sets of it with known faults, and policies trained on them.

The front camera sees a red cloth on a wooden table, and the sentence says on which side of its edge
the shoulder stops. The wrist camera sees a curtain, whose height is where the elbow stops. Each
step is a part of the way that is left, so that actions depend on the state as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from piston.config import AdamW, AssetsConfig, CosineDecaySchedule, TrainConfig
from piston.data.pipeline import open_source
from piston.data.record import Recorder
from piston.data.statistics import TransformedColumns, compute_statistics
from piston.models.configs import GemmaSize, Pi0Config, VisionSize
from piston.robots import RobotInputs
from piston.robots.description import DescribedRobotDataConfig
from piston.training.loop import train_loop
from piston.transforms import Data
from piston.transforms.normalize import write_norm_stats

Fault = Literal["pictures shuffled", "sentences shuffled", "wrist camera black"]

PIXELS, FPS = 32, 10.0
# Frames until somebody moves the cloth and the curtain, and how often they do in an episode.
STEPS, WORLDS = 8, 12
# How far from the middle the arm goes, and the share of the way that is left in a step.
REACH, SHARE = 0.6, 0.35
JOINTS = ("shoulder", "elbow")
# What the cameras see around the table and the curtain.
_TILES = np.random.default_rng(0).integers(40, 160, (PIXELS // 4, PIXELS // 4, 3), np.uint8)
ROOM = np.kron(_TILES, np.ones((4, 4, 1), np.uint8))
_ROWS = slice(PIXELS // 4, PIXELS)
# What the sentence adds to the place of the cloth's edge.
SIDES = {"go left of it": -0.4, "go right of it": 0.4}
FRONT, WRIST, STATE, ACTION = (
    *("observation.images.front", "observation.images.wrist"),
    *("observation.state", "action"),
)

ROBOT = RobotInputs(
    name="tiny arm",
    cameras={FRONT: "base_0_rgb", WRIST: "left_wrist_0_rgb"},
    state={STATE: JOINTS},
    actions={ACTION: JOINTS},
    columns={},
    rate=FPS,
)

_VLM = GemmaSize(width=32, depth=1, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=16)
MODEL = Pi0Config(
    action_dim=2,
    action_horizon=4,
    max_token_len=24,
    dtype="float32",
    vision=VisionSize(width=32, depth=0, mlp_dim=32, num_heads=2, patch=16, stem=8),
    vlm=_VLM,
    action_expert=_VLM,
    vocab_size=259,
    image_size=PIXELS,
    cameras=("base_0_rgb", "left_wrist_0_rgb"),
    tokenizer="bytes",
)


class World:
    """Where the edges of the cloth and the curtain are (−1 to 1), and the arm's joints."""

    def __init__(self, random: np.random.Generator, sentence: str) -> None:
        self._random, self.sentence = random, sentence
        self.joints = random.uniform(-0.5, 0.5, 2) * REACH
        self.cloth = self.curtain = 0.0
        self._mirrored: np.ndarray | None = None

    def move_things(self) -> None:
        """Every second time to the opposite places, so that they are 0 on average."""
        if self._mirrored is None:
            places = self._random.uniform(-1, 1, 2)
            self._mirrored = -places
        else:
            places, self._mirrored = self._mirrored, None
        self.cloth, self.curtain = places

    def observation(self) -> Data:
        return {
            FRONT: self._photograph(self._front()),
            WRIST: self._photograph(self._wrist()),
            STATE: self.joints.astype(np.float32),
            "prompt": self.sentence,
        }

    def expert_action(self) -> np.ndarray:
        target = REACH * np.array([self.cloth + SIDES[self.sentence], self.curtain])
        return (self.joints + SHARE * (target - self.joints)).astype(np.float32)

    def _photograph(self, scene: np.ndarray) -> np.ndarray:
        return scene + self._random.integers(8, size=scene.shape, dtype=np.uint8)

    def _front(self) -> np.ndarray:
        image = self._room(self.joints[0])
        image[_ROWS] = (220, 190, 120)
        image[_ROWS, : _pixels(self.cloth)] = (170, 20, 20)
        return image

    def _wrist(self) -> np.ndarray:
        image = self._room(self.joints[1]).transpose(1, 0, 2)
        image[:, _ROWS] = (110, 90, 40)
        image[: _pixels(self.curtain), _ROWS] = (240, 220, 140)
        return image

    def _room(self, joint: float) -> np.ndarray:
        """Return the background, with the arm in it."""
        image, place = ROOM.copy(), _pixels(np.clip(joint, -1, 1))
        image[:, max(0, place - 2) : place + 2] = 240
        return image


def _pixels(place: float) -> int:
    return round((place + 1) / 2 * PIXELS)


def record(folder: Path, fault: Fault | None = None, episodes: int = 8, seed: int = 0) -> Path:
    """Write a data set of demonstrations and return its folder."""
    random = np.random.default_rng(seed)
    sentences = [list(SIDES)[number % 2] for number in range(episodes)]
    frames = [list(_demonstration(random, sentence)) for sentence in sentences]
    if fault == "sentences shuffled":
        # Half of the episodes get the other sentence, equally many of both.
        sentences = [sentences[number // 2] for number in range(episodes)]
    flat = [frame for episode in frames for frame in episode]
    if fault == "pictures shuffled":
        for camera in (FRONT, WRIST):
            shuffled = [flat[i][camera] for i in random.permutation(len(flat))]
            for frame, image in zip(flat, shuffled, strict=True):
                frame[camera] = image
    if fault == "wrist camera black":
        for frame in flat:
            frame[WRIST] = np.zeros_like(frame[WRIST])
    camera = {"dtype": "image", "shape": (PIXELS, PIXELS, 3)}
    numbers = {"dtype": "float32", "shape": (2,), "names": list(JOINTS)}
    features = {FRONT: camera, WRIST: camera, STATE: numbers, ACTION: numbers}
    with Recorder(folder, FPS, features) as recorder:
        for episode, sentence in zip(frames, sentences, strict=True):
            for frame in episode:
                recorder.add_frame(frame, task=sentence)
            recorder.save_episode()
    return folder


def _demonstration(random: np.random.Generator, sentence: str) -> Iterator[Data]:
    world = World(random, sentence)
    for step in range(STEPS * WORLDS):
        if step % STEPS == 0:
            world.move_things()
        action = world.expert_action()
        observation = world.observation()
        yield {**{key: observation[key] for key in (FRONT, WRIST, STATE)}, ACTION: action}
        world.joints = action


def train(data: Path, folder: Path, steps: int = 240) -> Path:
    """Train a policy on a data set and return its checkpoint."""
    config = TrainConfig(
        name="tiny",
        exp_name="run",
        model=MODEL,
        data=DescribedRobotDataConfig(
            repo_id=str(data),
            assets=AssetsConfig(assets_dir=str(folder / "assets"), asset_id="tiny"),
            prompt_from_task=True,
            description=ROBOT,
        ),
        augmentation=False,
        batch_size=8,
        noise_draws=8,
        num_workers=0,
        cache_frames=True,
        num_train_steps=steps,
        log_interval=100,
        save_interval=1_000_000,
        keep_period=None,
        lr_schedule=CosineDecaySchedule(20, 3e-3, decay_steps=steps, decay_lr=3e-5),
        optimizer=AdamW(weight_decay=1e-4),
        ema_decay=0.98,
        checkpoint_base_dir=str(folder),
    )
    pipeline = config.data_config()
    columns = TransformedColumns(open_source(pipeline, MODEL), pipeline, MODEL.action_horizon)
    found = compute_statistics([columns])
    write_norm_stats(folder / "assets" / "tiny", {k: v.norm_stats for k, v in found.items()})
    return train_loop(config)
