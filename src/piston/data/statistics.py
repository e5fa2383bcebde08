"""Normalisation statistics of states and actions, from columns: seconds, not hours.

Everything is exact: mean and standard deviation in float64 (blocks merged as Chan et al. do),
quantiles as sorting all values would give them. Several data sets are taken as one; quantiles are
never averaged. Each frame counts once. Knows nothing of files: `write_norm_stats` keeps the result.

Dims: d dimensions of a state or action, n frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float, Int

from piston.data.quantiles import Brackets, Moments, QuantileSearch, Tails, Values
from piston.data.transformed_columns import STATISTICS_KEYS, TransformedColumns
from piston.data.video import num_usable_cpus
from piston.transforms.normalize import EPSILON, NormStats

Progress = Callable[[int], None]  # told how many more frames are done

# Numbers per block: enough that Python is not what takes time, few enough to stay in a cache.
BLOCK_VALUES = 2**20
# Frames of the sample that says where to look for quantiles, and values taken of each chunk.
SMALLEST_SAMPLE, LARGEST_SAMPLE, SAMPLE_SHARE = 2**12, 2**16, 16
SAMPLED_STEPS = 4
# A value this many times the distance of the quantiles beyond them is a far outlier.
FAR = 5.0

Block = tuple[TransformedColumns, Int[np.ndarray, " n"]]


@dataclasses.dataclass(frozen=True)
class KeyStatistics:
    """What is known of the state or the actions. `sample`: some of the values, for a histogram."""

    norm_stats: NormStats
    count: int
    minimum: Float[np.ndarray, " d"]
    maximum: Float[np.ndarray, " d"]
    sample: Float[np.ndarray, "d k"]

    def far_outliers(self) -> list[int]:
        """Dimensions that move and have values far beyond the quantiles."""
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
    progress: Progress | None = None,
) -> dict[str, KeyStatistics]:
    """Of all sources together; with `max_frames` of a random choice of their frames.

    `progress` is told how many more frames are done.
    """
    blocks = _blocks(sources, max_frames, seed)
    if not blocks:
        raise ValueError("There are no frames to compute statistics of.")
    with ThreadPoolExecutor(num_threads or num_usable_cpus()) as pool:
        try:
            samples, independent = _sample(pool, blocks, seed)
            return _search(pool, blocks, samples, independent, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _blocks(
    sources: Sequence[TransformedColumns], max_frames: int | None, seed: int
) -> list[Block]:
    total = sum(len(source) for source in sources)
    chosen = None
    if max_frames is not None and max_frames < total:
        if max_frames < 1:
            raise ValueError(f"max_frames must be at least 1, is {max_frames}.")
        chosen = _choose(total, max_frames, seed)
    blocks: list[Block] = []
    offset = 0
    for source in sources:
        if chosen is None:
            frames = np.arange(len(source))
        else:
            first, stop = np.searchsorted(chosen, [offset, offset + len(source)])
            frames = chosen[first:stop] - offset
        size = max(1, BLOCK_VALUES // source.values_per_frame)
        blocks += [(source, frames[i : i + size]) for i in range(0, len(frames), size)]
        offset += len(source)
    return blocks


def _choose(total: int, count: int, seed: int) -> Int[np.ndarray, " n"]:
    return np.sort(np.random.default_rng(seed).choice(total, count, replace=False))


def _sample(
    pool: ThreadPoolExecutor, blocks: Sequence[Block], seed: int
) -> tuple[dict[str, Values], int]:
    """Some values of every key at random, and how many frames they come from."""
    total = sum(len(frames) for _, frames in blocks)
    count = min(total, max(SMALLEST_SAMPLE, min(LARGEST_SAMPLE, total // SAMPLE_SHARE)))
    ends = np.cumsum([len(frames) for _, frames in blocks])
    chosen = _choose(total, count, seed)
    parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    few = [
        (source, frames[part - (end - len(frames))])
        for (source, frames), part, end in zip(blocks, parts, ends)
        if len(part)
    ]

    def draw(numbered: tuple[int, Block]) -> dict[str, Values]:
        number, (source, frames) = numbered
        random = np.random.default_rng([seed, number])
        return {
            key: _some(values, SAMPLED_STEPS * len(frames), random)
            for key, values in _rows(source, frames).items()
        }

    drawn = list(pool.map(draw, enumerate(_merged(few))))
    for part in drawn[1:]:
        _check_dimensions(drawn[0], part)
    samples = {key: np.concatenate([part[key] for part in drawn], 1) for key in STATISTICS_KEYS}
    return samples, count


def _some(values: Values, count: int, random: np.random.Generator) -> Values:
    size = values.shape[1]
    return values if size <= count else values[:, random.integers(size, size=count)]


def _merged(few: Sequence[Block]) -> Iterator[Block]:
    """Neighbouring blocks of one source joined up to the usual size."""
    waiting: list[Block] = []
    for source, frames in few:
        size = sum(len(others) for _, others in waiting) + len(frames)
        if waiting and (
            waiting[0][0] is not source or size * source.values_per_frame > BLOCK_VALUES
        ):
            yield waiting[0][0], np.concatenate([others for _, others in waiting])
            waiting = []
        waiting.append((source, frames))
    yield waiting[0][0], np.concatenate([others for _, others in waiting])


def _search(
    pool: ThreadPoolExecutor,
    blocks: Sequence[Block],
    samples: dict[str, Values],
    independent: int,
    progress: Progress | None,
) -> dict[str, KeyStatistics]:
    widening = 1.0
    while True:
        brackets = {
            key: Brackets.from_sample(sample, independent, widening)
            for key, sample in samples.items()
        }
        moments, searches = _pass(pool, blocks, brackets, progress)
        quantiles = {key: search.quantiles() for key, search in searches.items()}
        if all(found is not None for found in quantiles.values()):
            break
        widening *= 4.0
        progress = None  # all frames have been counted once
    result = {}
    for key in STATISTICS_KEYS:
        found, of_key = quantiles[key], moments[key]
        assert found is not None
        norm_stats = NormStats(of_key.mean, of_key.std, found[0], found[1])
        result[key] = KeyStatistics(
            norm_stats, of_key.count, *searches[key].extremes(), samples[key]
        )
    return result


def _pass(
    pool: ThreadPoolExecutor,
    blocks: Sequence[Block],
    brackets: dict[str, Brackets],
    progress: Progress | None,
) -> tuple[dict[str, Moments], dict[str, QuantileSearch]]:
    def summarize(block: Block) -> dict[str, tuple[Moments, Tails]]:
        return {
            key: (_moments(block, key, values), Tails.of(values, brackets[key]))
            for key, values in _rows(*block).items()
        }

    moments: dict[str, Moments] = {}
    searches = {key: QuantileSearch(brackets[key]) for key in STATISTICS_KEYS}
    # In the order of the blocks, so that the same data give the same bits.
    for (_, frames), summary in zip(blocks, pool.map(summarize, blocks)):
        for key, (part, tails) in summary.items():
            moments[key] = moments[key].merge(part) if key in moments else part
            searches[key].add(tails)
        if progress is not None:
            progress(len(frames))
    return moments, searches


def _rows(source: TransformedColumns, frames: Int[np.ndarray, " n"]) -> dict[str, Values]:
    """One row per dimension, of each key: all frames, and all steps of their chunks."""
    rows = {}
    for key, values in source.block(frames).items():
        if values.dtype not in (np.float32, np.float64):
            values = values.astype(np.float64)
        rows[key] = np.moveaxis(values, -1, 0).reshape(values.shape[-1], -1)
    return rows


def _moments(block: Block, key: str, values: Values) -> Moments:
    """Also finds what is not a number: it spoils every sum that it is in."""
    moments = Moments.of(values)
    if not np.isfinite(moments.squares).all():
        source, frames = block
        bad = np.flatnonzero(~np.isfinite(values).all(axis=0))[0]
        frame = int(frames[bad * len(frames) // values.shape[1]])
        raise ValueError(
            f"{key!r} is NaN or infinite after the data transforms, in {source.place(frame)}. "
            f"Repair the episode, or leave it out: {source.how_to_leave_out(frame)}"
        )
    return moments


def _check_dimensions(first: dict[str, Values], other: dict[str, Values]) -> None:
    for key in STATISTICS_KEYS:
        if len(first[key]) != len(other[key]):
            raise ValueError(
                f"{key!r} has {len(first[key])} dimensions in one data set and {len(other[key])} "
                "in another: they have no common statistics. Compute them separately."
            )
