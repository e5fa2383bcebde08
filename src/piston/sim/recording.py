"""Demonstrations in simulation, written as a LeRobot data set.

    seeds ──▶ worker processes: simulate, draw ──▶ this process, in the seeds' order ──▶ Recorder

Only episodes that end in success are kept. What comes out depends on the task, the seed and the
number of episodes; not on the number of workers, nor on how often it was stopped and resumed. For
that, `meta/simulation.jsonl` remembers every seed that was tried. The workers end when this process
does, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from piston.data.recorder import Recorder
from piston.data.writer import INFO, read_info
from piston.sim.catalog import make_environment, make_expert
from piston.sim.environment import RECORDING_SEEDS, Environment, Expert, Observation

logger = logging.getLogger(__name__)

LOG = Path("meta/simulation.jsonl")
# Each --seed has this many starts of its own.
SEEDS_PER_RECORDING = 1_000_000
_MAX_RECORDING = 4000  # gym-aloha's random numbers take seeds below 2³²
# Fewer successes than this among so many tries: something is wrong, not unlucky.
_MIN_SUCCESS, _TRIES = 0.1, 30

Progress = Callable[[int, int], None]  # told how many episodes are kept, how many were tried


@dataclasses.dataclass(frozen=True)
class Recording:
    """What to record. Two recordings with different seeds share no start."""

    task: str
    seed: int = 0
    # The side of the camera images; None: the environment's own.
    pixels: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < _MAX_RECORDING:
            raise ValueError(f"The seed goes from 0 to {_MAX_RECORDING - 1}, found {self.seed}.")

    @property
    def first_seed(self) -> int:
        """Of the environment. Evaluation's seeds are all smaller."""
        return RECORDING_SEEDS + self.seed * SEEDS_PER_RECORDING


@dataclasses.dataclass(frozen=True)
class Episode:
    """One try of an expert. A failure has no frames."""

    seed: int
    success: bool
    prompt: str = ""
    frames: tuple[dict[str, np.ndarray], ...] = ()


class Recorded(NamedTuple):
    """What a data set holds after recording, and how many tries that took in all."""

    num_episodes: int
    num_tried: int


def record(
    recording: Recording,
    num_episodes: int,
    out: Path,
    *,
    workers: int = 2,
    codec: str = "h264",
    progress: Progress | None = None,
) -> Recorded:
    """Records until `out` holds at least that many episodes, keeping those it has."""
    if num_episodes < 1 or workers < 1:
        raise ValueError(f"Nothing to do with {num_episodes} episodes and {workers} workers.")
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
                if progress is not None:
                    progress(recorder.num_episodes, tried.num_tried)
        return Recorded(recorder.num_episodes, tried.num_tried)


def _check_codec(out: Path, codec: str) -> None:
    """A set has one codec, which its info.json declares once there is a video."""
    if not (out / INFO).exists():
        return
    entries = read_info(out)["features"].values()
    for found in ((entry.get("info") or {}).get("video.codec") for entry in entries):
        if found not in (None, codec):
            raise ValueError(
                f"{out} holds videos in {found}, asked for is {codec}. Go on with the codec "
                f"{found}, or choose another folder."
            )


def features(environment: Environment) -> dict[str, dict[str, Any]]:
    """The data set's columns, under LeRobot's names."""
    image = (environment.pixels, environment.pixels, 3)
    return {
        **{key: {"dtype": "video", "shape": image} for key in environment.cameras.values()},
        "observation.state": _vector(environment.state_names),
        "action": _vector(environment.action_names),
    }


def _vector(names: tuple[str, ...]) -> dict[str, Any]:
    return {"dtype": "float32", "shape": (len(names),), "names": list(names)}


def demonstrate(environment: Environment, expert: Expert, seed: int) -> Episode:
    """One try. It succeeds if the task is still fulfilled when the expert is done."""
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
    """The seeds that were tried, on disk: one JSON line each, after a line on the recording."""

    def __init__(self, path: Path, lines: list[dict[str, Any]], num_saved: int) -> None:
        self._path = path
        self.num_tried = len(lines)
        self._num_successes = sum(line["success"] for line in lines)
        # Saved in the data set, but its line was never written: we were stopped in between.
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
            path.write_text(json.dumps(header) + "\n")
        found, *lines = _read_lines(path)
        if found.get("pixels", 0) is None:
            # Written before the real size was noted here. The recorder has compared the images.
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
        with self._path.open("a") as file:
            file.write(json.dumps({"seed": episode.seed, "success": episode.success}) + "\n")
        self.num_tried += 1
        self._num_successes += episode.success
        if self.num_tried >= _TRIES and self._num_successes < _MIN_SUCCESS * self.num_tried:
            raise ValueError(
                f"Only {self._num_successes} of {self.num_tried} tries succeeded: the expert does "
                "not fit this task."
            )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines. The last may be cut off: then it is removed from the file as well."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


@contextlib.contextmanager
def _episodes(
    recording: Recording, seeds: Iterator[int], environment: Environment, workers: int
) -> Iterator[Iterator[Episode]]:
    """Tries in the order of the seeds, without end."""
    if workers == 1:
        expert = make_expert(recording.task)
        yield (demonstrate(environment, expert, seed) for seed in seeds)
        return
    # Not forked: a process with threads and OpenGL cannot be.
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
                "A simulating process ended by itself; was there enough memory? What is recorded "
                "so far is safe: run the same command again to go on."
            ) from error


_worker: tuple[Environment, Expert] | None = None


def _start_worker(recording: Recording) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Mesa would draw with extra threads, one per core, in every worker.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    environment = make_environment(recording.task, pixels=recording.pixels)
    _worker = environment, make_expert(recording.task)


def _end_with_parent() -> None:
    """A parent that was killed cannot tell its workers: they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # it is None only in a process that nobody started
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(seed: int) -> Episode:
    assert _worker is not None  # set by _start_worker, says so to mypy
    return demonstrate(*_worker, seed)
