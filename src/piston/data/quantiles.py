"""Exact quantiles and moments of more numbers than one wants to keep: one pass, little memory.

A random sample says between which two values a quantile almost surely lies. Over all the data, what
lies outside of that bracket is only counted, what lies inside is kept; the counts then say which of
the kept values the quantile is. If the sample was misleading, the counts tell, and the pass is
repeated with a wider bracket. So the result is always the one that sorting everything would give.

    … ≤ low: counted | inside the bracket: kept | high ≤ …: counted
                            ↑ rank of the quantile

Knows nothing of robots or data sets: arrays (d, m), one row of m numbers per dimension.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int, Shaped

PROBABILITIES = (0.01, 0.99)
# How many standard deviations of the sample's rank a bracket extends to either side.
BRACKET_DEVIATIONS = 5.0

Values = Float[np.ndarray, "d m"]


@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean, and the sum of squared distances from it, per dimension, in float64."""

    count: int
    mean: Float[np.ndarray, " d"]
    squares: Float[np.ndarray, " d"]

    @classmethod
    def of(cls, values: Values) -> Moments:
        """Distances from each row's first value: no cancellation however far from 0 the row is."""
        count = values.shape[1]
        first = values[:, 0].astype(np.float64)
        total, squares = np.empty_like(first), np.empty_like(first)
        for dim, row in enumerate(values):
            distance = row.astype(np.float64)
            distance -= first[dim]
            total[dim], squares[dim] = distance.sum(), distance.dot(distance)
        squares -= total**2 / count
        return cls(count, first + total / count, np.maximum(squares, 0.0))

    def merge(self, other: Moments) -> Moments:
        """Of both together, as Chan, Golub and LeVeque add variances."""
        count = self.count + other.count
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.squares + other.squares + apart**2 * (self.count * other.count / count),
        )

    @property
    def std(self) -> Float[np.ndarray, " d"]:
        return np.sqrt(self.squares / self.count)


@dataclasses.dataclass(frozen=True)
class Brackets:
    """Where the lower and the upper quantile are looked for: (d, 2 quantiles, low and high)."""

    bounds: Shaped[np.ndarray, "d 2 2"]

    @classmethod
    def from_sample(cls, sample: Values, independent: int, widening: float = 1.0) -> Brackets:
        """`independent`: how many of the sample's values count as drawn independently."""
        ordered = np.sort(sample, axis=1)
        size = ordered.shape[1]
        bounds = np.empty((len(ordered), 2, 2), ordered.dtype)
        for which, probability in enumerate(PROBABILITIES):
            deviation = np.sqrt(probability * (1 - probability) / independent)
            reach = widening * BRACKET_DEVIATIONS * deviation
            low, high = int((probability - reach) * size) - 1, int((probability + reach) * size) + 1
            bounds[:, which, 0] = ordered[:, low] if low >= 0 else -np.inf
            bounds[:, which, 1] = ordered[:, high] if high < size else np.inf
        return cls(bounds)


@dataclasses.dataclass(frozen=True)
class Tails:
    """What lies at the ends of each row, brackets included: all that quantiles are made of."""

    count: int
    ends: list[np.ndarray]

    @classmethod
    def of(cls, values: Values, brackets: Brackets) -> Tails:
        ends = [
            row[(row <= bounds[0, 1]) | (row >= bounds[1, 0])]
            for row, bounds in zip(values, brackets.bounds)
        ]
        return cls(values.shape[1], ends)


@dataclasses.dataclass(frozen=True)
class _Counted:
    """Tails of which only the values inside the brackets are kept, in order; others are counted."""

    count: int
    # Per dimension and quantile: how many lie below low, up to low, below high, up to high.
    ranks: Int[np.ndarray, "d 2 4"]
    inside: list[tuple[np.ndarray, np.ndarray]]
    minimum: Float[np.ndarray, " d"]
    maximum: Float[np.ndarray, " d"]


class QuantileSearch:
    """Takes the tails of all blocks; afterwards `quantiles()` and `extremes()`."""

    # Tails that are counted together: small arrays cost more than what they hold.
    TOGETHER = 64

    def __init__(self, brackets: Brackets) -> None:
        self._brackets = brackets
        self._recent: list[Tails] = []
        self._counted: list[_Counted] = []

    def add(self, tails: Tails) -> None:
        self._recent.append(tails)
        if len(self._recent) >= self.TOGETHER:
            self._count_recent()

    def _count_recent(self) -> None:
        if self._recent:
            count = sum(tails.count for tails in self._recent)
            ends = [np.sort(np.concatenate(row)) for row in zip(*(t.ends for t in self._recent))]
            self._counted.append(_count(count, ends, self._brackets))
            self._recent = []

    def _total(self) -> _Counted:
        self._count_recent()
        self._counted = [_joined(self._counted)]
        return self._counted[0]

    def extremes(self) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
        total = self._total()
        return total.minimum, total.maximum

    def quantiles(self) -> Float[np.ndarray, "2 d"] | None:
        """As `np.quantile` of everything, in float64; None if a bracket missed its quantile."""
        total = self._total()
        found = np.empty((2, len(total.inside)))
        for which, probability in enumerate(PROBABILITIES):
            position = probability * (total.count - 1)
            rank = int(position)
            for dim in range(len(total.inside)):
                ordered = total.inside[dim][which]
                bounds, ranks = self._brackets.bounds[dim, which], total.ranks[dim, which]
                below = _value_at(rank, bounds, ranks, ordered)
                above = _value_at(min(rank + 1, total.count - 1), bounds, ranks, ordered)
                if below is None or above is None:
                    return None
                found[which, dim] = below + (above - below) * (position - rank)
        return found


def _value_at(
    rank: int, bounds: np.ndarray, ranks: Int[np.ndarray, " 4"], ordered: np.ndarray
) -> float | None:
    """The value of this rank; None if it lies outside of the bracket."""
    below_low, to_low, below_high, to_high = ranks
    if below_low <= rank < to_low:
        return float(bounds[0])
    if to_low <= rank < below_high:
        return float(ordered[rank - to_low])
    if below_high <= rank < to_high:
        return float(bounds[1])
    return None


def _count(count: int, ends: list[np.ndarray], brackets: Brackets) -> _Counted:
    ranks = np.empty((len(ends), 2, 4), np.int64)
    inside = []
    for dim, ordered in enumerate(ends):
        between = count - len(ordered)  # not at the ends: above the lower, below the upper bracket
        below = np.searchsorted(ordered, brackets.bounds[dim], side="left")
        up_to = np.searchsorted(ordered, brackets.bounds[dim], side="right")
        inside.append((ordered[up_to[0, 0] : below[0, 1]], ordered[up_to[1, 0] : below[1, 1]]))
        ranks[dim] = np.stack([below, up_to], axis=-1).reshape(2, 4)
        ranks[dim, 1] += between
    lowest = [ordered[0] if len(ordered) else np.inf for ordered in ends]
    highest = [ordered[-1] if len(ordered) else -np.inf for ordered in ends]
    return _Counted(count, ranks, inside, np.array(lowest, float), np.array(highest, float))


def _joined(parts: list[_Counted]) -> _Counted:
    if len(parts) == 1:
        return parts[0]
    return _Counted(
        sum(part.count for part in parts),
        np.sum([part.ranks for part in parts], axis=0),
        [
            (np.sort(np.concatenate(lower)), np.sort(np.concatenate(upper)))
            for lower, upper in (zip(*row) for row in zip(*(part.inside for part in parts)))
        ],
        np.min([part.minimum for part in parts], axis=0),
        np.max([part.maximum for part in parts], axis=0),
    )
