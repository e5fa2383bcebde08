"""What a policy saw before it failed: its last requests, as a data set that `piston inspect` opens.

Only observations and answers are written, so that the policy may be behind a websocket. The set has
the form of a server's recording (`piston serve --record`), with images that lose nothing and the
seed of each request's noise.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from piston.data.format import not_a_written_set
from piston.data.record import Recorder
from piston.files import atomic_folder
from piston.inference.recording import recorded_features, recorded_frame  # imports torch
from piston.sim.environment import Environment, Observation
from piston.sim.scores import Outcome

# Of an episode.
_NUM_REQUESTS = 8


class FailureWriter:
    """Keeps the last requests of running episodes; writes those of the first `count` that fail."""

    def __init__(self, folder: Path, count: int) -> None:
        if count < 1:
            raise ValueError(f"--inspect-failures is {count}; expected at least 1.")
        self._folder, self._count = folder, count
        self._requests: dict[int, deque[dict[str, np.ndarray]]] = {}
        self._recorder: Recorder | None = None
        self.num_written = 0

    def add_request(
        self, environment: Environment, observation: Observation, chunk: np.ndarray
    ) -> None:
        if self.num_written < self._count:
            seconds = environment.steps / environment.control_hz
            frame = recorded_frame(observation, np.asarray(chunk, np.float32), seconds)
            frame["seed"] = np.array([observation["seed"]], np.int64)
            kept = self._requests.setdefault(environment.seed or 0, deque(maxlen=_NUM_REQUESTS))
            kept.append(frame)

    def end_episode(self, environment: Environment, outcome: Outcome, steps_each: int) -> None:
        """Write the requests of an episode that failed; one was made every `steps_each` steps."""
        requests = self._requests.pop(outcome.seed, ())
        if outcome.success or not requests or self.num_written == self._count:
            return
        if self._recorder is None:
            features = recorded_features(requests[0], lossless=True)
            rate = environment.control_hz / steps_each
            self._recorder = Recorder(self._folder, rate, features, environment.robot_type)
        for frame in requests:
            self._recorder.add_frame(frame, outcome.prompt)
        self._recorder.save_episode()
        self.num_written += 1

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.finalize()


@contextlib.contextmanager
def recording_failures(folder: Path, count: int) -> Iterator[FailureWriter]:
    """Yield a writer of a data set, which replaces that of an earlier evaluation at the end."""
    with (
        atomic_folder(folder, overwrite=not_a_written_set) as temporary,
        contextlib.closing(FailureWriter(temporary, count)) as writer,
    ):
        yield writer
    if not writer.num_written:
        folder.rmdir()
