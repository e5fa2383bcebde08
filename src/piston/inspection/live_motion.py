"""What pictures show of the robot's motion: cameras that stand still, or show the past.

The state is estimated from small pictures, by ridge regression on those of training. A camera that
is late shows the state of some time ago.

Dims: n pictures, d state dim, l lags.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from piston.inspection.live_numbers import Numbers
from piston.inspection.live_pictures import SampledImages

# Two moments of an episode show motion if a dimension differs by so many standard deviations.
_MOVED = 0.5
# Parts of a picture, per side, of which the one that changes most is looked at.
_PARTS = 8
# A camera has to change by this many levels of 256 in training to be judged, in all but this share
# of the moments with motion; and it is still if it changes by less than this share of that.
_MIN_CHANGE, _RARELY, _STILL = 2.0, 0.05, 0.25
# With fewer moments, nothing is said.
_MIN_MOMENTS = 5
# Of the mean square of the pictures: noise that the regression does not follow.
_RIDGE = 0.01
# A dimension is seen in the pictures if other episodes' is explained to this share.
_EXPLAINED = 0.6
# Seconds by which a camera may be late or, for comparison, early.
_MAX_LAG, _LAG_STEP = 0.5, 0.01


def still_share(
    slot: str, training: tuple[Numbers, SampledImages], live: tuple[Numbers, SampledImages]
) -> float | None:
    """Return in which share of the moments with motion the camera stands still.

    None if there are too few, or if the camera does not show the motion in training either.
    """
    spread = training[0].scale
    known, theirs = (_changes(slot, *one, spread) for one in (training, live))
    if min(len(known), len(theirs)) < _MIN_MOMENTS:
        return None
    usual = float(np.quantile(known, _RARELY))
    if usual < _MIN_CHANGE:
        return None
    return float(np.mean(theirs < _STILL * usual))


def _changes(
    slot: str, numbers: Numbers, sample: SampledImages, spread: Float[np.ndarray, " d"]
) -> Float[np.ndarray, " m"]:
    """Return how much the picture changes between successive moments with motion."""
    grey = sample.small(slot).mean(-1)
    size = grey.shape[1] // _PARTS
    differences = np.abs(np.diff(grey, axis=0)).reshape(-1, _PARTS, size, _PARTS, size)
    states = numbers.states[sample.rows]
    moved = (np.abs(np.diff(states, axis=0)) / spread).max(1) > _MOVED
    same = sample.episodes[1:] == sample.episodes[:-1]
    return differences.mean((2, 4)).max((1, 2))[moved & same]


class StateFromImages:
    """Estimates the state from the pictures of a camera, as training shows it."""

    def __init__(self, slot: str, numbers: Numbers, sample: SampledImages) -> None:
        self._slot, self._spread = slot, numbers.scale
        pictures, states = _flat(sample, slot), numbers.states[sample.rows] / self._spread
        every = np.ones(len(pictures), bool)
        self._fit = _Fit(pictures, states, every)
        # Each half of the episodes is estimated from the other half.
        odd = np.unique(sample.episodes, return_inverse=True)[1] % 2 == 1
        guessed = np.zeros_like(states)
        for part in (odd, ~odd):
            if part.any() and not part.all():
                guessed[part] = _Fit(pictures, states, ~part)(pictures[part])
        left = ((states - guessed) ** 2).sum(0)
        total = ((states - states.mean(0)) ** 2).sum(0)
        self.seen: Bool[np.ndarray, " d"] = left < (1 - _EXPLAINED) * np.maximum(total, 1e-9)
        self._own = self._errors(guessed, numbers, sample)

    def delay(self, numbers: Numbers, sample: SampledImages) -> tuple[float, float] | None:
        """Return by how many seconds the camera is late, and the share of the error that remains.

        None if the pictures do not show the state, or if there are too few, or too rarely.
        """
        times, pairs = numbers.times(), numbers.pairs()
        if not len(pairs) or np.median(times[pairs + 1] - times[pairs]) > _MAX_LAG:
            return None
        guessed = self._fit(_flat(sample, self._slot))
        theirs = self._errors(guessed, numbers, sample)
        if theirs is None or self._own is None:
            return None
        usual, found = int(self._own.argmin()), int(theirs.argmin())
        return float(_LAGS[usual] - _LAGS[found]), float(theirs[found] / theirs[usual])

    def _errors(
        self, guessed: Float[np.ndarray, "n d"], numbers: Numbers, sample: SampledImages
    ) -> Float[np.ndarray, " l"] | None:
        """Return the mean square error of the state at each lag from the moment of the picture."""
        errors = []
        times = numbers.times()
        for begin, end in numbers.bounds:
            chosen = (sample.rows >= begin) & (sample.rows < end)
            asked = times[sample.rows[chosen]][:, None] + _LAGS
            inside = (asked[:, 0] >= times[begin]) & (asked[:, -1] <= times[end - 1])
            for dim in np.flatnonzero(self.seen):
                states = numbers.states[begin:end, dim] / self._spread[dim]
                then = np.interp(asked[inside], times[begin:end], states)
                errors.append((then - guessed[chosen][inside, dim, None]) ** 2)
        together = np.concatenate([np.empty((0, len(_LAGS))), *errors])
        return together.mean(0) if len(together) >= _MIN_MOMENTS else None


_LAGS = np.arange(-_MAX_LAG, _MAX_LAG + _LAG_STEP / 2, _LAG_STEP)


class _Fit:
    """Ridge regression in its dual form: there are fewer pictures than pixels."""

    def __init__(
        self,
        pictures: Float[np.ndarray, "n p"],
        states: Float[np.ndarray, "n d"],
        chosen: Bool[np.ndarray, " n"],
    ) -> None:
        self._mean, self._centre = pictures[chosen].mean(0), states[chosen].mean(0)
        self._pictures = pictures[chosen] - self._mean
        products = self._pictures @ self._pictures.T
        ridge = _RIDGE * max(float(np.trace(products)) / len(products), 1e-9)
        self._weights = np.linalg.solve(
            products + ridge * np.eye(len(products)), states[chosen] - self._centre
        )

    def __call__(self, pictures: Float[np.ndarray, "m p"]) -> Float[np.ndarray, "m d"]:
        return (pictures - self._mean) @ self._pictures.T @ self._weights + self._centre


def _flat(sample: SampledImages, slot: str) -> Float[np.ndarray, "n p"]:
    small = sample.small(slot).astype(np.float64) / 255
    return small.reshape(len(small), -1)
