"""Results of evaluations: success rates with intervals, latencies, and the file they go to."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from piston.files import write_text

_DECIMALS = 5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The initial state of one episode and how it ended."""

    seed: int
    prompt: str
    # The task was fulfilled at some time; it was still fulfilled at the end.
    success: bool
    held: bool
    steps: int
    initial_state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Trace:
    """The actions of one episode: every predicted chunk, and what was executed."""

    seed: int
    # The meaning of each action dimension, and actions per second.
    names: tuple[str, ...]
    hz: float
    # The step at which each chunk was requested.
    starts: tuple[int, ...]
    chunks: Float[np.ndarray, "n h a"]
    executed: Float[np.ndarray, "t a"]

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("seed", "names", "hz", "starts")},
            "chunks": self.chunks.round(_DECIMALS).tolist(),
            "executed": self.executed.round(_DECIMALS).tolist(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        return cls(
            data["seed"],
            tuple(data["names"]),
            data["hz"],
            tuple(data["starts"]),
            np.array(data["chunks"]),
            np.array(data["executed"]),
        )


@dataclasses.dataclass(frozen=True)
class Rate:
    """A success rate with its 95 % Wilson interval."""

    successes: int
    episodes: int

    @property
    def value(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.episodes:
            return (0.0, 1.0)
        z, n = 1.959964, self.episodes
        centre = (self.value + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * math.sqrt(self.value * (1 - self.value) / n + z**2 / (4 * n**2))
        return (max(0.0, centre - half), min(1.0, centre + half))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.successes}/{self.episodes} = {self.value:.0%} ({low:.0%} to {high:.0%})"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Everything that is stored about one evaluation."""

    task: str
    policy: str
    execute_horizon: int
    outcomes: tuple[Outcome, ...]
    # Seconds of each inference as seen by the robot.
    latencies: tuple[float, ...]
    # Whether the prompt asked for the opposite of the task that was scored.
    opposite: bool = False
    # Videos of some episodes, relative to the results.
    videos: tuple[str, ...] = ()
    # The actions of the first episode.
    trace: Trace | None = None

    @property
    def success(self) -> Rate:
        return Rate(sum(outcome.success for outcome in self.outcomes), len(self.outcomes))

    @property
    def held(self) -> Rate:
        return Rate(sum(outcome.held for outcome in self.outcomes), len(self.outcomes))

    def per_prompt(self) -> dict[str, Rate]:
        prompts = dict.fromkeys(outcome.prompt for outcome in self.outcomes)
        return {
            prompt: Rate(sum(o.success for o in chosen), len(chosen))
            for prompt in prompts
            if (chosen := [o for o in self.outcomes if o.prompt == prompt])
        }

    def latency(self, percentile: float) -> float:
        return float(np.percentile(self.latencies, percentile)) if self.latencies else math.nan

    def write(self, path: Path) -> None:
        """Write JSON: the summary first, then every episode with its seed and initial state."""
        summary = {
            "task": self.task,
            "policy": self.policy,
            "execute_horizon": self.execute_horizon,
            "opposite": self.opposite,
            "videos": self.videos,
            "episodes": len(self.outcomes),
            "success": {"rate": self.success.value, "interval": self.success.interval},
            "held_at_the_end": {"rate": self.held.value, "interval": self.held.interval},
            "latency_ms": {f"p{p}": 1e3 * self.latency(p) for p in (50, 90, 99)},
            "outcomes": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }
        text = json.dumps(summary, indent=2)
        if self.trace is not None:
            # Thousands of numbers: on one line, after what people read.
            text = f'{text[:-2]},\n  "trace": {json.dumps(self.trace.to_json())}\n}}'
        write_text(path, text)


def parse_seeds(text: str) -> Sequence[int]:
    """Parse `0..49` (0 to 49) or a list such as `3,7,9`."""
    try:
        first, dots, last = text.partition("..")
        seeds = range(int(first), int(last) + 1) if dots else [int(one) for one in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"Seeds are {text!r}; expected a range such as 0..49 or a list 3,7,9.")
    return seeds
