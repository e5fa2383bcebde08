"""What all answers have in common: verdicts, and numbers as JSON for scripts and the page."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from piston.rules import Rule, Severity

T = TypeVar("T")

# A state or an action with a smaller standard deviation does not move: its changes would be those
# of rounding, and have no unit.
NO_MOTION = 1e-5
_DIGITS = 6
# Metadata of a field that only pages show, such as pictures.
NOT_IN_JSON = {"not in JSON": True}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One conclusion in a sentence, with the number that it rests on and the limit it was held to.

    A `problem` is something to fix; a `remark` is worth knowing and may be intended.
    """

    # For scripts: stays the same between versions, such as "camera-ignored".
    kind: str
    # Which camera, dimension, word …
    subject: str
    severity: Severity
    sentence: str
    number: float
    threshold: float


def judge(rules: Iterable[Rule[T]], measured: T) -> Iterator[Verdict]:
    """Yield a verdict for each rule whose limit is exceeded, in the order of the rules."""
    for rule in rules:
        if numbers := rule.exceeded_by(measured):
            subject, sentence = rule.texts(measured, *numbers)
            yield Verdict(rule.kind, subject, rule.severity, sentence, *numbers)


def seed_spread(chunks: Float[np.ndarray, "*_ n h a"]) -> Float[np.ndarray, "*_ h a"]:
    """Return the standard deviation over noise seeds, as estimated from few; 0 for one seed."""
    several = chunks.shape[-3] > 1
    spread: np.ndarray = chunks.std(-3, ddof=int(several), dtype=np.float64)
    return spread


def known_mean(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Return the mean of the values that are numbers; not a number where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmean(values, axis=axis)


def evenly(length: int, count: int) -> list[int]:
    """Return up to `count` numbers below `length`, evenly spread from the first to the last."""
    return np.linspace(0, length - 1, min(count, length)).round().astype(int).tolist()


def as_json(value: Any) -> Any:
    """Return dataclasses as objects and arrays as lists, with six digits; null is not a number."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (one for one in dataclasses.fields(value) if one.metadata != NOT_IN_JSON)
        return {field.name: as_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if isinstance(value, np.ndarray | np.generic):
        return as_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
