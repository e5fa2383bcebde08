"""A compared quantity: its largest error, the tolerance, and whether the error is within it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Quantity:
    """`error` is infinite if nothing could be compared; `note` says why."""

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
        return _shapes_differ(name, actual, expected, tolerance)
    difference = np.abs(actual - expected)
    if relative:
        difference = difference / np.maximum(np.abs(expected), np.finfo(np.float32).tiny)
    error = float(difference.max()) if difference.size else 0.0
    return Quantity(name, error, tolerance, "relative" if relative else "")


def equal(name: str, actual: Any, expected: Any) -> Quantity:
    """Compare by the number of entries that differ; none may."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        return _shapes_differ(name, actual, expected, 0.0)
    return Quantity(name, float(np.count_nonzero(actual != expected)), 0.0, "entries that differ")


def failed(name: str, why: str) -> Quantity:
    return Quantity(name, float("inf"), 0.0, why)


def _shapes_differ(
    name: str, actual: np.ndarray, expected: np.ndarray, tolerance: float
) -> Quantity:
    return Quantity(
        name, float("inf"), tolerance, f"shape {actual.shape}, expected {expected.shape}"
    )
