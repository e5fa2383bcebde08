"""Keeping a control rate, and the summary of how well it was kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

EndedBy = Literal["done", "max_steps", "stopped", "interrupted", "held", "error"]


class Pacer:
    """Steps begin at `start + n · period`, so that delays do not add up.

    A step that takes too long is an overrun. The next one begins at once and is shorter; steps
    whose whole time has passed are skipped, not made up for in a burst.
    """

    def __init__(self, period: float, start: float) -> None:
        self.start = start
        self._period = period
        self._index = 0

    @property
    def begin(self) -> float:
        """When the current step is due to begin."""
        return self.start + self._index * self._period

    def advance(self, now: float) -> tuple[float, int]:
        """Go on to the next step; return the overrun in seconds and the number of skipped steps."""
        self._index += 1
        overrun = max(0.0, now - self.begin)
        num_skipped = math.floor(overrun / self._period) if overrun > self._period else 0
        self._index += num_skipped
        return overrun, num_skipped


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """How long something took, in milliseconds."""

    p50: float
    p90: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        if not seconds:
            return cls(*[math.nan] * 4)
        milliseconds = 1e3 * np.asarray(seconds)
        return cls(*map(float, np.percentile(milliseconds, [50, 90, 99, 100])))

    def __str__(self) -> str:
        return (
            f"median {self.p50:.2f} ms, 90 % {self.p90:.2f} ms, 99 % {self.p99:.2f} ms, "
            f"worst {self.worst:.2f} ms"
        )


@dataclasses.dataclass
class Summary:
    """What a run was like; the runtime fills it in. Times are in seconds."""

    ended_by: EndedBy = "error"
    num_episodes: int = 0
    # From the first step to the last, without resets.
    seconds: float = 0.0
    # Steps that took longer than a period, by how much at worst, and steps left out because of it.
    num_overruns: int = 0
    worst_overrun: float = 0.0
    num_skipped: int = 0
    # Steps without an answer of their own, and the longest time without one.
    num_held: int = 0
    longest_hold: float = 0.0
    # The last error that made the robot hold.
    last_error: Exception | None = None
    agent_seconds: list[float] = dataclasses.field(default_factory=list, repr=False)
    step_seconds: list[float] = dataclasses.field(default_factory=list, repr=False)

    @property
    def num_steps(self) -> int:
        return len(self.step_seconds)

    @property
    def agent(self) -> Percentiles:
        """How long the agent's answers took."""
        return Percentiles.of(self.agent_seconds)

    @property
    def step(self) -> Percentiles:
        """How long whole steps took."""
        return Percentiles.of(self.step_seconds)

    @property
    def achieved_hz(self) -> float:
        return self.num_steps / self.seconds if self.seconds > 0 else math.nan

    def __str__(self) -> str:
        lines = [
            f"{self.num_steps} steps in {self.num_episodes} episodes at {self.achieved_hz:.1f} Hz; "
            f"ended by: {self.ended_by}",
            f"overruns: {self.num_overruns} (worst {1e3 * self.worst_overrun:.1f} ms), "
            f"{self.num_skipped} steps left out",
            f"held: {self.num_held} steps (longest {self.longest_hold:.2f} s)",
            f"agent: {self.agent}",
            f"step: {self.step}",
        ]
        return "\n".join(lines)
