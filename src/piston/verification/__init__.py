"""Reference cases: replay them through Piston's own code and measure the largest errors.

All sizes and values come from the files of a case, so that cases made elsewhere work too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_KINDS = (
    "transforms (a .json with its .npz beside it); "
    "models (a folder with case.npz and config.json); "
    "data sets (a folder with meta/info.json); norm stats (a folder with norm_stats.json)"
)


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A compared quantity. `error` is infinite if nothing could be compared; `note` says why."""

    name: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        # Not `error > tolerance`: NaN must fail.
        return self.error <= self.tolerance


def close(
    name: str, actual: Any, expected: Any, tolerance: float, relative: bool = False
) -> Quantity:
    """Compare by the largest difference: absolute, or relative to the expected value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        return failed(name, f"shape {actual.shape}, expected {expected.shape}", tolerance)
    difference = np.abs(actual - expected)
    if relative:
        difference /= np.maximum(np.abs(expected), np.finfo(np.float32).tiny)
    error = float(difference.max(initial=0.0))
    return Quantity(name, error, tolerance, "relative" if relative else "")


def equal(name: str, actual: Any, expected: Any) -> Quantity:
    """Compare by the number of entries that differ; none may."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        return failed(name, f"shape {actual.shape}, expected {expected.shape}")
    return Quantity(name, float(np.count_nonzero(actual != expected)), 0.0, "entries that differ")


def failed(name: str, why: str, tolerance: float = 0.0) -> Quantity:
    return Quantity(name, float("inf"), tolerance, why)


def find_cases(path: Path) -> list[Path]:
    """Return the path itself if it is a case, else the cases below it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    if _replayer(path):
        return [path]
    below = sorted(filter(_replayer, path.rglob("*"))) if path.is_dir() else []
    if not below:
        raise ValueError(f"{path} holds no known case. Known kinds: {_KINDS}.")
    return below


def replay(case: Path) -> Iterator[Quantity]:
    """Compare every quantity of a case. One that cannot be read is a failed quantity."""
    replayer, count = _replayer(case), 0
    if replayer is None:
        raise ValueError(f"{case} is not a known case. Known kinds: {_KINDS}.")
    try:
        for quantity in replayer(case):
            count += 1
            yield quantity
    except Exception as error:
        yield failed(f"after {count} quantities", f"{type(error).__name__}: {error}")
    else:
        if count == 0:
            yield failed("nothing compared", "the case holds no quantity that is known")


def _replayer(path: Path) -> Callable[[Path], Iterator[Quantity]] | None:
    """Return the function that replays this kind of case; None if the path is no case."""
    from piston.verification import data, models  # which import this module

    if path.suffix == ".json" and path.with_suffix(".npz").is_file():
        return data.replay_transforms
    if (path / "case.npz").is_file() and (path / "config.json").is_file():
        return models.replay_model
    if (data.dataset_folder(path) / "meta" / "info.json").is_file():
        return data.replay_dataset
    return data.replay_norm_stats if (path / "norm_stats.json").is_file() else None
