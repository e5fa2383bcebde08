"""Evaluations of a run, as `piston eval` leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from piston.sim.scores import RESULTS, Evaluation, read_evaluation


def find_evaluations(run: Path, given: Sequence[Path] = ()) -> list[Evaluation]:
    """Those in the given folders; without any, those in folders directly below the run."""
    return [
        read_evaluation(folder)
        for folder in given or sorted(path.parent for path in run.glob(f"*/{RESULTS}"))
    ]
