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

from piston.files import read_json, write_text

RESULTS = "results.json"
# The data set of the last requests before failures.
FAILURES = "failures"
PERCENTILES = (50, 90, 99)
_DECIMALS = 5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The initial state of one episode and how it ended."""

    seed: int
    prompt: str
    # The task was solved in some step of the episode; it was still solved at the end.
    success: bool
    held: bool
    steps: int
    initial_state: dict[str, Any]
    # Steps until the task was solved for the first time.
    success_step: int | None = None
    # The largest change of any number of the action from one step to the next, on average over the
    # steps onto a new chunk and over all others; None if there was no such step.
    seam_jump: float | None = None
    inner_jump: float | None = None
    # Steps in which the robot waited for a chunk.
    waited: int = 0
    # What the policy said of its chunks (`uncertainty`), averaged over the episode.
    uncertainty: Mapping[str, float] = dataclasses.field(default_factory=dict)


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
    # The subtask of each chunk, if the policy has subtasks.
    subtasks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rate:
    """A success rate with its 95 % Wilson interval."""

    successes: int
    episodes: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Rate:
        return cls(sum(outcome.success for outcome in outcomes), len(outcomes))

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
    """The outcomes of one evaluation, as `results.json` keeps them."""

    task: str
    policy: str
    execute_horizon: int
    outcomes: tuple[Outcome, ...]
    # "p50", "p90", "p99" → milliseconds of an inference, as seen by the robot.
    latency_ms: Mapping[str, float]
    # Whether the prompt asked for the opposite of the task that was scored.
    opposite: bool = False
    # What the robot did while the policy computed, and for how many control steps: None if these
    # were measured.
    execution: str = "wait"
    delay: int | None = 0
    # Actions per second of simulated time.
    control_hz: float | None = None
    # Videos of some episodes.
    videos: tuple[Path, ...] = ()
    # A data set of the last requests of some episodes that failed.
    failures: Path | None = None
    # The actions of the first episode.
    trace: Trace | None = None
    # The name of the folder that it was read from.
    name: str = ""

    @property
    def success(self) -> Rate:
        return Rate.of(self.outcomes)

    @property
    def held(self) -> Rate:
        return Rate(sum(outcome.held for outcome in self.outcomes), len(self.outcomes))

    def mean_of(self, name: str) -> float:
        """Return the mean of a number of the outcomes, over those that have it; NaN if none has."""
        found = [value for one in self.outcomes if (value := getattr(one, name)) is not None]
        return float(np.mean(found)) if found else math.nan

    @property
    def by_prompt(self) -> dict[str, list[Outcome]]:
        groups: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault(outcome.prompt, []).append(outcome)
        return groups

    def outcome_of(self, video: Path) -> Outcome:
        """Return the episode that a video shows: its name contains the seed."""
        for outcome in self.outcomes:
            if outcome.seed == _kind_and_seed(video)[1]:
                return outcome
        raise ValueError(f"{video} belongs to no episode of {self.name}: expected …seedN.mp4.")

    def write(self, folder: Path) -> None:
        """Write `results.json`: the summary first, then every episode with its seed and state."""
        summary = {
            "task": self.task,
            "policy": self.policy,
            "execute_horizon": self.execute_horizon,
            "opposite": self.opposite,
            "execution": self.execution,
            "delay": self.delay,
            "control_hz": self.control_hz,
            "videos": [str(video.relative_to(folder)) for video in self.videos],
            "failures": None if self.failures is None else str(self.failures.relative_to(folder)),
            "episodes": len(self.outcomes),
            "success": {"rate": self.success.value, "interval": self.success.interval},
            "held_at_the_end": {"rate": self.held.value, "interval": self.held.interval},
            "latency_ms": self.latency_ms,
            "outcomes": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }
        text = json.dumps(summary, indent=2)
        if self.trace is not None:
            # Thousands of numbers: on one line, after what people read.
            trace = {
                name: value.round(_DECIMALS).tolist() if isinstance(value, np.ndarray) else value
                for name, value in vars(self.trace).items()
            }
            text = f'{text[:-2]},\n  "trace": {json.dumps(trace)}\n}}'
        write_text(folder / RESULTS, text)


def read_evaluation(folder: Path) -> Evaluation:
    """Read what `piston eval --out FOLDER` wrote."""
    path = folder / RESULTS
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {RESULTS}: give a folder that `piston eval … --out` wrote."
        )
    summary = read_json(path)
    if trace := summary.get("trace"):
        trace |= {name: tuple(trace.get(name, ())) for name in ("names", "starts", "subtasks")}
        trace |= {name: np.array(trace[name]) for name in ("chunks", "executed")}
    return Evaluation(
        **{key: summary[key] for key in ("task", "policy", "execute_horizon", "latency_ms")},
        outcomes=tuple(Outcome(**outcome) for outcome in summary["outcomes"]),
        opposite=summary.get("opposite", False),
        execution=summary.get("execution", "wait"),
        delay=summary.get("delay", 0),
        control_hz=summary.get("control_hz"),
        videos=tuple(sorted((folder / name for name in summary["videos"]), key=_kind_and_seed)),
        failures=folder / summary["failures"] if summary.get("failures") else None,
        trace=Trace(**trace) if trace else None,
        name=folder.resolve().name,
    )


def _kind_and_seed(video: Path) -> tuple[str, int]:
    kind, _, seed = video.stem.partition("seed")
    return kind, int(seed) if seed.isdecimal() else -1


def latency_percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the milliseconds that 50, 90 and 99 % of the inferences took at most."""
    return {
        f"p{p}": 1e3 * float(np.percentile(seconds, p)) if seconds else math.nan
        for p in PERCENTILES
    }
