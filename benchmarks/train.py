"""Samples per second of a mid-size π0 in training, through the whole training loop.

A small data set is recorded, its frames are cached, and every variant is a run of a few steps of
the real loop (loader, augmentation, forward, backward, clipping, AdamW): with and without gradient
checkpointing, and with several draws of noise per prefix. The first step of a run is not counted.
Of the others the fastest counts: whatever else the machine does can only slow one down.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from rich.table import Table

from common import main
from piston.cli.console import console
from piston.config import AssetsConfig, TrainConfig
from piston.data.record import Recorder
from piston.models.configs import GEMMA, VISION, Dtype, GemmaSize, Pi0Config, VisionSize
from piston.robots.aloha import DIM, LeRobotAlohaDataConfig
from piston.training.loop import train_loop
from piston.training.trackers import METRICS, read_metrics
from piston.transforms import Group, RepackTransform
from piston.transforms.normalize import NormStats, write_norm_stats

_MID_VLM = GemmaSize(width=512, depth=8, mlp_dim=2048, num_heads=8, num_kv_heads=1, head_dim=64)
_MODELS = {
    "mid": Pi0Config(
        max_token_len=12,
        vision=VisionSize(width=384, depth=12, mlp_dim=1536, num_heads=6, patch=16),
        vlm=_MID_VLM,
        action_expert=dataclasses.replace(_MID_VLM, width=256, mlp_dim=1024),
        vocab_size=8192,
        tokenizer="bytes",
    ),
    # Too small to be worth measuring, but quick.
    "dummy": Pi0Config(
        max_token_len=12,
        vision=VISION["dummy"],
        vlm=GEMMA["dummy"],
        action_expert=GEMMA["dummy"],
        vocab_size=300,
        tokenizer="bytes",
    ),
}
_CAMERAS = ("cam_high", "cam_left_wrist")  # of the model's three
_TASK = "stack cups"  # twelve tokens, with those at the beginning and the end


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Samples per second of full training steps, and what saves memory or shares work."""

    # The model: of the middle size, or a dummy to see that the benchmark works.
    size: Annotated[Literal["mid", "dummy"], tyro.conf.Positional] = "mid"
    # Samples per step.
    batch_size: int = 8
    # What products are computed in; master weights are float32.
    dtype: Dtype = "bfloat16"
    # Draws of noise and time per prefix.
    draws: tuple[int, ...] = (1, 4, 8)
    # Steps that are timed in each run, after one that is not.
    steps: int = 3
    # Runs of every variant, in turn, so that a busy moment does not hit one of them alone.
    repeats: int = 1
    # Processes that read data.
    num_workers: int = 1


@dataclasses.dataclass(frozen=True)
class Variant:
    draws: int
    gradient_checkpointing: bool = False

    def __str__(self) -> str:
        draws = f"{self.draws} draw{'s' * (self.draws > 1)} per prefix"
        return draws + (", gradient checkpointing" if self.gradient_checkpointing else "")


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one step."""

    samples_per_second: float
    waiting_for_data: float


def run(options: Arguments) -> None:
    variants = [Variant(draws) for draws in options.draws]
    variants.append(Variant(options.draws[0], gradient_checkpointing=True))
    logging.getLogger().setLevel(logging.WARNING)
    steps: dict[Variant, list[Measured]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory() as folder:
        config = _prepare(options, Path(folder))
        os.environ["PISTON_HOME"] = f"{folder}/home"  # where the cache goes
        for _ in range(options.repeats):
            for variant in variants:
                steps[variant] += _measure(config, variant)
    console().print(_table(options, config, steps))


def _prepare(options: Arguments, folder: Path) -> TrainConfig:
    data = record(folder / "cups")
    stats = NormStats(np.zeros(DIM), np.ones(DIM))
    write_norm_stats(folder / "assets" / "cups", {"state": stats, "actions": stats})
    return TrainConfig(
        name="bench",
        exp_name="train",
        model=dataclasses.replace(_MODELS[options.size], dtype=options.dtype),
        data=dataclasses.replace(data, assets=AssetsConfig(str(folder / "assets"), "cups")),
        ema_decay=None,
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        num_train_steps=1 + options.steps,
        cache_frames=True,
        log_interval=1,
        overwrite=True,
        checkpoint_base_dir=str(folder / "checkpoints"),
    )


def record(folder: Path, *, episodes: int = 2, frames: int = 60) -> LeRobotAlohaDataConfig:
    """A small data set of the robot's kind, and how it is read."""
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": (DIM,), "names": None},
        "action": {"dtype": "float32", "shape": (DIM,), "names": None},
    }
    keys = {camera: f"observation.images.{camera}" for camera in _CAMERAS}
    for key in keys.values():
        features[key] = {
            "dtype": "video",
            "shape": (240, 320, 3),
            "names": ["height", "width", "channel"],
        }
    random = np.random.default_rng(0)
    image = random.integers(256, size=(240, 320, 3), dtype=np.uint8)
    with Recorder(folder, fps=50, features=features, codec="h264") as recorder:
        for _ in range(episodes):
            for frame in range(frames):
                numbers = {
                    key: random.uniform(0, 1, DIM).astype(np.float32)
                    for key in ("observation.state", "action")
                }
                pictures = {key: np.roll(image, frame, axis=1) for key in keys.values()}
                recorder.add_frame({**numbers, **pictures}, task=_TASK)
            recorder.save_episode()
    repack = {"images": keys, "state": "observation.state", "actions": "action"}
    return LeRobotAlohaDataConfig(
        repo_id=str(folder),
        prompt_from_task=True,
        repack_transforms=Group(inputs=(RepackTransform(repack),)),
    )


def _measure(config: TrainConfig, variant: Variant) -> list[Measured]:
    config = dataclasses.replace(
        config,
        noise_draws=variant.draws,
        gradient_checkpointing=variant.gradient_checkpointing,
    )
    checkpoint = train_loop(config)
    lines = read_metrics(checkpoint.parent / METRICS)[1:]
    return [Measured(line["samples_per_second"], line["waiting_for_data"]) for line in lines]


def _table(options: Arguments, config: TrainConfig, steps: dict[Variant, list[Measured]]) -> Table:
    title = (
        f"π0 ({options.size}), float32 masters, computed in {config.model.dtype}, batch "
        f"{config.batch_size}, {len(_CAMERAS)} of {len(config.model.cameras)} cameras, "
        f"{torch.get_num_threads()} threads, cached frames, fastest of "
        f"{options.steps * options.repeats} steps"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "samples/s", "(observation, noise) pairs/s", "relative", "waiting for data"):
        table.add_column(column, justify="right" if column else "left")
    rates = {v: max(m.samples_per_second for m in of) for v, of in steps.items()}
    first = next(iter(steps))
    for variant, measured in steps.items():
        pairs, base = rates[variant] * variant.draws, rates[first] * first.draws
        waiting = statistics.mean(m.waiting_for_data for m in measured)
        table.add_row(
            str(variant),
            f"{rates[variant]:.2f}",
            f"{pairs:.2f}",
            f"{pairs / base:.2f} ×",
            f"{waiting:.1%}",
        )
    return table


if __name__ == "__main__":
    main(run, Arguments)
