"""Demonstrations in simulation, written as a LeRobot data set.

    seeds ──▶ worker processes: simulate, render ──▶ this process, in the seeds' order ──▶ Recorder

Only episodes that end in success are kept. The data set depends on the task, the seed and the
number of episodes, not on the number of workers or on interruptions: `meta/simulation.jsonl` lists
every seed that was tried. The workers end when this process does, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from piston.data.format import read_info
from piston.data.recorder import Recorder
from piston.data.writer import INFO
from piston.files import append_json_lines, read_json_lines, write_json_lines
from piston.progress import Progress, no_progress
from piston.signals import ignore_stop_signals
from piston.sim import make_environment, make_expert
from piston.sim.environment import RECORDING_SEEDS, Environment, Expert, Observation

logger = logging.getLogger(__name__)

LOG = Path("meta/simulation.jsonl")
# Initial states per value of --seed.
SEEDS_PER_RECORDING = 1_000_000
_MAX_RECORDING = 4000  # gym-aloha's random numbers take seeds below 2³²
# A success rate below this after so many tries means that something is wrong.
_MIN_SUCCESS, _TRIES = 0.1, 30


@dataclasses.dataclass(frozen=True)
class Recording:
    """What to record. Recordings with different seeds share no initial state."""

    task: str
    seed: int = 0
    # The side of the camera images; None: the environment's own.
    pixels: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < _MAX_RECORDING:
            raise ValueError(f"The seed goes from 0 to {_MAX_RECORDING - 1}, found {self.seed}.")

    @property
    def first_seed(self) -> int:
        """The environment's first seed. The seeds of evaluations are all smaller."""
        return RECORDING_SEEDS + self.seed * SEEDS_PER_RECORDING


@dataclasses.dataclass(frozen=True)
class Episode:
    """One try of an expert. A failure has no frames."""

    seed: int
    success: bool
    prompt: str = ""
    frames: tuple[dict[str, np.ndarray], ...] = ()


class Recorded(NamedTuple):
    """The number of episodes in the data set after recording, and of all tries."""

    num_episodes: int
    num_tried: int


def record(
    recording: Recording,
    num_episodes: int,
    out: Path,
    *,
    workers: int = 2,
    codec: str = "h264",
    progress: Progress = no_progress,
) -> Recorded:
    """Record until `out` holds at least `num_episodes`; existing episodes are kept."""
    if num_episodes < 1 or workers < 1:
        raise ValueError(
            f"num_episodes is {num_episodes} and workers {workers}; expected at least 1."
        )
    environment = make_environment(recording.task, pixels=recording.pixels)
    # The environment's own size and the same size given as a number are one recording.
    recording = dataclasses.replace(recording, pixels=environment.pixels)
    _check_codec(out, codec)
    recorder = Recorder(
        out,
        environment.control_hz,
        features(environment),
        environment.robot_type,
        codec=codec,
        resume=True,
    )
    with recorder:
        tried = _Tried.open(out / LOG, recording, recorder.num_episodes)
        seeds = itertools.count(recording.first_seed + tried.num_tried)
        with _episodes(recording, seeds, environment, workers) as episodes:
            while recorder.num_episodes < num_episodes:
                episode = next(episodes)
                if episode.success and not tried.is_saved(episode):
                    _save(recorder, episode)
                tried.add(episode)
                failed = tried.num_tried - recorder.num_episodes
                progress(recorder.num_episodes, num_episodes, f"{failed} failed")
        return Recorded(recorder.num_episodes, tried.num_tried)


def _check_codec(out: Path, codec: str) -> None:
    """Raise ValueError if the data set has videos in another codec."""
    if not (out / INFO).exists():
        return
    entries = read_info(out)["features"].values()
    for found in ((entry.get("info") or {}).get("video.codec") for entry in entries):
        if found not in (None, codec):
            raise ValueError(
                f"The videos in {out} are {found}, but --codec is {codec}. Continue with --codec "
                f"{found}, or choose another folder."
            )


def features(environment: Environment) -> dict[str, dict[str, Any]]:
    """Return the data set's features under LeRobot's names."""
    image = (environment.pixels, environment.pixels, 3)
    return {
        **{key: {"dtype": "video", "shape": image} for key in environment.cameras.values()},
        "observation.state": _vector(environment.state_names),
        "action": _vector(environment.action_names),
    }


def _vector(names: tuple[str, ...]) -> dict[str, Any]:
    return {"dtype": "float32", "shape": (len(names),), "names": list(names)}


def demonstrate(environment: Environment, expert: Expert, seed: int) -> Episode:
    """Run one try. It succeeds if the task is still fulfilled at its end."""
    observation = environment.reset(seed)
    expert.start(environment)
    frames = []
    while not environment.done and (step := expert.act()) is not None:
        frames.append(_frame(environment, observation, step.label))
        environment.step(step.executed)
        observation = environment.observe()
    if not environment.held:
        return Episode(seed, success=False)
    return Episode(seed, True, environment.prompt, tuple(frames))


def _frame(
    environment: Environment, observation: Observation, action: np.ndarray
) -> dict[str, np.ndarray]:
    return {
        **{key: observation["images"][camera] for camera, key in environment.cameras.items()},
        "observation.state": observation["state"],
        "action": np.asarray(action, np.float32),
    }


def _save(recorder: Recorder, episode: Episode) -> None:
    for frame in episode.frames:
        recorder.add_frame(frame, episode.prompt)
    recorder.save_episode()


class _Tried:
    """The seeds that were tried, as JSON lines after a line that describes the recording."""

    def __init__(self, path: Path, lines: list[dict[str, Any]], num_saved: int) -> None:
        self._path = path
        self.num_tried = len(lines)
        self._num_successes = sum(line["success"] for line in lines)
        # Saved in the data set, but stopped before the line was written.
        self._num_unlogged = num_saved - self._num_successes

    @classmethod
    def open(cls, path: Path, recording: Recording, num_saved: int) -> _Tried:
        header = dataclasses.asdict(recording)
        if not path.exists():
            if num_saved:
                raise ValueError(
                    f"{path.parent.parent} holds {num_saved} episodes that were not recorded here "
                    f"(no {path.name}). Choose another folder."
                )
            write_json_lines(path, [header])
        # A process that was killed may have left part of a line.
        found, *lines = whole = [line for _, line in read_json_lines(path) if line is not None]
        write_json_lines(path, whole)
        if found.get("pixels", 0) is None:
            # Written by an early version. The recorder has compared the images.
            found["pixels"] = recording.pixels
        if found != header:
            raise ValueError(
                f"{path.parent.parent} was recorded as {found}, now it is {header}. "
                "Choose another folder."
            )
        return cls(path, lines, num_saved)

    def is_saved(self, episode: Episode) -> bool:
        """Whether the data set already holds this success."""
        return episode.success and self._num_unlogged > 0

    def add(self, episode: Episode) -> None:
        if self.is_saved(episode):
            self._num_unlogged -= 1
        append_json_lines(self._path, [{"seed": episode.seed, "success": episode.success}])
        self.num_tried += 1
        self._num_successes += episode.success
        if self.num_tried >= _TRIES and self._num_successes < _MIN_SUCCESS * self.num_tried:
            raise ValueError(
                f"Only {self._num_successes} of {self.num_tried} tries succeeded: the expert does "
                "not solve this task."
            )


@contextlib.contextmanager
def _episodes(
    recording: Recording, seeds: Iterator[int], environment: Environment, workers: int
) -> Iterator[Iterator[Episode]]:
    """Yield an endless iterator over tries, in the order of the seeds."""
    if workers == 1:
        expert = make_expert(recording.task)
        yield (demonstrate(environment, expert, seed) for seed in seeds)
        return
    # Not forked: that is not safe with threads and OpenGL.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (recording,))
    try:
        yield _in_order(pool, seeds, ahead=2 * workers)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, seeds: Iterator[int], ahead: int) -> Iterator[Episode]:
    waiting: deque[Future[Episode]] = deque()
    while True:
        while len(waiting) < ahead:
            waiting.append(pool.submit(_work, next(seeds)))
        try:
            yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise OSError(
                "A simulation process ended unexpectedly; it may have run out of memory. What has "
                "been recorded is safe: run the same command again to continue."
            ) from error


_worker: tuple[Environment, Expert] | None = None


def _start_worker(recording: Recording) -> None:
    global _worker
    ignore_stop_signals(signal.SIGINT)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Mesa would render with extra threads, one per core, in every worker.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    environment = make_environment(recording.task, pixels=recording.pixels)
    _worker = environment, make_expert(recording.task)


def _end_with_parent() -> None:
    """End this worker when its parent ends: a killed parent cannot tell its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # None only in the main process
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(seed: int) -> Episode:
    assert _worker is not None  # set by _start_worker
    return demonstrate(*_worker, seed)
