"""Evaluations as `piston eval` leaves them: `results.json`, and perhaps `videos/`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from piston.sim.scores import Outcome, Rate, Trace

RESULTS = "results.json"


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """What is read back of a `piston.sim.scores.Evaluation`."""

    # The folder's name.
    name: str
    task: str
    policy: str
    execute_horizon: int
    outcomes: tuple[Outcome, ...]
    latency_ms: Mapping[str, float]
    videos: tuple[Path, ...]
    # Whether the sentence asked for the opposite of what was counted.
    opposite: bool = False
    # The actions of the first episode.
    trace: Trace | None = None

    @property
    def success(self) -> Rate:
        return Rate(sum(outcome.success for outcome in self.outcomes), len(self.outcomes))

    @property
    def held(self) -> Rate:
        return Rate(sum(outcome.held for outcome in self.outcomes), len(self.outcomes))

    def outcome_of(self, video: Path) -> Outcome:
        """Whose video it is: its name tells the seed."""
        seed = re.search(r"seed(\d+)", video.stem)
        for outcome in self.outcomes:
            if seed is not None and outcome.seed == int(seed[1]):
                return outcome
        raise ValueError(f"{video} belongs to no episode of {self.name}: expected …seedN.mp4.")

    @property
    def by_prompt(self) -> dict[str, list[Outcome]]:
        groups: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault(outcome.prompt, []).append(outcome)
        return groups


def find_evaluations(run: Path, given: Sequence[Path] = ()) -> list[EvaluationResult]:
    """Those in the given folders; without any, those in folders directly below the run."""
    if not given:
        return [read_evaluation(path.parent) for path in sorted(run.glob(f"*/{RESULTS}"))]
    return [read_evaluation(folder) for folder in given]


def read_evaluation(folder: Path) -> EvaluationResult:
    path = folder / RESULTS
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {RESULTS}: give a folder that `piston eval … --out` wrote."
        )
    summary = json.loads(path.read_text())
    return EvaluationResult(
        name=folder.resolve().name,
        task=summary["task"],
        policy=summary["policy"],
        execute_horizon=summary["execute_horizon"],
        outcomes=tuple(Outcome(**outcome) for outcome in summary["outcomes"]),
        latency_ms=summary["latency_ms"],
        opposite=summary.get("opposite", False),
        videos=tuple(sorted((folder / name for name in summary["videos"]), key=_in_order)),
        trace=Trace.from_json(summary["trace"]) if "trace" in summary else None,
    )


def _in_order(path: Path) -> list[tuple[str, int]]:
    """By name, numbers in it by their size."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", path.stem)]
