"""What images show of the robot's motion: cameras that stand still, or show the past.

The state is estimated from small images, by ridge regression on those of training. A camera that is
late shows the state of some time ago.

Dims: m and n images, p pixels, d state dim, s dimensions that the images show, l lags.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from piston.inspection.live_pictures import ComparedSet

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


def still_share(slot: str, training: ComparedSet, live: ComparedSet) -> float | None:
    """Return in which share of the moments with motion the camera stands still.

    None if there are too few, or if the camera does not show the motion in training either.
    """
    known, theirs = (_changes(slot, one, training.scale) for one in (training, live))
    if min(len(known), len(theirs)) < _MIN_MOMENTS:
        return None
    usual = float(np.quantile(known, _RARELY))
    if usual < _MIN_CHANGE:
        return None
    return float(np.mean(theirs < _STILL * usual))


def _changes(
    slot: str, images: ComparedSet, spread: Float[np.ndarray, " d"]
) -> Float[np.ndarray, " m"]:
    """Return how much the picture changes between successive moments with motion."""
    grey = images.small(slot).mean(-1)
    size = grey.shape[1] // _PARTS
    differences = np.abs(np.diff(grey, axis=0)).reshape(-1, _PARTS, size, _PARTS, size)
    states = images.states[images.rows]
    moved = (np.abs(np.diff(states, axis=0)) / spread).max(1) > _MOVED
    same = images.episodes[1:] == images.episodes[:-1]
    return differences.mean((2, 4)).max((1, 2))[moved & same]


def camera_delay(slot: str, training: ComparedSet, live: ComparedSet) -> tuple[float, float] | None:
    """Return by how many seconds the camera is late, and the share of the error that remains.

    The error is that of the state, estimated from the images. None if these do not show it, or if
    there are too few, or too rarely.
    """
    times, pairs = live.times(), live.pairs()
    if not len(pairs) or np.median(times[pairs + 1] - times[pairs]) > _MAX_LAG:
        return None
    scale = training.scale
    images, states = _flat(slot, training), training.states[training.rows] / scale
    # Each half of the episodes is estimated from the other half.
    odd = np.unique(training.episodes, return_inverse=True)[1] % 2 == 1
    guessed = np.zeros_like(states)
    for part in (odd, ~odd):
        if part.any() and not part.all():
            guessed[part] = _estimate(images[part], images[~part], states[~part])
    left = ((states - guessed) ** 2).sum(0)
    total = ((states - states.mean(0)) ** 2).sum(0)
    seen = np.flatnonzero(left < (1 - _EXPLAINED) * np.maximum(total, 1e-9))
    ours = _errors_by_lag(guessed[:, seen], training, seen, scale)
    guessed = _estimate(_flat(slot, live), images, states)
    theirs = _errors_by_lag(guessed[:, seen], live, seen, scale)
    if ours is None or theirs is None:
        return None
    usual, found = int(ours.argmin()), int(theirs.argmin())
    return float(_LAGS[usual] - _LAGS[found]), float(theirs[found] / theirs[usual])


_LAGS = np.arange(-_MAX_LAG, _MAX_LAG + _LAG_STEP / 2, _LAG_STEP)


def _errors_by_lag(
    guessed: Float[np.ndarray, "n s"],
    images: ComparedSet,
    seen: Int[np.ndarray, " s"],
    scale: Float[np.ndarray, " d"],
) -> Float[np.ndarray, " l"] | None:
    """Return the mean square error of the state at each lag from the moment of the image."""
    errors = [np.empty((0, len(_LAGS)))]
    times = images.times()
    for begin, end in images.bounds:
        chosen = (images.rows >= begin) & (images.rows < end)
        asked = times[images.rows[chosen]][:, None] + _LAGS
        inside = (asked[:, 0] >= times[begin]) & (asked[:, -1] <= times[end - 1])
        for place, dim in enumerate(seen):
            states = images.states[begin:end, dim] / scale[dim]
            then = np.interp(asked[inside], times[begin:end], states)
            errors.append((then - guessed[chosen][inside, place, None]) ** 2)
    together = np.concatenate(errors)
    return together.mean(0) if len(together) >= _MIN_MOMENTS else None


def _estimate(
    images: Float[np.ndarray, "m p"],
    known: Float[np.ndarray, "n p"],
    states: Float[np.ndarray, "n d"],
) -> Float[np.ndarray, "m d"]:
    """Return the states that images show, by ridge regression on known ones.

    In its dual form: there are fewer images than pixels.
    """
    mean, centre = known.mean(0), states.mean(0)
    known = known - mean
    products = known @ known.T
    ridge = _RIDGE * max(float(np.trace(products)) / len(products), 1e-9)
    weights = np.linalg.solve(products + ridge * np.eye(len(products)), states - centre)
    return (images - mean) @ known.T @ weights + centre


def _flat(slot: str, images: ComparedSet) -> Float[np.ndarray, "n p"]:
    small = images.small(slot).astype(np.float64) / 255
    return small.reshape(len(small), -1)
