"""Videos of evaluated episodes: the first failures and the first successes.

While an episode runs only poses are kept; pictures are drawn when it is known which are wanted.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from piston.sim.environment import Environment
from piston.sim.scores import Outcome

_HEIGHT, _WIDTH = 240, 320
_FPS = 12.5


class VideoWatcher:
    """Keeps every episode's poses, and draws it at its end until enough of its kind were seen."""

    def __init__(self, folder: Path, of_each: int = 3) -> None:
        self._folder, self._of_each = folder, of_each
        self._poses: dict[int, list[np.ndarray]] = {}
        self._kept: Counter[bool] = Counter()
        self.written: list[Path] = []

    def saw(self, environment: Environment) -> None:
        wants_more = any(self._kept[kind] < self._of_each for kind in (False, True))
        if wants_more and environment.steps % _stride(environment) == 0:
            self._poses.setdefault(environment.seed or 0, []).append(environment.pose())

    def ended(self, environment: Environment, outcome: Outcome) -> None:
        poses = self._poses.pop(outcome.seed, [])
        if not poses or self._kept[outcome.success] >= self._of_each:
            return
        self._kept[outcome.success] += 1
        kind = "success" if outcome.success else "failure"
        path = self._folder / f"{kind}_seed{outcome.seed}.mp4"
        frames = []
        for pose in poses:
            environment.take_pose(pose)
            frames.append(environment.render(_HEIGHT, _WIDTH))
        write_mp4(path, frames, environment.control_hz / _stride(environment))
        self.written.append(path)


def _stride(environment: Environment) -> int:
    return max(1, round(environment.control_hz / _FPS))


def write_mp4(path: Path, frames: list[np.ndarray], fps: float) -> None:
    """H.264 that every browser plays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "27", "preset": "veryfast"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
