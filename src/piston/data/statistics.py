"""Normalisation statistics of states and actions, computed from columns; no image is decoded.

The values are those that training sees: every frame's chunk of actions, with the last action of an
episode repeated, after the repack and data transforms. Several data sets are treated as one, and
every frame counts once. Writing the result is left to `write_norm_stats`.

    mean, std   in float64, blocks merged as Chan, Golub and LeVeque do
    q01, q99    from a fine histogram in a window around the quantile; see `_QuantileSearch`

Dims: n frames, h horizon, s state dim, a action dim; d dimensions and m values of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.lib.stride_tricks import sliding_window_view

from piston.config import DataConfig
from piston.data.pipeline import PADDING_KEY, keys_used, leave_out
from piston.data.video import num_usable_cpus
from piston.progress import Progress, no_progress
from piston.transforms import Data, compose, missing_key
from piston.transforms.normalize import EPSILON, NormStats

STATISTICS_KEYS = ("state", "actions")
PIXEL = np.zeros((1, 1, 3), np.uint8)

# Numbers per block: enough that Python is not what takes time, few enough to stay in a cache.
BLOCK_VALUES = 2**20
# Frames of the sample that says where the quantiles are, and values taken from each chunk.
SMALLEST_SAMPLE, LARGEST_SAMPLE, SAMPLE_SHARE = 2**12, 2**16, 16
SAMPLED_STEPS = 4
# A value this many times the distance of the quantiles beyond them is a far outlier.
FAR = 5.0
PROBABILITIES = (0.01, 0.99)
# Bins per window, and the largest error of a quantile as a share of q99 − q01 + 1e-6.
NUM_BINS, QUANTILE_ERROR = 1024, 2.0**-11

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
    sampled = _choose(frames, num_sampled, seed)
    with ThreadPoolExecutor(num_threads or num_usable_cpus()) as pool:
        try:
            samples = _sample(pool, _blocks(sources, sampled), seed)
            searches = {
                key: _QuantileSearch(sample, len(sampled)) for key, sample in samples.items()
            }
            moments = _run(pool, _blocks(sources, frames), searches, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {
        key: KeyStatistics(
            NormStats(of_key.mean, of_key.std, *searches[key].quantiles()),
            *(of_key.count, searches[key].minimum, searches[key].maximum, samples[key]),
        )
        for key, of_key in moments.items()
    }


def _choose(frames: Frames, count: int, seed: int) -> Frames:
    if count >= len(frames):
        return frames
    return frames[np.sort(np.random.default_rng(seed).choice(len(frames), count, replace=False))]


@dataclasses.dataclass(frozen=True)
class _Block:
    """Frames of one source, few enough to be transformed at once."""

    source: TransformedColumns
    frames: Frames
    number: int

    def rows(self) -> dict[str, Values]:
        """Return one row per dimension for each key: all frames, and all steps of their chunks."""
        rows = {}
        for key, values in self.source.block(self.frames).items():
            if values.dtype not in (np.float32, np.float64):
                values = values.astype(np.float64)
            rows[key] = np.moveaxis(values, -1, 0).reshape(values.shape[-1], -1)
        return rows


def _blocks(sources: Sequence[TransformedColumns], frames: Frames) -> list[_Block]:
    """Cut ascending frames, counted over all sources, into blocks."""
    blocks: list[_Block] = []
    offset = 0
    for source in sources:
        first, stop = np.searchsorted(frames, [offset, offset + len(source)])
        own, size = frames[first:stop] - offset, max(1, BLOCK_VALUES // source.values_per_frame)
        for start in range(0, len(own), size):
            blocks.append(_Block(source, own[start : start + size], len(blocks)))
        offset += len(source)
    return blocks


def _sample(pool: ThreadPoolExecutor, blocks: Sequence[_Block], seed: int) -> dict[str, Values]:
    """Return some steps of each chunk of the blocks, at random."""

    def draw(block: _Block) -> dict[str, Values]:
        random, count = np.random.default_rng([seed, block.number]), len(block.frames)
        return {
            key: values[:, random.integers(values.shape[1], size=SAMPLED_STEPS * count)]
            if values.shape[1] > SAMPLED_STEPS * count
            else values
            for key, values in block.rows().items()
        }

    drawn = list(pool.map(draw, blocks))
    for key in STATISTICS_KEYS:
        for other in drawn[1:]:
            if len(drawn[0][key]) != len(other[key]):
                raise ValueError(
                    f"{key!r} has {len(drawn[0][key])} dimensions in one data set and "
                    f"{len(other[key])} in another: they have no common statistics. Compute them "
                    "separately."
                )
    return {key: np.concatenate([part[key] for part in drawn], 1) for key in STATISTICS_KEYS}


def _run(
    pool: ThreadPoolExecutor,
    blocks: Sequence[_Block],
    searches: dict[str, _QuantileSearch],
    progress: Progress,
) -> dict[str, Moments]:
    """Return the moments of all blocks, and add their values to the searches until they end."""

    def summarize(block: _Block) -> dict[str, tuple[Moments, _Tally]]:
        return {
            key: (_moments(block, key, values), searches[key].tally(values))
            for key, values in block.rows().items()
        }

    total, done = sum(len(block.frames) for block in blocks), 0
    moments: dict[str, Moments] = {}
    # In the order of the blocks, so that the same data give the same bits.
    for block, summary in zip(blocks, pool.map(summarize, blocks)):
        for key, (part, tally) in summary.items():
            moments[key] = moments[key].merge(part) if key in moments else part
            searches[key].add(tally)
        done += len(block.frames)
        progress(done, total)
    # Rarely, a window missed its quantile or was too wide; then the values are counted again.
    while again := [
        key for key, search in searches.items() if not search.end_pass(moments[key].count)
    ]:

        def recount(block: _Block, keys: Sequence[str] = again) -> dict[str, _Tally]:
            rows = block.rows()
            return {key: searches[key].tally(rows[key]) for key in keys}

        for tallies in pool.map(recount, blocks):
            for key, tally in tallies.items():
                searches[key].add(tally)
    return moments


def _moments(block: _Block, key: str, values: Values) -> Moments:
    """Return the moments of a block. Raise ValueError if a value is not finite."""
    moments = Moments.of(values)
    # A value that is not finite makes every sum that it is in not finite.
    if not np.isfinite(moments.squares).all():
        bad = np.flatnonzero(~np.isfinite(values).all(axis=0))[0]
        frame = int(block.frames[bad * len(block.frames) // values.shape[1]])
        raise ValueError(
            f"{key!r} is NaN or infinite after the data transforms, in "
            f"{block.source.place(frame)}. Repair the episode, or leave it out: "
            f"{block.source.how_to_leave_out(frame)}"
        )
    return moments


@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean, and sum of squared distances from the mean, in float64."""

    count: int
    mean: Float[np.ndarray, " d"]
    squares: Float[np.ndarray, " d"]

    @classmethod
    def of(cls, values: Values) -> Moments:
        # Distances from each row's first value: no cancellation however far from 0 the row is.
        count, first = values.shape[1], values[:, 0].astype(np.float64)
        total, squares = np.empty_like(first), np.empty_like(first)
        for dim, row in enumerate(values):
            distance = row.astype(np.float64)
            distance -= first[dim]
            total[dim], squares[dim] = distance.sum(), distance.dot(distance)
        squares -= total**2 / count
        return cls(count, first + total / count, np.maximum(squares, 0.0))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both together, as Chan, Golub and LeVeque add variances."""
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
class _Tally:
    """How many values lie below each window, and how many in each bin, with their sum."""

    below: Int[np.ndarray, "d 4"]
    counts: Int[np.ndarray, "d 4 bins"]
    sums: Float[np.ndarray, "d 4 bins"]
    minimum: Float[np.ndarray, " d"]
    maximum: Float[np.ndarray, " d"]


class _QuantileSearch:
    """Finds quantiles of more numbers than fit in memory.

    A random sample says between which two values a quantile almost surely lies. All values in this
    window are counted in bins, those below it as one number; so the counts tell in which bin the
    quantile is, and the result is the mean of that bin. If the window missed the quantile, or its
    bins are too wide, the values are counted once more in a window that is right.

        below: one count | bin | bin | bin | … | bin | above
                                  ↑ rank of the quantile

    `np.quantile` interpolates between two neighbouring values: each of the four has its window.
    The error is at most QUANTILE_ERROR · (q99 − q01 + 1e-6).
    """

    def __init__(self, sample: Values, num_independent: int) -> None:
        ordered = np.sort(sample, axis=1).astype(np.float64)
        size = ordered.shape[1]
        self._low, self._high = np.empty((2, len(ordered), 4))
        for which, probability in enumerate(np.repeat(PROBABILITIES, 2)):
            # Five standard deviations of the rank of a quantile in the sample.
            reach = 5.0 * np.sqrt(probability * (1 - probability) / num_independent)
            first, last = int((probability - reach) * size) - 1, int((probability + reach) * size)
            self._low[:, which] = ordered[:, max(first, 0)]
            self._high[:, which] = ordered[:, min(last + 1, size - 1)]
        # The windows begin and end with values that exist, so these are in one of the tallies.
        self.minimum, self.maximum = np.full((2, len(ordered)), [[np.inf], [-np.inf]])
        self._values, self._between = np.empty_like(self._low), np.zeros(2)
        self._tally: _Tally | None = None

    def tally(self, values: Values) -> _Tally:
        dims = len(values)
        below, shape = np.empty((dims, 4), np.int64), (dims, 4, NUM_BINS)
        counts, sums = np.zeros(shape, np.int64), np.zeros(shape)
        minimum, maximum = self.minimum.copy(), self.maximum.copy()
        for dim, row in enumerate(values):
            low, high = self._low[dim], self._high[dim]
            # Most values lie between the windows of the lower and those of the upper quantile. They
            # are compared in their own precision, rounded outwards.
            below_them = np.nextafter(row.dtype.type(high[:2].max()), row.dtype.type(np.inf))
            above_them = np.nextafter(row.dtype.type(low[2:].min()), row.dtype.type(-np.inf))
            ends = row[(row <= below_them) | (row >= above_them)].astype(np.float64)
            minimum[dim] = ends.min(initial=minimum[dim])
            maximum[dim] = ends.max(initial=maximum[dim])
            for which in range(4):
                start, width = low[which], high[which] - low[which]
                if which % 2 and (start, high[which]) == (low[which - 1], high[which - 1]):
                    for array in (below, counts, sums):
                        array[dim, which] = array[dim, which - 1]
                    continue
                between = (len(row) - len(ends)) * (which >= 2)
                below[dim, which] = np.count_nonzero(ends < start) + between
                inside = ends[(ends >= start) & (ends <= high[which])] - start
                bins = (inside / (width or 1.0) * NUM_BINS).astype(np.int64)
                bins = np.minimum(bins, NUM_BINS - 1)
                counts[dim, which] = np.bincount(bins, minlength=NUM_BINS)
                sums[dim, which] = np.bincount(bins, inside, minlength=NUM_BINS)
        return _Tally(below, counts, sums, minimum, maximum)

    def add(self, tally: _Tally) -> None:
        self.minimum = np.minimum(self.minimum, tally.minimum)
        self.maximum = np.maximum(self.maximum, tally.maximum)
        if self._tally is None:
            self._tally = tally
        else:
            for name in ("below", "counts", "sums"):
                total = getattr(self._tally, name)
                total += getattr(tally, name)

    def end_pass(self, num_values: int) -> bool:
        """Return whether all quantiles are found; otherwise move the windows."""
        if self._tally is None:
            return True
        tally, self._tally = self._tally, None
        positions = np.array(PROBABILITIES, np.float64) * (num_values - 1)
        self._between = positions % 1
        ranks = np.minimum(np.repeat(positions, 2) // 1 + [0, 1, 0, 1], num_values - 1)
        low, high = self._low, self._high
        width = (high - low) / NUM_BINS
        up_to = tally.below[..., np.newaxis] + tally.counts.cumsum(axis=2)
        which_bin = (up_to <= ranks[:, np.newaxis]).sum(axis=2)
        too_high, too_low = ranks < tally.below, which_bin == NUM_BINS

        place = np.minimum(which_bin, NUM_BINS - 1)[..., np.newaxis]
        count, total = (np.take_along_axis(a, place, 2) for a in (tally.counts, tally.sums))
        self._values = low + (total / np.maximum(count, 1))[..., 0]
        q01, q99 = self.quantiles()
        allowed = QUANTILE_ERROR * (np.maximum(q99 - q01, 0.0) + EPSILON)
        too_wide = width > allowed[:, np.newaxis]

        # The bin, and one on either side because edges are rounded.
        begin = low + (place[..., 0] - 1) * width
        minimum, maximum = (np.repeat(m[:, None], 4, 1) for m in (self.minimum, self.maximum))
        cases = [too_high, too_low, too_wide]
        self._low = np.select(cases, [minimum, high, begin], low)
        self._high = np.select(cases, [low, maximum, begin + 3 * width], high)
        return not np.any(cases)

    def quantiles(self) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
        below, above = self._values[:, [0, 2]], self._values[:, [1, 3]]
        q01, q99 = (below + (above - below) * self._between).T
        return q01, q99


class TransformedColumns:
    """`block(frames)` gives state (n, s) and actions (n, h, a) after the data transforms."""

    def __init__(self, dataset: Any, config: DataConfig, horizon: int) -> None:
        if not config.action_sequence_keys:
            raise ValueError(f"The pipeline of {config.repo_id!r} names no action_sequence_keys.")
        self._horizon = horizon
        self._config, self._name = config, str(config.repo_id)
        self._sequence_keys = config.action_sequence_keys
        self._transform = compose(
            (*config.repack_transforms.inputs, *config.data_transforms.inputs)
        )
        bounds = np.asarray(dataset.episode_bounds)
        lengths = bounds[:, 1] - bounds[:, 0]
        self._starts = bounds[:, 0]
        self._last = np.repeat(bounds[:, 1] - 1, lengths)
        # In a column of which every episode is `horizon − 1` longer.
        self._places = np.arange(len(self._last)) + np.repeat(
            np.arange(len(bounds)) * (horizon - 1), lengths
        )
        self._episodes = dataset.episodes
        self._cameras = dataset.cameras
        used = keys_used(config)
        wanted = None if used is None else {*used, *self._sequence_keys, "task_index"}
        self._columns = _read_columns(dataset, wanted, self._sequence_keys, horizon)
        self._tasks = dataset.metadata.tasks if config.prompt_from_task else None

    def __len__(self) -> int:
        return len(self._last)

    @property
    def values_per_frame(self) -> int:
        """How many numbers a frame's chunks hold, before the transforms."""
        sizes = (self._columns[key][..., 0].size for key in self._sequence_keys)
        return sum(sizes) * self._horizon

    def block(self, frames: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """`frames` ascending. An error names the first frame that the transforms refuse."""
        try:
            return self._transformed(frames)
        except Exception as error:
            self._locate(frames, error)
            raise

    def place(self, frame: int) -> str:
        """Where a frame is, in words."""
        episode = self._episode_of(frame)
        within = frame - self._starts[episode]
        return f"frame {within} of episode {self._episodes[episode].index} of {self._name}"

    def how_to_leave_out(self, frame: int) -> str:
        """The option that leaves a frame's episode out."""
        return leave_out(self._config, [self._episodes[self._episode_of(frame)].index])

    def _episode_of(self, frame: int) -> int:
        return int(np.searchsorted(self._starts, frame, side="right")) - 1

    def _transformed(self, frames: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        data = self._transform(self._gather(frames))
        for key in STATISTICS_KEYS:
            if key not in data:
                raise missing_key(key, data, f"Statistics of {self._name}")
        return {key: np.asarray(data[key]) for key in STATISTICS_KEYS}

    def _gather(self, frames: Int[np.ndarray, " n"]) -> Data:
        last = self._last[frames]
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
        is_pad: Bool[np.ndarray, "n h"] = np.arange(self._horizon) > (last - frames)[:, np.newaxis]
        data |= {f"{key}_is_pad": is_pad for key in self._sequence_keys}
        data[PADDING_KEY] = is_pad
        if self._tasks is not None:
            data["prompt"] = self._prompts(data["task_index"].reshape(-1), frames)
        return data

    def _prompts(self, task_index: np.ndarray, frames: Int[np.ndarray, " n"]) -> np.ndarray:
        assert self._tasks is not None
        # Once per task, not once per frame.
        numbers, which = np.unique(task_index, return_inverse=True)
        texts = [self._tasks.get(int(number)) for number in numbers]
        if None not in texts:
            return np.array(texts)[which]
        # Not in the table: the episode's first task, as in the items of a data set.
        first = [next(iter(episode.tasks), "") for episode in self._episodes]
        own = np.searchsorted(self._starts, frames, side="right") - 1
        pairs = zip(which.tolist(), own.tolist())
        return np.array([first[e] if (text := texts[w]) is None else text for w, e in pairs])

    def _locate(self, frames: Int[np.ndarray, " n"], error: Exception) -> None:
        """Adds a note that says which of the frames the error comes from."""
        for frame in frames:
            try:
                self._transformed(np.array([frame]))
            except type(error) as same:
                error.args, notes = same.args, getattr(same, "__notes__", [])
                error.__notes__ = [*notes, f"in {self.place(frame)}"]
                return
        error.add_note(f"in {self.place(frames[0])}, or up to {len(frames) - 1} frames later")


def _read_columns(
    dataset: Any, keys: Collection[str] | None, sequence_keys: Sequence[str], horizon: int
) -> dict[str, np.ndarray]:
    """Numbers with the frames as the last axis: of these keys, or of all.

    With the frames last in memory, NumPy runs through the transforms along frames and steps rather
    than along a few dimensions at a time, which is several times faster. In sequence keys, every
    episode's last value is repeated `horizon − 1` times: a frame's chunk is a window of the column.
    """
    bounds = np.asarray(dataset.episode_bounds)
    longer = bounds[:, 1] - bounds[:, 0] + horizon - 1
    shift = np.repeat(np.arange(len(bounds)) * (horizon - 1), longer)
    rows = np.minimum(np.arange(len(shift)) - shift, np.repeat(bounds[:, 1] - 1, longer))
    columns = {}
    for key in dataset.keys if keys is None else [key for key in dataset.keys if key in keys]:
        column = np.moveaxis(np.asarray(dataset.column(key)), 0, -1)
        if column.dtype.kind not in "biuf":
            continue  # text
        if key in sequence_keys:
            column = column[..., rows]
        columns[key] = np.ascontiguousarray(column)
    for key in sequence_keys:
        if key not in columns:
            raise missing_key(key, columns, f"Statistics of {dataset.metadata.root}")
    return columns
