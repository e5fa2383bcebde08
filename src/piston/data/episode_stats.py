"""Statistics of one episode and of several episodes together, as LeRobot's metadata holds them.

They describe a data set to other tools. Training uses norm stats, which are computed after the
robot's transforms (see `statistics`).

Columns: min, max, mean, std, count and quantiles per dimension. Quantiles follow LeRobot: the range
is divided into 5,000 equal bins and the value is interpolated within its bin.

Images: per channel, scaled to 0..1, over a sample of the frames (see `sampled_frames`); images of
300 pixels or more are thinned to about 150. The sample depends on the length of the episode, which
is not known while recording, so a histogram of every frame is kept.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int, UInt8

# The statistics of one feature by name: "mean", "q01", ...
FeatureStats = dict[str, np.ndarray]
EpisodeStats = dict[str, FeatureStats]

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STAT_NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
NUM_BINS = 5000
# The range is widened by this much at both ends, so that the extreme values fall inside a bin.
MARGIN = 1e-10


def column_stats(values: np.ndarray) -> FeatureStats:
    """Compute statistics over the rows of (n, ...); a column (n,) counts as one dimension."""
    if len(values) == 0:
        raise ValueError("an episode without frames has no statistics")
    rows = values.reshape(len(values), -1)
    exact = rows.astype(np.float64)
    ones = np.ones(len(rows))
    quantiles = [_binned_quantiles(column, ones) for column in exact.T]
    stats = {
        "min": rows.min(axis=0),
        "max": rows.max(axis=0),
        "mean": exact.mean(axis=0),
        "std": exact.std(axis=0),
        "count": np.array([len(rows)]),
    } | {name: np.array([column[name] for column in quantiles]) for name in QUANTILES}
    shape = values.shape[1:] or (1,)
    return {k: v if k == "count" else v.reshape(shape) for k, v in stats.items()}


def frame_histogram(image: UInt8[np.ndarray, "h w c"]) -> Int[np.ndarray, "c 256"]:
    """Count the values of each channel, after thinning large images."""
    size = max(image.shape[:2])
    if size >= 300:
        image = image[:: size // 150, :: size // 150]
    channels = image.shape[2]
    # One count over all channels: each has its own range of 256 values.
    offset = image.astype(np.int64) + 256 * np.arange(channels)
    return np.bincount(offset.ravel(), minlength=256 * channels).reshape(channels, 256)


def sampled_frames(num_frames: int) -> Int[np.ndarray, " n"]:
    """Return the frames of an episode that image statistics use, evenly spaced.

    All frames up to 100; then n^0.75, at least 100 and at most 10,000.
    """
    num_samples = max(min(num_frames, 100), min(int(num_frames**0.75), 10_000))
    return np.round(np.linspace(0, num_frames - 1, num_samples)).astype(np.int64)


def image_stats(histograms: Sequence[Int[np.ndarray, "c 256"]]) -> FeatureStats:
    """Compute statistics per channel (c, 1, 1) from the histograms of the sampled frames."""
    if len(histograms) == 0:
        raise ValueError("an episode without frames has no statistics")
    channels = [_channel_stats(counts) for counts in np.sum(histograms, axis=0)]
    stats = {
        name: np.array([channel[name] for channel in channels]).reshape(-1, 1, 1) / 255
        for name in channels[0]
    } | {"count": np.array([len(histograms)])}
    return {name: stats[name] for name in STAT_NAMES}


def merge_stats(episodes: Iterable[EpisodeStats]) -> EpisodeStats:
    """Compute the statistics of all episodes together from those of each.

    Mean and std are exact. Quantiles cannot be merged exactly; as in LeRobot's files, the result
    holds outer bounds: the smallest q01, q10 and q50 and the largest q90 and q99 of any episode.
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


def _binned_quantiles(
    values: Float[np.ndarray, " n"], counts: Float[np.ndarray, " n"]
) -> dict[str, float]:
    low, high = values.min(), values.max()
    if low == high:
        return dict.fromkeys(QUANTILES, float(low))
    edges = np.linspace(low - MARGIN, high + MARGIN, NUM_BINS + 1)
    bins = np.clip(np.searchsorted(edges, values, "right") - 1, 0, NUM_BINS - 1)
    histogram = np.bincount(bins, counts, NUM_BINS)
    cumulative = np.cumsum(histogram)
    quantiles = {}
    for name, quantile in QUANTILES.items():
        target = quantile * cumulative[-1]
        index = int(np.searchsorted(cumulative, target))
        fraction = (target - cumulative[index - 1]) / histogram[index] if index else 0.0
        quantiles[name] = float(edges[index] + fraction * (edges[index + 1] - edges[index]))
    return quantiles


def _channel_stats(histogram: Int[np.ndarray, " 256"]) -> dict[str, float]:
    values = np.flatnonzero(histogram).astype(np.float64)
    counts = histogram[histogram > 0].astype(np.float64)
    mean = np.average(values, weights=counts)
    return {
        "min": values[0],
        "max": values[-1],
        "mean": mean,
        "std": np.sqrt(np.average((values - mean) ** 2, weights=counts)),
    } | _binned_quantiles(values, counts)
