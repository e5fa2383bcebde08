"""Normalisation statistics of states and actions, computed from columns; no image is decoded.

The values are those that training sees: every frame's chunk of actions, with the last action of an
episode repeated, after the repack and data transforms. Several data sets are treated as one, and
every frame counts once. Writing the result is left to `write_norm_stats`.

A sample of the frames is read first. It says where the quantiles almost surely are, so that of all
values only those close to them have to be kept; see `_KeyTotals`.

Dims: n frames, h horizon, s state dim, a action dim; d dimensions and m values of a block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.lib.stride_tricks import sliding_window_view

from piston.config import DataConfig
from piston.data.check import worker_threads
from piston.data.pipeline import PADDING_KEY, keys_used, leave_out
from piston.progress import Progress, no_progress
from piston.transforms import Data, compose, missing_key
from piston.transforms.normalize import EPSILON, NormStats

STATISTICS_KEYS = ("state", "actions")
PIXEL = np.zeros((1, 1, 3), np.uint8)

# Numbers per block: enough that Python is not what takes time, few enough to stay in a cache.
BLOCK_VALUES = 2**20
# Frames of the sample, and values taken from each chunk.
SMALLEST_SAMPLE, LARGEST_SAMPLE, SAMPLE_SHARE = 2**12, 2**16, 16
SAMPLED_STEPS = 4
# A value this many times the distance of the quantiles beyond them is a far outlier.
FAR = 5.0
PROBABILITIES = (0.01, 0.99)
# How many episodes a message lists, and how many frames of each.
_SHOWN = 5

Values = Float[np.ndarray, "d m"]
Frames = Int[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class KeyStatistics:
    """Statistics of the state or the actions. `sample`: some of the values, for a histogram."""

    norm_stats: NormStats
    count: int
    minimum: Float[np.ndarray, " d"]
    maximum: Float[np.ndarray, " d"]
    sample: Float[np.ndarray, "d k"]

    def far_outliers(self) -> list[int]:
        """Return the dimensions that move and have values far beyond the quantiles."""
        q01, q99 = self.norm_stats.quantiles
        width = q99 - q01
        beyond = np.maximum(q01 - self.minimum, self.maximum - q99)
        return np.flatnonzero((width > EPSILON) & (beyond > FAR * width)).tolist()


def compute_statistics(
    sources: Sequence[TransformedColumns],
    *,
    max_frames: int | None = None,
    seed: int = 0,
    num_threads: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, KeyStatistics]:
    """Compute the statistics of all sources together, or of `max_frames` random frames of them."""
    if max_frames is not None and max_frames < 1:
        raise ValueError(f"max_frames must be at least 1, is {max_frames}.")
    frames = np.arange(sum(len(source) for source in sources))
    if not len(frames):
        raise ValueError("There are no frames to compute statistics of.")
    if max_frames is not None:
        frames = _choose(frames, max_frames, seed)
    num_sampled = max(SMALLEST_SAMPLE, min(LARGEST_SAMPLE, len(frames) // SAMPLE_SHARE))
    sampled, reach = _choose(frames, num_sampled, seed), 5.0
    with worker_threads(num_threads) as (pool, _):
        samples = _sample(pool, _blocks(sources, sampled), seed)
        while True:
            totals = {k: _KeyTotals(sample, len(sampled), reach) for k, sample in samples.items()}
            _count(pool, _blocks(sources, frames), totals, progress)
            found = {key: one.statistics(samples[key]) for key, one in totals.items()}
            statistics = {key: one for key, one in found.items() if one is not None}
            if len(statistics) == len(found):
                return statistics
            reach *= 4  # very rarely: the sample was misleading


def _choose(frames: Frames, count: int, seed: int) -> Frames:
    if count >= len(frames):
        return frames
    return frames[np.sort(np.random.default_rng(seed).choice(len(frames), count, replace=False))]


def _blocks(
    sources: Sequence[TransformedColumns], frames: Frames
) -> list[tuple[TransformedColumns, Frames]]:
    """Cut ascending frames, counted over all sources, into blocks of one source."""
    blocks, offset = [], 0
    for source in sources:
        first, stop = np.searchsorted(frames, [offset, offset + len(source)])
        own, size = frames[first:stop] - offset, max(1, BLOCK_VALUES // source.values_per_frame)
        blocks += [(source, own[start : start + size]) for start in range(0, len(own), size)]
        offset += len(source)
    return blocks


def _sample(
    pool: ThreadPoolExecutor, blocks: Sequence[tuple[TransformedColumns, Frames]], seed: int
) -> dict[str, Values]:
    """Return some steps of each chunk of the blocks, at random."""

    def draw(block: tuple[TransformedColumns, Frames]) -> dict[str, Values]:
        source, frames = block
        random, count = np.random.default_rng([seed, frames[0]]), SAMPLED_STEPS * len(frames)
        return {
            key: values[:, random.integers(values.shape[1], size=count)]
            if values.shape[1] > count
            else values
            for key, values in source.rows(frames).items()
        }

    drawn = list(pool.map(draw, blocks))
    for key in STATISTICS_KEYS:
        first, *others = dict.fromkeys(len(part[key]) for part in drawn)
        if others:
            raise ValueError(
                f"{key!r} has {first} dimensions in one data set and {others[0]} in another: they "
                "have no common statistics. Compute them separately."
            )
    return {key: np.concatenate([part[key] for part in drawn], 1) for key in STATISTICS_KEYS}


def _count(
    pool: ThreadPoolExecutor,
    blocks: Sequence[tuple[TransformedColumns, Frames]],
    totals: dict[str, _KeyTotals],
    progress: Progress,
) -> None:
    """Add the values of all blocks to the totals. Raise ValueError if one is not finite."""

    def measure(block: tuple[TransformedColumns, Frames]) -> dict[str, _Part]:
        source, frames = block
        parts = {}
        for key, values in source.rows(frames).items():
            parts[key] = totals[key].measure(values)
            # A value that is not finite makes every sum that it is in not finite.
            if not np.isfinite(parts[key].sums).all():
                for column in np.flatnonzero(~np.isfinite(values).all(axis=0)):
                    episode, place = source.place(frames[column * len(frames) // values.shape[1]])
                    raise ValueError(
                        f"{key!r} is NaN or infinite after the data transforms, in {place}. Repair "
                        f"the episode, or leave it out: {leave_out(source.config, [episode])}"
                    )
        return parts

    total, done = sum(len(frames) for _, frames in blocks), 0
    # In the order of the blocks, so that the same data give the same bits.
    for (_, frames), parts in zip(blocks, pool.map(measure, blocks)):
        for key, part in parts.items():
            totals[key].add(part)
        done += len(frames)
        progress(done, total)


@dataclasses.dataclass
class _Part:
    """What `_KeyTotals` knows of some values."""

    count: int
    sums: Float[np.ndarray, "2 d"]  # of the distances from the centre, and of their squares
    minimum: Float[np.ndarray, " d"]
    maximum: Float[np.ndarray, " d"]
    # Values below each window, up to its lower end, and up to its upper end.
    ranks: Int[np.ndarray, "d 2 3"]
    inside: list[np.ndarray]  # values between the ends of a window: for each block, dim and window


class _KeyTotals:
    """Totals of all values of one key, block by block.

    Moments are sums of distances from the sample's median. A median is at most one standard
    deviation from the mean, so that no digits cancel however far from 0 the values are.

    For each quantile, the sample gives a window in which it almost surely lies, `reach` standard
    deviations of its rank wide. Values in the window are kept (about 1 % of all), others counted:

        below │ low │ inside: kept and sorted in the end │ high │ above
                            ↑ rank of the quantile

    Values equal to an end are counted as well, since there may be very many of them.
    """

    def __init__(self, sample: Values, num_independent: int, reach: float) -> None:
        ordered, size = np.sort(sample, axis=1), sample.shape[1]
        self._center = ordered[:, size // 2].astype(np.float64)
        ordered = np.pad(ordered, ((0, 0), (1, 1)), constant_values=(-np.inf, np.inf))
        windows = []
        for probability in PROBABILITIES:
            half = reach * np.sqrt(probability * (1 - probability) / num_independent)
            first, last = int((probability - half) * size), int((probability + half) * size) + 2
            windows.append(ordered[:, [max(first, 0), min(last, size + 1)]])
        self._windows = np.stack(windows, axis=1)
        self._total = self.measure(sample[:, :0])

    def measure(self, values: Values) -> _Part:
        dims = len(values)
        sums, ranks, inside = np.empty((2, dims)), np.empty((dims, 2, 3), np.int64), []
        minimum, maximum = np.full((2, dims), [[np.inf], [-np.inf]])
        for dim, row in enumerate(values):
            distance = row.astype(np.float64)
            distance -= self._center[dim]
            sums[:, dim] = distance.sum(), distance.dot(distance)
            # Most values lie between the window of the lower and that of the upper quantile.
            ends = row[(row <= self._windows[dim, 0, 1]) | (row >= self._windows[dim, 1, 0])]
            # The ends of windows exist, so the extremes of all values are in one of the blocks.
            minimum[dim], maximum[dim] = ends.min(initial=np.inf), ends.max(initial=-np.inf)
            for which, (low, high) in enumerate(self._windows[dim]):
                counts = [
                    np.count_nonzero(part) for part in (ends < low, ends <= low, ends <= high)
                ]
                ranks[dim, which] = np.add(counts, which * (len(row) - len(ends)))
                inside.append(ends[(ends > low) & (ends < high)])
        return _Part(values.shape[1], sums, minimum, maximum, ranks, inside)

    def add(self, part: _Part) -> None:
        total = self._total
        total.count += part.count
        total.sums += part.sums
        total.ranks += part.ranks
        total.minimum = np.minimum(total.minimum, part.minimum)
        total.maximum = np.maximum(total.maximum, part.maximum)
        total.inside += part.inside

    def statistics(self, sample: Values) -> KeyStatistics | None:
        """Return the statistics of all values; None if a quantile is not in its window."""
        total, dims = self._total, len(sample)
        shift, squares = total.sums / total.count
        std = np.sqrt(np.maximum(squares - shift**2, 0.0))
        quantiles = np.empty((2, dims))
        for which, dim in itertools.product(range(2), range(dims)):
            inside = np.sort(np.concatenate(total.inside[2 * dim + which :: 2 * dims]))
            position = PROBABILITIES[which] * (total.count - 1)
            rank = int(position)
            args = (inside, self._windows[dim, which], total.ranks[dim, which])
            lower = _order_statistic(rank, *args)
            upper = _order_statistic(min(rank + 1, total.count - 1), *args)
            quantiles[which, dim] = lower + (upper - lower) * (position - rank)
        if np.isnan(quantiles).any():
            return None
        norm_stats = NormStats(self._center + shift, std, *quantiles)
        return KeyStatistics(norm_stats, total.count, total.minimum, total.maximum, sample)


def _order_statistic(
    rank: int, inside: np.ndarray, window: np.ndarray, ranks: Int[np.ndarray, " 3"]
) -> float:
    """Return the value of this rank among all values; NaN if it is outside of the window."""
    below, up_to_low, up_to_high = ranks
    if below <= rank < up_to_low:
        return float(window[0])
    if up_to_low <= rank < up_to_low + len(inside):
        return float(inside[rank - up_to_low])
    return float(window[1]) if up_to_low <= rank < up_to_high else np.nan


class TransformedColumns:
    """States and actions of a data set after the data transforms, for any frames at once."""

    def __init__(self, dataset: Any, config: DataConfig, horizon: int) -> None:
        if not config.action_sequence_keys:
            raise ValueError(f"The pipeline of {config.repo_id!r} names no action_sequence_keys.")
        self.config = config
        self._horizon, self._sequence_keys = horizon, config.action_sequence_keys
        self._transform = compose(
            (*config.repack_transforms.inputs, *config.data_transforms.inputs)
        )
        self._episodes, self._cameras = dataset.episodes, dataset.cameras
        self._tasks = dataset.metadata.tasks if config.prompt_from_task else None
        self._starts, stops = np.asarray(dataset.episode_bounds).T
        lengths, added = stops - self._starts, np.arange(len(stops)) * (horizon - 1)
        self._last = np.repeat(stops - 1, lengths)
        # In sequence keys, every episode's last value is repeated `horizon − 1` times: a frame's
        # chunk is then a window of the column, which begins at the frame's place.
        self._places = np.arange(len(self._last)) + np.repeat(added, lengths)
        longer = lengths + horizon - 1
        rows = np.arange(longer.sum()) - np.repeat(added, longer)
        rows = np.minimum(rows, np.repeat(stops - 1, longer))
        # With the frames last in memory, NumPy runs through the transforms along frames and steps
        # rather than along a few dimensions at a time, which is several times faster.
        self._columns = {}
        used = keys_used(config)
        for key in dataset.keys:
            if used is None or key in (*used, *self._sequence_keys, "task_index"):
                column = np.moveaxis(np.asarray(dataset.column(key)), 0, -1)
                if column.dtype.kind in "biuf":  # not text
                    column = column[..., rows] if key in self._sequence_keys else column
                    self._columns[key] = np.ascontiguousarray(column)
        for key in self._sequence_keys:
            if key not in self._columns:
                raise missing_key(key, self._columns, f"Statistics of {dataset.metadata.root}")

    def __len__(self) -> int:
        return len(self._last)

    @property
    def values_per_frame(self) -> int:
        """How many numbers a frame's chunks hold, before the transforms."""
        sizes = (self._columns[key][..., 0].size for key in self._sequence_keys)
        return sum(sizes) * self._horizon

    def block(self, frames: Frames) -> dict[str, np.ndarray]:
        """Return state (n, s) and actions (n, h, a) of ascending frames.

        An error names the first frame that the transforms refuse.
        """
        try:
            return self._transformed(frames)
        except Exception as error:
            for frame in frames:
                try:
                    self._transformed(np.array([frame]))
                except type(error) as same:
                    error.args, notes = same.args, getattr(same, "__notes__", [])
                    error.__notes__ = [*notes, f"in {self.place(frame)[1]}"]
                    raise error from None
            last = f"or up to {len(frames) - 1} frames later"
            error.add_note(f"in {self.place(frames[0])[1]}, {last}")
            raise

    def rows(self, frames: Frames) -> dict[str, Values]:
        """Return one row per dimension for each key: all frames, and all steps of their chunks."""
        rows = {}
        for key, values in self.block(frames).items():
            if values.dtype not in (np.float32, np.float64):
                values = values.astype(np.float64)
            rows[key] = np.moveaxis(values, -1, 0).reshape(values.shape[-1], -1)
        return rows

    def place(self, frame: int) -> tuple[int, str]:
        """Return the episode of a frame, and where the frame is in words."""
        position = int(np.searchsorted(self._starts, frame, side="right")) - 1
        index, within = self._episodes[position].index, frame - self._starts[position]
        return index, f"frame {within} of episode {index} of {self.config.repo_id}"

    def _transformed(self, frames: Frames) -> dict[str, np.ndarray]:
        data: Data = {
            camera: np.broadcast_to(PIXEL, (len(frames), *PIXEL.shape)) for camera in self._cameras
        }
        for key, column in self._columns.items():
            if key in self._sequence_keys:
                windows = sliding_window_view(column, self._horizon, axis=-1)
                chunks = windows[..., self._places[frames], :]
                data[key] = np.moveaxis(chunks, (-2, -1), (0, 1))
            else:
                data[key] = np.moveaxis(column[..., frames], -1, 0)
        is_pad = np.arange(self._horizon) > (self._last[frames] - frames)[:, np.newaxis]
        data |= {f"{key}_is_pad": is_pad for key in self._sequence_keys}
        data[PADDING_KEY] = is_pad
        if self._tasks is not None:
            data["prompt"] = self._prompts(data["task_index"].reshape(-1), frames, self._tasks)
        data = self._transform(data)
        for key in STATISTICS_KEYS:
            if key not in data:
                raise missing_key(key, data, f"Statistics of {self.config.repo_id}")
        return {key: np.asarray(data[key]) for key in STATISTICS_KEYS}

    def _prompts(self, numbers: np.ndarray, frames: Frames, tasks: Mapping[int, str]) -> np.ndarray:
        # Once per task, not once per frame.
        unique, which = np.unique(numbers, return_inverse=True)
        texts = [tasks.get(int(number)) for number in unique]
        if None not in texts:
            return np.array(texts)[which]
        # Not in the table: the episode's first task, as in the items of a data set.
        first = [next(iter(episode.tasks), "") for episode in self._episodes]
        own = np.searchsorted(self._starts, frames, side="right") - 1
        pairs = zip(which.tolist(), own.tolist())
        return np.array([first[e] if (text := texts[w]) is None else text for w, e in pairs])


def require_finite(dataset: Any, config: DataConfig, horizon: int) -> None:
    """Raise ValueError if states or actions are NaN or infinite, naming episodes and frames.

    They are found in the columns; no frame is decoded. A value counts only if it is still there
    after the robot's transforms, which may drop or repair it.
    """
    used, suspect = keys_used(config), np.zeros(len(dataset), bool)
    for key in dataset.keys:
        column = dataset.column(key)
        is_used = used is None or key in used or key in config.action_sequence_keys
        if is_used and column.dtype.kind == "f":
            suspect |= ~np.isfinite(column).reshape(len(column), -1).all(axis=1)
    if not suspect.any():
        return
    columns = TransformedColumns(dataset, config, horizon)

    def is_bad(row: int) -> bool:
        try:
            values = columns.block(np.array([row]))
        except ValueError:  # raised by the robot's own check
            return True
        return not all(np.isfinite(array).all() for array in values.values())

    found: dict[int, str] = {}
    for episode, (start, stop) in zip(dataset.episodes, dataset.episode_bounds.tolist()):
        frames = np.flatnonzero(suspect[start:stop]).tolist()
        if bad := [frame for frame in frames[:_SHOWN] if is_bad(start + frame)]:
            found[episode.index] = f"{', '.join(map(str, bad))}{' …' * (len(frames) > _SHOWN)}"
    if found:
        listed = [f"episode {index} (frame {frames})" for index, frames in found.items()]
        more = f" and {len(found) - _SHOWN} more episodes" if len(found) > _SHOWN else ""
        raise ValueError(
            f"States or actions of {config.repo_id} are NaN or infinite: "
            f"{', '.join(listed[:_SHOWN])}{more}. Repair them, or leave the episodes out: "
            f"{leave_out(config, found)}"
        )
