"""Does a policy know when it fails? Its uncertainty against the outcomes of episodes.

    python benchmarks/uncertainty.py CHECKPOINT --task metaworld:tiny --episodes 250 --candidates 4

For each sign of failure in the replies, averaged over an episode, the AUROC is the probability that
an episode that failed has a larger value than one that succeeded: 0.5 is a guess. Tasks differ in
how uncertain they are, so it is also computed within each task and averaged. Intervals are those of
95 % of bootstrap samples of the episodes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from common import main
from piston.cli.console import console, table
from piston.inference import load_policy
from piston.progress import ProgressBar
from piston.sim.rollouts import evaluate
from piston.sim.scores import Outcome

Score = Callable[[Sequence[Outcome], str], float]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """AUROC of a policy's uncertainty against failed episodes."""

    # A checkpoint whose policy fails sometimes.
    checkpoint: Annotated[Path, tyro.conf.Positional]
    # The simulated task.
    task: str = "metaworld:tiny"
    # Episodes, from seed 0 on.
    episodes: int = 250
    # Chunks per request.
    candidates: int = 4
    # Steps of each chunk that are executed; by default half of them.
    execute_horizon: int | None = None
    # Bootstrap samples of the interval.
    samples: int = 2_000
    # Also write the numbers to this file.
    json: Path | None = None


def run(options: Arguments) -> None:
    policy = load_policy(options.checkpoint, candidates=options.candidates)
    with ProgressBar(options.task, "episodes", options.episodes) as bar:
        found = evaluate(
            options.task,
            policy.infer_batch,
            range(options.episodes),
            execute_horizon=options.execute_horizon,
            policy_name=str(options.checkpoint),
            metadata=policy.metadata,
            on_outcome=lambda _: bar.advance(1),
        )
    outcomes = found.outcomes
    console().print(f"{found.success} succeeded, {options.candidates} candidates")
    rows, numbers = [], {}
    for name in outcomes[0].uncertainty:
        for kind, score in (("all episodes", _auroc), ("within tasks", _auroc_within)):
            value, low, high = _interval(outcomes, name, score, options.samples)
            rows.append((name, kind, f"{value:.2f} ({low:.2f} to {high:.2f})"))
            numbers[f"{name}, {kind}"] = (value, low, high)
    console().print(table(("sign", "compared", "AUROC"), rows, right=("AUROC",)))
    if options.json is not None:
        options.json.write_text(json.dumps({"success": str(found.success), **numbers}, indent=1))


def _auroc(outcomes: Sequence[Outcome], name: str) -> float:
    """Return NaN if all episodes ended alike."""
    failed = np.array([one.uncertainty[name] for one in outcomes if not one.success])
    solved = np.array([one.uncertainty[name] for one in outcomes if one.success])
    if not len(failed) or not len(solved):
        return float("nan")
    larger = failed[:, None] > solved
    return float((larger + 0.5 * (failed[:, None] == solved)).mean())


def _auroc_within(outcomes: Sequence[Outcome], name: str) -> float:
    """Return the mean over tasks, weighted by the pairs of episodes that are compared."""
    total, pairs = 0.0, 0
    for prompt in {one.prompt for one in outcomes}:
        alike = [one for one in outcomes if one.prompt == prompt]
        failures = sum(not one.success for one in alike)
        if count := failures * (len(alike) - failures):
            total, pairs = total + count * _auroc(alike, name), pairs + count
    return total / pairs if pairs else float("nan")


def _interval(
    outcomes: Sequence[Outcome], name: str, score: Score, samples: int
) -> tuple[float, float, float]:
    random = np.random.default_rng(0)
    drawn = [
        score([outcomes[i] for i in random.integers(len(outcomes), size=len(outcomes))], name)
        for _ in range(samples)
    ]
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return score(outcomes, name), float(low), float(high)


if __name__ == "__main__":
    main(run, Arguments)
