"""The numbers of a live set against those of training: state, targets, rate and prompts.

Dims: n frames, p pairs of successive frames, d state dim, h steps of a chunk, a action dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from piston.inference.policy import Policy
from piston.inference.recording import CHUNK, EXECUTED, NO_PROMPT, TIME
from piston.inspection.frames import Frames, state_dims
from piston.inspection.results import NOT_IN_JSON

_BINS = 24
# The training range is widened by this share of itself: new episodes reach a little further.
_RANGE_MARGIN = 0.05
# Noise of a dimension that does not move in training, as a share of the median range of all.
_NOISE = 0.01
# A state follows its targets if their difference varies less than this share of the state itself.
_FOLLOWS = 0.5
# An offset counts from so many standard deviations of the difference, and of episodes' medians.
OFFSET_SPREADS, OFFSET_EPISODES = 2.0, 5.0
# A state does not follow its targets live if their difference varies as much as this share of the
# state, and so many times as much as in training. A sign that is turned round gives 2, two joints
# that are exchanged 1.4 and more, a state that is 0.3 s late 0.5 to 1.1; as trained it is 0.2.
ASTRAY, ASTRAY_TIMES = 0.8, 3.0
# A shift counts from so many standard deviations of the state, and of episodes' means.
SHIFT_SPREADS, SHIFT_EPISODES = 1.0, 5.0
# An offset is there most of the time; a robot that is blocked is away from its targets for a while.
_OFFSET_SHARE = 0.8
# Fewer pairs of requests do not tell how fast chunks were executed.
_MIN_PAIRS = 10
# An episode shows what a gripper does if it lasts this share of the usual time; requests end early.
_LONG_ENOUGH = 0.8
# Relative differences of the rate from which on they count; a recording has the times of requests,
# with what the network adds.
RATE, RECORDED_RATE = 0.02, 0.2


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One number of the state, in the robot's units."""

    name: str
    # The number of the dimension, as verdicts say it.
    title: str = dataclasses.field(metadata=NOT_IN_JSON)
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
    # By how much the live state less the target before it varies, in standard deviations of the
    # state; None as for `offset`. It counts from `astray_limit` on.
    astray: float | None
    astray_limit: float | None
    # How far the live set stays from where every episode of training comes, at the low and at the
    # high end, as a share of the training range.
    unreached: tuple[float, float]
    # The share of the frames in each bin.
    edges: Float[np.ndarray, " edges"]
    training_histogram: Float[np.ndarray, " bins"]
    live_histogram: Float[np.ndarray, " bins"]

    @property
    def nearest_end(self) -> float:
        """The end of the live range that stays furthest from where training comes."""
        return max(zip(self.unreached, self.live_range))[1]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Control steps per second in training and live; None if it cannot be told."""

    training_rate: float
    live_rate: float | None
    # The relative difference from which on it counts.
    rate_limit: float = RATE
    # For recordings of a server: the median seconds between requests, and the share of requests
    # that came after the previous chunk had ended.
    request_interval: float | None = None
    late_requests: float | None = None

    @property
    def speed(self) -> float | None:
        """How many times the speed of training the robot has; None if it is not known."""
        return self.live_rate / self.training_rate if self.live_rate else None


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
        self.noise = _NOISE * float(np.median(np.ptp(self.states, axis=0)))

    @property
    def scale(self) -> Float[np.ndarray, " d"]:
        """The standard deviation of each dimension, at least its noise."""
        return np.maximum(self.spread, self.noise)

    def times(self) -> Float[np.ndarray, " n"]:
        """Return the seconds of each frame since the first one of its episode."""
        source = self.frames.source
        if TIME in source.keys:
            return source.column(TIME).reshape(-1).astype(np.float64)
        return source.column("frame_index").reshape(-1) / self.frames.fps

    def lengths(self) -> Float[np.ndarray, " e"]:
        """Return the seconds from the first to the last frame of each episode."""
        times = self.times()
        return np.array([times[end - 1] - times[begin] for begin, end in self.bounds])

    def pairs(self) -> Int[np.ndarray, " p"]:
        """Return the rows that have a next one in their episode."""
        return np.concatenate([np.arange(begin, end - 1) for begin, end in self.bounds])

    def episode_medians(self, of_pairs: Float[np.ndarray, "p d"]) -> Float[np.ndarray, "e d"]:
        ends = np.cumsum([end - begin - 1 for begin, end in self.bounds])[:-1]
        return np.stack([np.median(part, 0) for part in np.split(of_pairs, ends) if len(part)])

    def seen(self, every: int) -> list[Float[np.ndarray, "m d"]]:
        """Return the states of each episode as one sees them who asks in `every` so many frames."""
        return [self.states[begin:end:every] for begin, end in self.bounds]

    def after_targets(self, training: Numbers) -> Float[np.ndarray, "p d"]:
        """Return each next state less the target before it; NaN for those without a target."""
        rows, known = self.pairs(), self._actions >= 0
        after = np.full((len(rows), len(known)), np.nan)
        targets = self._chunks()[rows][..., self._actions[known]]
        states = self.states[rows + 1][:, known]
        if states.size:
            steps = self.executed()
            if steps is None:
                # For all pairs together: each alone would hide an offset in its own step.
                distances = np.abs(states[:, None] - targets) / training.scale[known]
                steps = np.full(len(rows), distances.mean((0, 2)).argmin() + 1)
            after[:, known] = states - targets[np.arange(len(rows)), steps - 1]
        return after

    def executed(self) -> Int[np.ndarray, " p"] | None:
        """Return how many steps of its chunk each pair executed; None if nobody told the server."""
        source, rows = self.frames.source, self.pairs()
        if not self.frames.is_recording:
            return np.ones(len(rows), np.int64)
        if EXECUTED not in source.keys:
            return None
        steps = source.column(EXECUTED).reshape(-1)[rows + 1]
        horizon = self._chunks().shape[1]
        return steps.clip(1, horizon) if len(steps) and steps.max() > 0 else None

    def seconds(self) -> Float[np.ndarray, " p"] | None:
        """Return the time between the requests of each pair; None if it was not recorded."""
        if TIME not in self.frames.source.keys:
            return None
        rows, times = self.pairs(), self.times()
        seconds = times[rows + 1] - times[rows]
        return seconds if len(seconds) and seconds.min() > 0 else None

    def timing(self, training: Numbers) -> Timing:
        rate = float(training.frames.fps)
        if not self.frames.is_recording:
            return Timing(rate, float(self.frames.fps))
        seconds, steps = self.seconds(), self.executed()
        if seconds is None:
            return Timing(rate, None)
        horizon = self._chunks().shape[1]
        live_rate = None
        if steps is not None:
            # After the last step the robot may have waited for longer.
            rates = (steps / seconds)[steps < horizon]
            live_rate = float(np.median(rates)) if len(rates) >= _MIN_PAIRS else None
        return Timing(
            training_rate=rate,
            live_rate=live_rate,
            rate_limit=RECORDED_RATE,
            request_interval=float(np.median(seconds)),
            late_requests=float(np.mean(seconds > horizon / rate)),
        )

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
    spread = training.scale
    # A robot that asks rarely is seen at some moments of the task only, and not at its extremes.
    every = max(1, round((timing.request_interval or 0.0) * timing.training_rate))
    seen = training.seen(every)
    shift = (live.states.mean(0) - np.concatenate(seen).mean(0)) / spread
    means = np.stack([one.mean(0) for one in seen])
    uncertain = np.sqrt(1 / len(live.bounds) + 1 / len(training.bounds))
    shift_limit = np.maximum(SHIFT_SPREADS, SHIFT_EPISODES * means.std(0) / spread * uncertain)
    against_targets = _against_targets(training, live, every)
    unreached = _unreached(training, live, seen).tolist()
    found = []
    for i, name in enumerate(training.names):
        ours, theirs = training.states[:, i], live.states[:, i]
        edges = np.linspace(min(ours.min(), theirs.min()), max(ours.max(), theirs.max()), _BINS + 1)
        if edges[0] == edges[-1]:
            edges = edges[0] + np.linspace(-0.5, 0.5, _BINS + 1)
        found.append(
            Dimension(
                name=name,
                title=f"state dimension {i} ({name})",
                training_range=(float(ours.min()), float(ours.max())),
                live_range=(float(theirs.min()), float(theirs.max())),
                outside=float(outside[:, i].mean()),
                shift=float(shift[i]),
                shift_limit=float(shift_limit[i]),
                **{
                    field: None if np.isnan(values[i]) else float(values[i])
                    for field, values in against_targets.items()
                },
                unreached=tuple(unreached[i]),
                edges=edges,
                training_histogram=np.histogram(ours, edges)[0] / len(ours),
                live_histogram=np.histogram(theirs, edges)[0] / len(theirs),
            )
        )
    return found


def _against_targets(training: Numbers, live: Numbers, every: int) -> dict[str, np.ndarray]:
    """Return the fields of `Dimension` that compare states with the targets before them.

    NaN where a state does not follow a target in training, or is not seen `every` so many frames.
    """
    ours, theirs = (one.after_targets(training) for one in (training, live))
    # How far a state is behind depends on the moment of the task.
    in_episode = np.concatenate([np.arange(end - begin) for begin, end in training.bounds])
    seen = ours[in_episode[training.pairs() + 1] % every == 0]
    if not len(seen) or not len(theirs):
        fields = ("offset", "offset_limit", "astray", "astray_limit")
        return dict.fromkeys(fields, np.full(len(training.names), np.nan))
    episodes = training.episode_medians(ours)
    limit = np.maximum(
        OFFSET_SPREADS * np.maximum(ours.std(0), seen.std(0)),
        np.maximum(OFFSET_EPISODES * episodes.std(0), training.noise),
    )
    away = theirs - np.median(seen, 0)
    offset = np.median(away, 0)
    is_steady = np.mean(away * np.sign(offset) > limit / 2, axis=0) >= _OFFSET_SHARE
    offset = np.where(is_steady, offset, 0.0)
    follows = ours.std(0) <= np.maximum(_FOLLOWS * training.spread, training.noise)
    astray_limit = np.maximum(ASTRAY, ASTRAY_TIMES * ours.std(0) / training.scale)
    found = {
        "offset": offset,
        "offset_limit": limit,
        "astray": theirs.std(0) / training.scale,
        "astray_limit": astray_limit,
    }
    return {field: np.where(follows, values, np.nan) for field, values in found.items()}


def _unreached(
    training: Numbers, live: Numbers, seen: Sequence[Float[np.ndarray, "m d"]]
) -> Float[np.ndarray, "d 2"]:
    """Return `Dimension.unreached`; 0 if all live episodes are too short to come so far."""
    if live.lengths().max() < _LONG_ENOUGH * np.median(training.lengths()):
        return np.zeros((len(training.names), 2))
    below = live.states.min(0) - np.max([one.min(0) for one in seen], 0)
    above = np.min([one.max(0) for one in seen], 0) - live.states.max(0)
    width = np.maximum(np.ptp(training.states, axis=0), training.noise)
    return np.maximum(np.stack([below, above], axis=1) / width[:, None], 0)


def _actions_of(policy: Policy, names: list[str]) -> Int[np.ndarray, " d"]:
    """Return the position of the action with the name of each state; -1 if there is none."""
    actions: list[str] = policy.metadata.get("actions", {}).get("names") or []
    return np.array([actions.index(name) if name in actions else -1 for name in names])
