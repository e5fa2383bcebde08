"""Frames per second of the normalisation statistics, on synthetic columns."""

from __future__ import annotations

import dataclasses
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

from common import main
from piston.cli.console import console
from piston.data.protocol import Episode
from piston.data.statistics import TransformedColumns, compute_statistics
from piston.data.video import num_usable_cpus
from piston.models.configs import Pi0Config
from piston.robots.aloha import LeRobotAlohaDataConfig


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Statistics of 14-dim states and delta actions, nothing decoded."""

    frames: int = 500_000
    episode_length: int = 400
    horizon: int = 50
    # Also translate joints and grippers to the base models' convention.
    adapt_to_pi: bool = False


class SyntheticColumns:
    """Random walks with the columns of an ALOHA data set."""

    keys = ("observation.state", "action")
    cameras = ("observation.images.top",)

    def __init__(self, num_frames: int, episode_length: int) -> None:
        starts = range(0, num_frames, episode_length)
        self.episodes = tuple(
            Episode(index, min(episode_length, num_frames - start))
            for index, start in enumerate(starts)
        )
        self.metadata: Any = types.SimpleNamespace(root="synthetic", tasks={})
        steps = np.random.default_rng(0).normal(0, 0.01, (num_frames, 14)).astype(np.float32)
        state = np.mod(np.cumsum(steps, axis=0), 1.0)
        self._columns = {"observation.state": state, "action": state + steps}

    def __len__(self) -> int:
        return sum(episode.length for episode in self.episodes)

    def column(self, key: str) -> np.ndarray:
        return self._columns[key]


def run(options: Arguments) -> None:
    robot = LeRobotAlohaDataConfig(repo_id="synthetic", adapt_to_pi=options.adapt_to_pi)
    config = robot.create(Path("assets"), Pi0Config(action_horizon=options.horizon))
    dataset = SyntheticColumns(options.frames, options.episode_length)
    for num_threads in sorted({1, num_usable_cpus()}):
        begun, busy = time.perf_counter(), time.process_time()
        columns = TransformedColumns(dataset, config, options.horizon)
        compute_statistics([columns], num_threads=num_threads)
        seconds, busy = time.perf_counter() - begun, time.process_time() - busy
        console().print(
            f"{num_threads} thread{'s' * (num_threads > 1)}: "
            f"{options.frames / seconds:>10,.0f} frames/s; "
            f"{options.frames / busy:,.0f} per second of processor time",
            highlight=False,
        )


if __name__ == "__main__":
    main(run, Arguments)
