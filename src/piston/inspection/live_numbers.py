"""The numbers of a live set against those of training: state, targets, rate and prompts.

Dims: n frames, p pairs of successive frames, d state dim, h steps of a chunk, a action dim.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from piston.inference.policy import Policy
from piston.inference.recording import CHUNK, NO_PROMPT, TIME
from piston.inspection.frames import Frames, state_dims

_BINS = 24
# The training range is widened by this share of itself: new episodes reach a little further.
_RANGE_MARGIN = 0.05
# Noise of a dimension that does not move in training, as a share of the median range of all.
_NOISE = 0.01
# A state follows its targets if their difference varies less than this share of the state itself.
_FOLLOWS = 0.5
# An offset counts from so many standard deviations of the difference, and of episodes' medians.
_OFFSET_SPREADS, _OFFSET_EPISODES = 2.0, 5.0
# A shift counts from so many standard deviations of the state, and of episodes' means.
_SHIFT_SPREADS, _SHIFT_EPISODES = 1.0, 5.0
# An offset is there most of the time; a robot that is blocked is away from its targets for a while.
_OFFSET_SHARE = 0.8
# A chunk that moves by less than this many standard deviations does not tell how fast it was
# executed; and there have to be so many others.
_MIN_MOTION, _MIN_PAIRS = 0.5, 10
# Of the rate of a recording: relative, and in steps between two requests.
_RATE, _RATE_STEPS = 0.2, 1.5
# Steps after which it is measured in training by how many a state lags behind its targets.
_LAG_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One number of the state, in the robot's units."""

    name: str
    # The smallest and the largest value.
    training_range: tuple[float, float]
    live_range: tuple[float, float]
    # The share of the live frames beyond the training range, which is widened by a margin.
    outside: float
    # The live mean less that of training, in standard deviations of training; it counts from
    # `shift_limit` on, as episodes of training differ among themselves.
    shift: float
    shift_limit: float
    # The live median of the state less the target of the step before, less the same of training; 0
    # if it is not there most of the time, None if the state does not follow a target in training.
    # It counts from `offset_limit` on.
    offset: float | None
    offset_limit: float | None
    # How far the live set stays from where every episode of training comes, at the low and at the
    # high end, as a share of the training range.
    unreached: tuple[float, float]
    # The share of the frames in each bin.
    edges: Float[np.ndarray, " edges"]
    training_histogram: Float[np.ndarray, " bins"]
    live_histogram: Float[np.ndarray, " bins"]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Control steps per second in training and live; None if it cannot be told."""

    training_rate: float
    live_rate: float | None
    # The relative difference from which on it counts: a recording tells it by steps of a chunk.
    rate_limit: float = 0.02
    # For recordings of a server: the median seconds between requests, and the share of requests
    # that came after the previous chunk had ended.
    request_interval: float | None = None
    late_requests: float | None = None


class Numbers:
    """All rows of a set: its states, and what was executed between successive frames."""

    def __init__(self, policy: Policy, frames: Frames) -> None:
        self.frames = frames
        dims = state_dims(policy, frames[next(iter(frames.episodes)), 0].observation)
        columns = {dim.name: frames.state_values(dim) for dim in dims}
        known = {name: values for name, values in columns.items() if values is not None}
        if not known:
            raise ValueError(
                f"The state is not a column of {frames.source.metadata.root}: a transform of the "
                "pipeline computes it, so that it cannot be compared."
            )
        self.names = list(known)
        self.states: Float[np.ndarray, "n d"] = np.stack(list(known.values()), axis=1)
        self.bounds: list[tuple[int, int]] = frames.source.episode_bounds.tolist()
        # The action of the same name for each dimension of the state, or -1.
        self._actions = _actions_of(policy, self.names)
        self.spread = self.states.std(0)

    @property
    def noise(self) -> float:
        return _NOISE * float(np.median(np.ptp(self.states, axis=0)))

    def pairs(self) -> Int[np.ndarray, " p"]:
        """Return the rows that have a next one in their episode."""
        return np.concatenate([np.arange(begin, end - 1) for begin, end in self.bounds])

    def episode_medians(self, of_pairs: Float[np.ndarray, "p d"]) -> Float[np.ndarray, "e d"]:
        ends = np.cumsum([end - begin - 1 for begin, end in self.bounds])[:-1]
        return np.stack([np.median(part, 0) for part in np.split(of_pairs, ends) if len(part)])

    def reached(self, every: int) -> tuple[Float[np.ndarray, "e d"], Float[np.ndarray, "e d"]]:
        """Return the smallest and the largest state of each episode in `every` so many frames."""
        parts = [self.states[begin:end:every] for begin, end in self.bounds]
        return np.stack([p.min(0) for p in parts]), np.stack([p.max(0) for p in parts])

    def after_targets(
        self, spread: Float[np.ndarray, " d"]
    ) -> tuple[Float[np.ndarray, "p d"], Int[np.ndarray, " p"]]:
        """Return each next state less the target before it, and the steps executed until then.

        A recording of a server does not say how many steps of a chunk were executed: those after
        which the chunk is nearest to the next state, in units of `spread`. Dimensions without a
        target are NaN.
        """
        rows, known = self.pairs(), self._actions >= 0
        after = np.full((len(rows), len(known)), np.nan)
        steps = np.ones(len(rows), np.int64)
        targets = self._chunks()[rows][..., self._actions[known]]
        next_states = self.states[rows + 1][:, known]
        if self.frames.is_recording and known.any():
            steps = _nearest_step(next_states, targets, spread[known])
        after[:, known] = next_states - targets[np.arange(len(rows)), steps - 1]
        return after, steps

    def timing(self, training: Numbers) -> Timing:
        rate = training.frames.fps
        if not self.frames.is_recording:
            return Timing(rate, self.frames.fps)
        if TIME not in self.frames.source.keys:
            return Timing(rate, None)
        rows = self.pairs()
        times = self.frames.source.column(TIME).reshape(-1)
        seconds = (times[rows + 1] - times[rows]).astype(np.float64)
        if not len(rows) or seconds.min() <= 0:
            return Timing(rate, None)
        chunks = self._chunks()
        late = float(np.mean(seconds > chunks.shape[1] / rate))
        spread = np.maximum(training.spread, training.noise)
        _, steps = self.after_targets(spread)
        steps = steps + training.lag(spread)
        known = self._actions >= 0
        moved = np.abs(chunks[rows, -1] - chunks[rows, 0])[:, self._actions[known]] / spread[known]
        # At the last step the robot may have waited for longer.
        telling = (moved.max(1, initial=0) > _MIN_MOTION) & (steps < chunks.shape[1])
        enough = telling.sum() >= _MIN_PAIRS
        live = float(np.median(steps[telling] / seconds[telling])) if enough else None
        limit = max(_RATE, _RATE_STEPS / float(np.median(seconds) * rate))
        return Timing(rate, live, limit, float(np.median(seconds)), late)

    def lag(self, spread: Float[np.ndarray, " d"]) -> int:
        """Return by how many control steps the state is behind its targets. Not of a recording."""
        known = self._actions >= 0
        parts = [np.arange(begin, end - 2 * _LAG_STEPS) for begin, end in self.bounds]
        rows = np.concatenate(parts)[:: max(1, sum(map(len, parts)) // 1000)]
        if not len(rows) or not known.any():
            return 0
        targets = self._chunks()[rows[:, None] + np.arange(2 * _LAG_STEPS), 0]
        targets = targets[..., self._actions[known]]
        moves = np.abs(np.ptp(targets, axis=1) / spread[known]).max(1) > _MIN_MOTION
        later = self.states[rows + _LAG_STEPS][:, known]
        steps = _nearest_step(later, targets, spread[known])[moves]
        return round(_LAG_STEPS - float(np.median(steps))) if len(steps) else 0

    def prompts(self) -> dict[str, float]:
        """Return the share of the frames with each sentence; without one, there is nothing."""
        source = self.frames.source
        used, counts = np.unique(source.column("task_index"), return_counts=True)
        found = {
            source.metadata.tasks.get(int(i), ""): n / len(source) for i, n in zip(used, counts)
        }
        return {text: float(share) for text, share in found.items() if text not in ("", NO_PROMPT)}

    def _chunks(self) -> Float[np.ndarray, "n h a"]:
        if self.frames.is_recording:
            rows, dim = self.frames.actions.shape
            return self.frames.source.column(CHUNK).reshape(rows, -1, dim)
        return self.frames.actions[:, None]


def compare_states(training: Numbers, live: Numbers, timing: Timing) -> list[Dimension]:
    low, high = training.states.min(0), training.states.max(0)
    margin = np.maximum(_RANGE_MARGIN * (high - low), training.noise)
    outside = (live.states < low - margin) | (live.states > high + margin)
    spread = np.maximum(training.spread, training.noise)
    shift = (live.states.mean(0) - training.states.mean(0)) / spread
    means = np.stack([training.states[begin:end].mean(0) for begin, end in training.bounds])
    uncertain = np.sqrt(1 / len(live.bounds) + 1 / len(training.bounds))
    shift_limit = np.maximum(_SHIFT_SPREADS, _SHIFT_EPISODES * means.std(0) / spread * uncertain)
    offset, offset_limit = _offsets(training, live, spread)
    # A robot that asks rarely is not seen at its extremes.
    every = max(1, round((timing.request_interval or 0.0) * timing.training_rate))
    unreached = _unreached(training, live, every)
    found = []
    for i, name in enumerate(training.names):
        ours, theirs = training.states[:, i], live.states[:, i]
        edges = np.linspace(min(ours.min(), theirs.min()), max(ours.max(), theirs.max()), _BINS + 1)
        if edges[0] == edges[-1]:
            edges = edges[0] + np.linspace(-0.5, 0.5, _BINS + 1)
        follows = not np.isnan(offset[i])
        found.append(
            Dimension(
                name=name,
                training_range=(float(ours.min()), float(ours.max())),
                live_range=(float(theirs.min()), float(theirs.max())),
                outside=float(outside[:, i].mean()),
                shift=float(shift[i]),
                shift_limit=float(shift_limit[i]),
                offset=float(offset[i]) if follows else None,
                offset_limit=float(offset_limit[i]) if follows else None,
                unreached=(float(unreached[0][i]), float(unreached[1][i])),
                edges=edges,
                training_histogram=np.histogram(ours, edges)[0] / len(ours),
                live_histogram=np.histogram(theirs, edges)[0] / len(theirs),
            )
        )
    return found


def _offsets(
    training: Numbers, live: Numbers, spread: Float[np.ndarray, " d"]
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """Return the offset of each state from its target, and from where on it counts; else NaN."""
    ours, _ = training.after_targets(spread)
    theirs, _ = live.after_targets(spread)
    if not len(ours) or not len(theirs):
        return np.full_like(spread, np.nan), np.full_like(spread, np.nan)
    episodes = training.episode_medians(ours)
    limit = np.maximum(
        np.maximum(_OFFSET_SPREADS * ours.std(0), _OFFSET_EPISODES * episodes.std(0)),
        training.noise,
    )
    away = theirs - np.median(ours, 0)
    offset = np.median(away, 0)
    is_steady = np.mean(away * np.sign(offset) > limit / 2, axis=0) >= _OFFSET_SHARE
    offset = np.where(is_steady, offset, 0.0)
    follows = ours.std(0) <= np.maximum(_FOLLOWS * training.spread, training.noise)
    return np.where(follows, offset, np.nan), np.where(follows, limit, np.nan)


def _nearest_step(
    states: Float[np.ndarray, "p k"],
    targets: Float[np.ndarray, "p h k"],
    spread: Float[np.ndarray, " k"],
) -> Int[np.ndarray, " p"]:
    """Return after how many steps the targets are nearest to a state."""
    return (np.abs(states[:, None] - targets) / spread).sum(-1).argmin(1) + 1


def _unreached(
    training: Numbers, live: Numbers, every: int
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    lows, highs = training.reached(every)
    width = np.maximum(np.ptp(training.states, axis=0), training.noise)
    below = (live.states.min(0) - lows.max(0)) / width
    above = (highs.min(0) - live.states.max(0)) / width
    return np.maximum(below, 0), np.maximum(above, 0)


def _actions_of(policy: Policy, names: list[str]) -> Int[np.ndarray, " d"]:
    """Return the position of the action with the name of each state; -1 if there is none."""
    actions: list[str] = policy.metadata.get("actions", {}).get("names") or []
    return np.array([actions.index(name) if name in actions else -1 for name in names])
