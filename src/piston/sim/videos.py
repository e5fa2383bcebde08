"""Videos of evaluated episodes: the first failures and the first successes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from piston.sim.environment import Environment
from piston.sim.scores import Outcome

_HEIGHT, _WIDTH = 240, 320


class VideoWatcher:
    """Draws every `stride`-th step of every episode until enough of either kind were seen."""

    def __init__(self, folder: Path, of_each: int = 3, stride: int = 2) -> None:
        self._folder, self._of_each, self._stride = folder, of_each, stride
        self._frames: dict[int, list[np.ndarray]] = {}
        self._fps: dict[int, float] = {}
        self._kept: Counter[bool] = Counter()
        self.written: list[Path] = []

    def saw(self, environment: Environment) -> None:
        wants_more = any(self._kept[kind] < self._of_each for kind in (False, True))
        if wants_more and environment.steps % self._stride == 0:
            seed = environment.seed or 0
            self._fps[seed] = environment.control_hz / self._stride
            self._frames.setdefault(seed, []).append(environment.render(_HEIGHT, _WIDTH))

    def ended(self, outcome: Outcome) -> None:
        frames = self._frames.pop(outcome.seed, [])
        if frames and self._kept[outcome.success] < self._of_each:
            self._kept[outcome.success] += 1
            kind = "success" if outcome.success else "failure"
            path = self._folder / f"{kind}_seed{outcome.seed}.mp4"
            write_mp4(path, frames, self._fps[outcome.seed])
            self.written.append(path)


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
