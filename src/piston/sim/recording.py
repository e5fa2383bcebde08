"""Demonstrations in simulation, written as a LeRobot data set.

    seeds ──▶ worker processes: simulate, render ──▶ this process, in the seeds' order ──▶ Recorder

Only episodes that end in success are kept. The data set depends on the task, the seed and the
number of episodes, not on the number of workers or on interruptions: `meta/simulation.jsonl` lists
every seed that was tried. The workers end when this process does, however it ends.

Every frame has the subtask that the expert names, and some have questions about the image.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from piston.data.format import INFO, read_info
from piston.data.language import Question
from piston.data.record import Recorder
from piston.files import append_json_lines, read_json_lines, write_json_lines
from piston.progress import Progress, no_progress
from piston.signals import exit_with_parent, ignore_stop_signals
from piston.sim import make_environment, make_expert
from piston.sim.environment import RECORDING_SEEDS, Environment, Expert

LOG = Path("meta/simulation.jsonl")
# Initial states per value of --seed.
SEEDS_PER_RECORDING = 1_000_000
_MAX_RECORDING = 4000  # gym-aloha's random numbers take seeds below 2³²
# A success rate below this after so many tries means that something is wrong.
_MIN_SUCCESS, _TRIES = 0.1, 30
# Frames between questions. MetaWorld's demonstrations end five frames after success, so each has a
# question about its end. A question with the same answer as before waits longer: neighbours look
# alike, and answers that are right most of the time would outweigh the others.
_QUESTION_FRAMES, _SAME_ANSWER_FRAMES = 5, 20
# Which subtasks and questions are written; a set has those of one version.
_LABELS = 1


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


class Frame(NamedTuple):
    """One step of a demonstration, as the recorder takes it."""

    values: dict[str, np.ndarray]
    subtask: str | None
    questions: list[Question]


class Episode(NamedTuple):
    """One try of an expert. A failure has no frames."""

    seed: int
    success: bool
    prompt: str = ""
    frames: tuple[Frame, ...] = ()


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
    _check_labels(out)
    with Recorder(
        *(out, environment.control_hz, features(environment), environment.robot_type, codec),
        resume=True,
        language=True,
    ) as recorder:
        tried = _read_log(out / LOG, recording, recorder.num_episodes)
        num_tried, num_successes = len(tried), sum(line["success"] for line in tried)
        first_seed = recording.first_seed + num_tried
        tries = _episodes(
            recording,
            first_seed,
            environment,
            workers,
            num_missing=lambda: num_episodes - recorder.num_episodes,
        )
        with contextlib.closing(tries) as episodes:
            while recorder.num_episodes < num_episodes:
                episode = next(episodes)
                num_tried += 1
                num_successes += episode.success
                # A stop between saving and logging leaves an episode that is saved already.
                if episode.success and num_successes > recorder.num_episodes:
                    for values, subtask, questions in episode.frames:
                        recorder.add_frame(
                            values, episode.prompt, subtask=subtask, questions=questions
                        )
                    recorder.save_episode()
                append_json_lines(out / LOG, [{"seed": episode.seed, "success": episode.success}])
                if num_tried >= _TRIES and num_successes < _MIN_SUCCESS * num_tried:
                    raise ValueError(
                        f"Only {num_successes} of {num_tried} tries succeeded: the expert does "
                        "not solve this task."
                    )
                failed = num_tried - recorder.num_episodes
                progress(recorder.num_episodes, num_episodes, f"{failed} failed")
        return Recorded(recorder.num_episodes, num_tried)


def _check_codec(out: Path, codec: str) -> None:
    """Raise ValueError if the data set has videos in another codec."""
    entries = read_info(out)["features"].values() if (out / INFO).exists() else ()
    for found in ((entry.get("info") or {}).get("video.codec") for entry in entries):
        if found not in (None, codec):
            raise ValueError(
                f"The videos in {out} are {found}, but --codec is {codec}. Continue with --codec "
                f"{found}, or choose another folder."
            )


def _check_labels(out: Path) -> None:
    """Raise ValueError if the data set has other labels than those that this version writes."""
    header = _header(out)
    if header and header.get("labels") != _LABELS:
        raise ValueError(
            f"{out} was recorded by another version of Piston, which wrote other subtasks and "
            "questions or none. Choose another folder, and record all episodes again."
        )


def features(environment: Environment) -> dict[str, dict[str, Any]]:
    """Return the data set's features under LeRobot's names."""
    image = {"dtype": "video", "shape": (environment.pixels, environment.pixels, 3)}
    vectors = {"observation.state": environment.state_names, "action": environment.action_names}
    return dict.fromkeys(environment.cameras.values(), image) | {
        key: {"dtype": "float32", "shape": (len(names),), "names": list(names)}
        for key, names in vectors.items()
    }


def demonstrate(environment: Environment, expert: Expert, seed: int) -> Episode:
    """Run one try. It succeeds if the task is still fulfilled at its end."""
    observation = environment.reset(seed)
    expert.start(environment)
    frames: list[Frame] = []
    wait: dict[Question, int] = {}
    while not environment.done and (step := expert.act()) is not None:
        action = np.asarray(step.label, np.float32)
        values = {**environment.recorded(observation), "action": action}
        questions, now = [], len(frames)
        if now % _QUESTION_FRAMES == 0:
            questions = [x for x in environment.questions() if wait.get(x, 0) <= now]
            wait |= dict.fromkeys(questions, now + _SAME_ANSWER_FRAMES)
        frames.append(Frame(values, step.subtask or None, questions))
        environment.step(step.executed)
        observation = environment.observe()
    if not environment.held:
        return Episode(seed, success=False)
    return Episode(seed, True, environment.prompt, tuple(frames))


def simulated_task(root: Path) -> str | None:
    """Return the task of a data set that `record` wrote; None for any other data set."""
    header = _header(root)
    return header.get("task") if header else None


def _header(root: Path) -> dict[str, Any] | None:
    """Return the line that describes the recording."""
    return next((line for _, line in read_json_lines(root / LOG)), None)


def _read_log(path: Path, recording: Recording, num_saved: int) -> list[dict[str, Any]]:
    """Return the tries of a recording: JSON lines after a line that describes the recording."""
    folder, header = path.parent.parent, dataclasses.asdict(recording) | {"labels": _LABELS}
    if num_saved and not path.exists():
        raise ValueError(
            f"{folder} holds {num_saved} episodes that were not recorded here (no {path.name}). "
            "Choose another folder."
        )
    # A process that was killed may have left part of a line.
    whole = [line for _, line in read_json_lines(path) if line is not None] or [header]
    write_json_lines(path, whole)
    found, *tried = whole
    if found != header:
        raise ValueError(
            f"{folder} was recorded as {found}, now it is {header}. Choose another folder."
        )
    return tried


def _episodes(
    recording: Recording,
    first_seed: int,
    environment: Environment,
    workers: int,
    num_missing: Callable[[], int],
) -> Generator[Episode, None, None]:
    """Yield tries without end, in the order of the seeds.

    Workers begin no more of them than are missing: it takes long to wait for one that is not used.
    """
    seeds = itertools.count(first_seed)
    if workers == 1:
        expert = make_expert(recording.task)
        yield from (demonstrate(environment, expert, seed) for seed in seeds)  # does not end
    # Not forked: that is not safe with threads and OpenGL.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (recording,))
    try:
        waiting: deque[Future[Episode]] = deque()
        while True:
            while len(waiting) < min(2 * workers, num_missing()):
                waiting.append(pool.submit(_work, next(seeds)))
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise OSError(
            "A simulation process ended unexpectedly; it may have run out of memory. What has "
            "been recorded is safe: run the same command again to continue."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Environment, Expert] | None = None


def _start_worker(recording: Recording) -> None:
    global _worker
    ignore_stop_signals(signal.SIGINT)
    exit_with_parent()
    # Mesa would render with extra threads, one per core, in every worker.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    environment = make_environment(recording.task, pixels=recording.pixels)
    _worker = environment, make_expert(recording.task)


def _work(seed: int) -> Episode:
    assert _worker is not None  # set by _start_worker
    return demonstrate(*_worker, seed)
