"""Statistics of one episode, and of many episodes merged, as LeRobot's files hold them.

Knows numbers only: no files, no features. These numbers describe a data set to other tools;
training uses norm stats computed after the robot's transforms, which live elsewhere.

Columns: min, max, mean, std, count and quantiles per dimension. Quantiles are LeRobot's: the range
is cut in 5,000 equal bins and the value is interpolated inside its bin, so they are off by at most
one bin (range / 5,000).

Images: per channel, scaled to 0..1, over a sample of the frames (all up to
100, then at least 100 and n^0.75, at most 10,000, evenly spaced), each thinned to roughly 150
pixels when 300 or more. The sample depends on the episode's length, which nobody knows while
recording; a histogram per frame holds all that any sample will need, exactly.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int, UInt8

# One feature's statistics: "mean" -> array, "q01" -> array, ...
FeatureStats = dict[str, np.ndarray]
EpisodeStats = dict[str, FeatureStats]

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STAT_NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
NUM_BINS = 5000
# The range is widened by this on either side, so that the smallest and largest value fall inside a
# bin.
MARGIN = 1e-10


def column_stats(values: np.ndarray) -> FeatureStats:
    """Per dimension, over the rows. `values` is (n, ...); a plain column (n,) counts as one
    dimension.
    """
    if len(values) == 0:
        raise ValueError("an episode without frames has no statistics")
    rows = values.reshape(len(values), -1) if values.ndim > 1 else values[:, None]
    exact = rows.astype(np.float64)
    shape = values.shape[1:] or (1,)
    stats = {
        "min": rows.min(axis=0),
        "max": rows.max(axis=0),
        "mean": exact.mean(axis=0),
        "std": exact.std(axis=0),
    } | _binned_quantiles(exact)
    shaped = {name: value.reshape(shape) for name, value in stats.items()}
    return _ordered(shaped | {"count": np.array([len(values)])})


def frame_histogram(image: UInt8[np.ndarray, "h w c"]) -> Int[np.ndarray, "c 256"]:
    """How often each value occurs in each channel, after thinning large images."""
    height, width = image.shape[:2]
    if max(height, width) >= 300:
        step = max(height, width) // 150
        image = image[::step, ::step]
    channels = image.shape[2]
    # One count over all channels: each gets its own range of 256 values.
    offset = image.astype(np.int64) + 256 * np.arange(channels)
    return np.bincount(offset.ravel(), minlength=256 * channels).reshape(channels, 256)


def sampled_frames(num_frames: int) -> Int[np.ndarray, " n"]:
    """The frames of an episode whose pixels count for the statistics."""
    num_samples = max(min(num_frames, 100), min(int(num_frames**0.75), 10_000))
    return np.round(np.linspace(0, num_frames - 1, num_samples)).astype(np.int64)


def image_stats(histograms: Sequence[Int[np.ndarray, "c 256"]]) -> FeatureStats:
    """Per channel (c, 1, 1), scaled to 0..1, from the histograms of the sampled frames."""
    if len(histograms) == 0:
        raise ValueError("an episode without frames has no statistics")
    counts = np.sum(histograms, axis=0)
    channels = [_histogram_stats(channel) for channel in counts]
    stats = {
        name: np.array([channel[name] for channel in channels]).reshape(-1, 1, 1) / 255
        for name in channels[0]
    }
    return _ordered(stats | {"count": np.array([len(histograms)])})


def merge_stats(episodes: Iterable[EpisodeStats]) -> EpisodeStats:
    """The statistics of all episodes together, from those of each.

    mean and std are exact. True quantiles cannot be had from quantiles; LeRobot's files hold the
    outer bounds (the smallest q01, q10 and q50, the largest q90 and q99 of any episode), and so do
    these.
    """
    merged: EpisodeStats = {}
    for episode in episodes:
        for key, stats in episode.items():
            merged[key] = _merge_two(merged[key], stats) if key in merged else dict(stats)
    return merged


def _merge_two(a: FeatureStats, b: FeatureStats) -> FeatureStats:
    count = a["count"] + b["count"]
    share = b["count"] / count
    difference = b["mean"] - a["mean"]
    variance = (1 - share) * a["std"] ** 2 + share * b["std"] ** 2
    merged = {
        "min": np.minimum(a["min"], b["min"]),
        "max": np.maximum(a["max"], b["max"]),
        "mean": a["mean"] + share * difference,
        "std": np.sqrt(variance + share * (1 - share) * difference**2),
        "count": count,
    }
    for name, quantile in QUANTILES.items():
        if name in a and name in b:
            merged[name] = (np.minimum if quantile <= 0.5 else np.maximum)(a[name], b[name])
    return merged


def _binned_quantiles(rows: Float[np.ndarray, "n d"]) -> FeatureStats:
    ascending = np.sort(rows, axis=0)
    low, high = ascending[0] - MARGIN, ascending[-1] + MARGIN
    width = (high - low) / NUM_BINS
    # Where nothing moves (or so far from zero that the margin vanishes) a bin has no width to
    # interpolate in.
    constant = ascending[0] == ascending[-1]
    safe_width = np.where(constant, 1.0, width)
    quantiles = {}
    for name, quantile in QUANTILES.items():
        target = quantile * len(rows)
        value = ascending[max(int(np.ceil(target)), 1) - 1]
        index = _bin_of(value, low, safe_width)
        edge, next_edge = low + index * safe_width, low + (index + 1) * safe_width
        below = (rows < edge).sum(axis=0)
        inside = ((rows >= edge) & (rows < next_edge)).sum(axis=0)
        fraction = (target - below) / np.maximum(inside, 1)
        interpolated = np.where(index == 0, low, edge + fraction * safe_width)
        quantiles[name] = np.where(constant, value, interpolated)
    return quantiles


def _bin_of(
    value: Float[np.ndarray, " d"], low: Float[np.ndarray, " d"], width: Float[np.ndarray, " d"]
) -> Int[np.ndarray, " d"]:
    index = np.clip(np.floor((value - low) / width), 0, NUM_BINS - 1).astype(np.int64)
    # The division may round across an edge; the edges themselves decide.
    index -= value < low + index * width
    index += value >= low + (index + 1) * width
    return np.clip(index, 0, NUM_BINS - 1)


def _histogram_stats(counts: Int[np.ndarray, " 256"]) -> dict[str, float]:
    values = np.arange(256, dtype=np.float64)
    total = counts.sum()
    present = np.flatnonzero(counts)
    mean = float(counts @ values / total)
    stats = {
        "min": float(present[0]),
        "max": float(present[-1]),
        "mean": mean,
        "std": float(np.sqrt(counts @ (values - mean) ** 2 / total)),
    }
    low = present[0] - MARGIN
    width = (present[-1] + MARGIN - low) / NUM_BINS
    cumulative = np.cumsum(counts)
    for name, quantile in QUANTILES.items():
        target = quantile * total
        value = int(np.searchsorted(cumulative, target))
        # A bin is far narrower than one grey level, so a bin holds one value.
        index = int((value - low) / width)
        fraction = (target - cumulative[value] + counts[value]) / counts[value]
        moves = present[0] != present[-1]
        stats[name] = (
            float(value) if not moves else low + (index + fraction) * width if index else low
        )
    return stats


def _ordered(stats: FeatureStats) -> FeatureStats:
    return {name: stats[name] for name in STAT_NAMES if name in stats}
