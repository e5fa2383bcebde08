"""Record what a server is asked and answers, as a LeRobot data set.

Each inference becomes one frame: the observation under `observation.…`, the first action of the
chunk under `action` and the whole of it under `action_chunk`, under `request_time` the seconds
since the first request of the episode, and under `executed_steps` how many steps of the chunk
before were past (-1: the client did not say). A new prompt, or a pause, begins a new
episode. Made for one robot: the frames of several would be mixed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from piston.data.record import Recorder
from piston.inference.policy import Policy
from piston.inference.robot_pipeline import REQUEST_KEYS, PreparedRequest
from piston.transforms import flatten_dict
from piston.transforms.images import to_uint8_hwc

logger = logging.getLogger(__name__)

# An episode ends if no request comes for this many seconds.
_PAUSE = 5.0
# The task of requests without a prompt.
NO_PROMPT = "no prompt given"
# The columns of a recording that are not the robot's: the answer, when it was asked for, and after
# how many steps of the chunk before.
ACTION, CHUNK, TIME, EXECUTED = "action", "action_chunk", "request_time", "executed_steps"


def recorded_column(key: str, *, is_image: bool) -> str:
    """Return the column for a key of the robot's observation, such as `images/cam_high`."""
    name = key.replace("/", ".").removeprefix("observation.")
    return f"observation.{'images.' if is_image else ''}{name.removeprefix('images.')}"


class RecordingPolicy:
    """A policy that records its requests and answers; `close` finishes the last episode."""

    def __init__(
        self,
        policy: Policy,
        folder: str | Path,
        fps: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._folder, self._fps, self._clock = policy, Path(folder), fps, clock
        self._folder.mkdir(parents=True, exist_ok=True)  # fails now rather than in an hour
        self._recorder: Recorder | None = None
        self._prompt, self._began, self._last = "", 0.0, 0.0

    @property
    def metadata(self) -> dict[str, Any]:
        return self._policy.metadata

    @property
    def has_sessions(self) -> bool:
        return self._policy.has_sessions

    def prepare(self, observation: Mapping[str, Any]) -> PreparedRequest:
        return self._policy.prepare(observation)

    def infer_batch(
        self, observations: Sequence[Mapping[str, Any] | PreparedRequest]
    ) -> list[dict[str, Any]]:
        now = float(self._clock())
        results = self._policy.infer_batch(observations)
        for request, result in zip(observations, results, strict=True):
            observation = request.observation if isinstance(request, PreparedRequest) else request
            if "actions" not in result:  # the answer to a question
                continue
            try:
                self._add(observation, np.asarray(result["actions"], np.float32), now)
            except (ValueError, OSError) as error:
                # The robot gets its actions all the same.
                logger.error("Not recorded: %s", error)
        return results

    def close(self) -> None:
        if self._recorder is not None:
            self._end_episode(self._recorder)
            self._recorder.finalize()
            self._recorder = None

    def _add(self, observation: Mapping[str, Any], chunk: np.ndarray, now: float) -> None:
        prompt = str(observation.get("prompt", NO_PROMPT))
        frame = recorded_frame(observation, chunk, 0.0)
        if self._recorder is None:
            features = recorded_features(frame)
            self._recorder = Recorder(self._folder, self._fps, features, resume=True)
        elif prompt != self._prompt or now - self._last > _PAUSE:
            self._end_episode(self._recorder)
        if not self._recorder.num_unsaved_frames:
            self._began = now
        self._prompt, self._last = prompt, now
        frame[TIME] = np.array([now - self._began], np.float32)
        self._recorder.add_frame(frame, task=prompt)

    def _end_episode(self, recorder: Recorder) -> None:
        if recorder.num_unsaved_frames:
            recorder.save_episode()
            logger.info("Recorded episode %d in %s", recorder.num_episodes, self._folder)


def recorded_frame(
    observation: Mapping[str, Any], chunk: np.ndarray, seconds: float
) -> dict[str, np.ndarray]:
    """Return the columns of a request, its answer, and when in the episode it was made."""
    own = {key: value for key, value in observation.items() if key not in REQUEST_KEYS}
    executed = observation.get(EXECUTED)
    if not isinstance(executed, int) or not 0 <= executed <= len(chunk):
        executed = -1
    frame = {
        ACTION: chunk[0],
        CHUNK: chunk,
        TIME: np.array([seconds], np.float32),
        EXECUTED: np.array([executed], np.int64),
    }
    for key, value in flatten_dict(own).items():
        array = np.asarray(value)
        if array.ndim == 3:
            frame[recorded_column(key, is_image=True)] = to_uint8_hwc(array, key)
        elif array.ndim <= 1 and np.issubdtype(array.dtype, np.number):
            numbers = np.atleast_1d(array).astype(np.float32)
            frame[recorded_column(key, is_image=False)] = numbers
    return frame


def recorded_features(
    frame: Mapping[str, np.ndarray], *, lossless: bool = False
) -> dict[str, dict[str, Any]]:
    """Declare the columns of a frame; images become videos, or pictures that lose nothing."""
    image = {"dtype": "image" if lossless else "video", "names": ["height", "width", "channels"]}
    return {
        name: {
            **(image if array.ndim == 3 else {"dtype": str(array.dtype), "names": None}),
            "shape": array.shape,
        }
        for name, array in frame.items()
    }
