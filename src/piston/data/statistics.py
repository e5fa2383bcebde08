"""Normalisation statistics of states and actions, computed from columns; no image is decoded.

The values are those that training sees: every frame's chunk of actions, with the last action of an
episode repeated, after the repack and data transforms. Several data sets are treated as one, and
every frame counts once. Writing the result is left to `write_norm_stats`.

Dims: n frames, h horizon, s state dim, a action dim; d dimensions and m values of a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy.lib.stride_tricks import sliding_window_view

from piston.config import DataConfig
from piston.data.check import worker_threads
from piston.data.open import PADDING_KEY, keys_used
from piston.data.problems import leave_out
from piston.data.protocol import Dataset, episode_bounds, locate_frame
from piston.progress import Progress, no_progress
from piston.transforms import Data, compose, missing_key
from piston.transforms.normalize import EPSILON, NormStats

STATISTICS_KEYS = ("state", "actions")
PIXEL = np.zeros((1, 1, 3), np.uint8)

# Numbers per block: enough that Python is not what takes time, few enough to stay in a cache.
BLOCK_VALUES = 2**20
# Frames of the sample that says where the quantiles are, and values taken from each chunk.
SAMPLED_FRAMES, SAMPLED_STEPS = 2**13, 4
# A value this many times the distance of the quantiles beyond them is a far outlier.
FAR = 5.0
TAIL = 0.01  # the share of values below q01, and above q99
# How many episodes a message lists, and how many frames of each.
_SHOWN = 5

Values = Float[np.ndarray, "d m"]
Frames = Int[np.ndarray, " n"]
_Block = tuple["TransformedColumns", Frames]


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
    frames = _choose(frames, max_frames or len(frames), seed)
    blocks, reach = _blocks(sources, frames), 5.0
    sampled = _choose(frames, SAMPLED_FRAMES, seed)
    samples = _sample(_blocks(sources, sampled), seed)
    with worker_threads(num_threads) as (pool, _):
        while True:
            totals = {key: _KeyTotals(samples[key], len(sampled), reach) for key in samples}
            done = 0
            # In the order of the blocks, so that the same data give the same bits.
            measured = pool.map(functools.partial(_measure, totals), blocks)
            for (_, block), parts in zip(blocks, measured):
                for key, part in parts.items():
                    totals[key].add(part)
                done += len(block)
                progress(done, len(frames))
            statistics = {key: found for key in totals if (found := totals[key].statistics())}
            if statistics.keys() == totals.keys():
                return statistics
            reach *= 4  # very rarely: the sample was misleading


def _choose(frames: Frames, count: int, seed: int) -> Frames:
    if count >= len(frames):
        return frames
    return frames[np.sort(np.random.default_rng(seed).choice(len(frames), count, replace=False))]


def _blocks(sources: Sequence[TransformedColumns], frames: Frames) -> list[_Block]:
    """Cut ascending frames, counted over all sources, into blocks of one source."""
    blocks, offset = [], 0
    for source in sources:
        first, stop = np.searchsorted(frames, [offset, offset + len(source)])
        own, size = frames[first:stop] - offset, max(1, BLOCK_VALUES // source.values_per_frame)
        blocks += [(source, own[start : start + size]) for start in range(0, len(own), size)]
        offset += len(source)
    return blocks


def _sample(blocks: Sequence[_Block], seed: int) -> dict[str, Values]:
    """Return some steps of each chunk of the blocks, at random."""
    random, samples = np.random.default_rng(seed), {}
    drawn = [source.rows(frames) for source, frames in blocks]
    for key in STATISTICS_KEYS:
        first, *others = dict.fromkeys(len(rows[key]) for rows in drawn)
        if others:
            raise ValueError(
                f"{key!r} has {first} dimensions in one data set and {others[0]} in another: they "
                "have no common statistics. Compute them separately."
            )
        values = np.concatenate([rows[key] for rows in drawn], axis=1)
        count = SAMPLED_STEPS * sum(len(frames) for _, frames in blocks)
        if values.shape[1] > count:
            values = values[:, random.integers(values.shape[1], size=count)]
        samples[key] = values
    return samples


def _measure(totals: Mapping[str, _KeyTotals], block: _Block) -> dict[str, _Part]:
    """Return what the totals need of a block. Raise ValueError if a value is not finite."""
    (source, frames), parts = block, {}
    for key, values in source.rows(frames).items():
        parts[key] = totals[key].measure(values)
        # A value that is not finite makes every sum that it is in not finite.
        if not np.isfinite(parts[key].sums).all() and not np.isfinite(values).all():
            column = np.flatnonzero(~np.isfinite(values).all(axis=0))[0]
            episode, place = source.place(frames[column * len(frames) // values.shape[1]])
            raise ValueError(
                f"{key!r} is NaN or infinite after the data transforms, in {place}. Repair the "
                f"episode, or leave it out: {leave_out(source.config, [episode])}"
            )
    return parts


@dataclasses.dataclass
class _Part:
    """What the totals need of some values."""

    count: int
    sums: Float[np.ndarray, "2 d"]  # of the distances from the origin, and of their squares
    ranks: Int[np.ndarray, "d 2"]  # how many values are at the bound of each tail or beyond it
    tails: list[np.ndarray]  # the values beyond: for each block, dimension and tail


class _KeyTotals:
    """Totals of all values of one key, block by block.

    Moments are sums of distances from one of the values, the origin, so that hardly any digits
    cancel however far from 0 the values are.

    Quantiles are exact: a sample gives bounds beyond which the smallest and the largest 1 % of the
    values almost surely are, `reach` standard deviations of a rank further in. The values beyond
    them are kept, about 3 %. Those at a bound are counted, since they may be most of all values.

        kept │ low: counted │ neither │ high: counted │ kept
           ↑ q01                                       ↑ q99

    The upper tail is kept with its sign changed: its quantile is then that of the lower one.
    """

    def __init__(self, sample: Values, num_independent: int, reach: float) -> None:
        ordered, size = np.sort(sample, axis=1), sample.shape[1]
        self._sample = sample
        self._origin = ordered[:, size // 2].astype(np.float64)
        share = TAIL + reach * np.sqrt(TAIL * (1 - TAIL) / num_independent)
        bounds = np.pad(ordered, ((0, 0), (1, 1)), constant_values=(-np.inf, np.inf))
        place = min(int(share * size) + 2, size + 1)
        self._bounds = np.stack([bounds[:, place], -bounds[:, -1 - place]], axis=1)
        self._total = self.measure(sample[:, :0])

    def measure(self, values: Values) -> _Part:
        dims = len(values)
        sums, ranks, tails = np.empty((2, dims)), np.empty((dims, 2), np.int64), []
        for dim, row in enumerate(values):
            distance = row.astype(np.float64)
            distance -= self._origin[dim]
            sums[:, dim] = distance.sum(), distance.dot(distance)
            low, high = self._bounds[dim]
            ends = row[(row <= low) | (row >= -high)]
            for which, tail in enumerate((ends, -ends)):
                bound = self._bounds[dim, which]
                ranks[dim, which] = np.count_nonzero(tail <= bound)
                tails.append(tail[tail < bound])
        return _Part(values.shape[1], sums, ranks, tails)

    def add(self, part: _Part) -> None:
        self._total.count += part.count
        self._total.sums += part.sums
        self._total.ranks += part.ranks
        self._total.tails += part.tails

    def statistics(self) -> KeyStatistics | None:
        """Return the statistics of all values; None if a quantile is not beyond its bound."""
        total, dims = self._total, len(self._sample)
        shift, squares = total.sums / total.count
        std = np.sqrt(np.maximum(squares - shift**2, 0.0))
        position = TAIL * (total.count - 1)
        rank = int(position)
        found = np.empty((2, dims, 3))  # the extreme value, and the two beside the quantile
        for which, dim in np.ndindex(2, dims):
            values = np.concatenate(total.tails[2 * dim + which :: 2 * dims])
            ranks = [0, rank, min(rank + 1, total.count - 1)]
            if len(values):
                values.partition(np.minimum(ranks, len(values) - 1))
            for column, one in enumerate(ranks):
                at_bound = self._bounds[dim, which] if one < total.ranks[dim, which] else np.nan
                found[which, dim, column] = values[one] if one < len(values) else at_bound
        (minimum, maximum), lower, upper = np.moveaxis(found * [[[1]], [[-1]]], -1, 0)
        quantiles = lower + (upper - lower) * (position - rank)
        if np.isnan(quantiles).any():
            return None
        norm_stats = NormStats(self._origin + shift, std, *quantiles)
        return KeyStatistics(norm_stats, total.count, minimum, maximum, self._sample)


class TransformedColumns:
    """States and actions of a data set after the data transforms, for any frames at once."""

    def __init__(self, dataset: Dataset, config: DataConfig, horizon: int) -> None:
        if not config.action_sequence_keys:
            raise ValueError(f"The pipeline of {config.repo_id!r} names no action_sequence_keys.")
        self.config = config
        self._horizon, self._sequence_keys = horizon, config.action_sequence_keys
        self._transform = compose(
            (*config.repack_transforms.inputs, *config.data_transforms.inputs)
        )
        self._episodes, self._cameras = dataset.episodes, dataset.cameras
        self._tasks = dataset.texts["task"] if config.prompt_from_task else None
        starts, stops = episode_bounds(dataset).T
        self._stops = stops
        lengths, added = stops - starts, np.arange(len(stops)) * (horizon - 1)
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
            if used is None or key in (*used, *self._sequence_keys):
                column = np.moveaxis(np.asarray(dataset.column(key)), 0, -1)
                if column.dtype.kind in "biuf":  # not text
                    column = column[..., rows] if key in self._sequence_keys else column
                    self._columns[key] = np.ascontiguousarray(column)
        for key in self._sequence_keys:
            if key not in self._columns:
                raise missing_key(key, self._columns, f"Statistics of {dataset.root}")

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
        episode, within = locate_frame(frame, self._episodes, self._stops)
        return episode.index, f"frame {within} of episode {episode.index} of {self.config.title}"

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
            texts = (*self._tasks.values, "")  # the last one is that of frames without a task
            data["prompt"] = np.array([texts[i] for i in self._tasks.numbers[frames].tolist()])
        data = self._transform(data)
        for key in STATISTICS_KEYS:
            if key not in data:
                raise missing_key(key, data, f"Statistics of {self.config.title}")
        return {key: np.asarray(data[key]) for key in STATISTICS_KEYS}


def require_finite(dataset: Dataset, config: DataConfig, horizon: int) -> None:
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
    for episode, (start, stop) in zip(dataset.episodes, episode_bounds(dataset).tolist()):
        frames = np.flatnonzero(suspect[start:stop]).tolist()
        if bad := [frame for frame in frames[:_SHOWN] if is_bad(start + frame)]:
            found[episode.index] = f"{', '.join(map(str, bad))}{' …' * (len(frames) > _SHOWN)}"
    if found:
        listed = [f"episode {index} (frame {frames})" for index, frames in found.items()]
        more = f" and {len(found) - _SHOWN} more episodes" if len(found) > _SHOWN else ""
        raise ValueError(
            f"States or actions of {config.title} are NaN or infinite: "
            f"{', '.join(listed[:_SHOWN])}{more}. Repair them, or leave the episodes out: "
            f"{leave_out(config, found)}"
        )
