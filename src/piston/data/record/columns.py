"""The columns of an episode to write: Arrow tables, and statistics for other tools.

Statistics of episodes describe a dataset as LeRobot's metadata holds them. Training uses norm
stats, which are computed after the robot's transforms (see `data.statistics`).

Columns: min, max, mean, std, count and quantiles per dimension. Quantiles follow LeRobot: the range
is divided into 5,000 equal bins and the value is interpolated within its bin.

Images: per channel, scaled to 0..1, over a sample of the frames (see `sampled_frames`); images of
300 pixels or more are thinned to about 150. The sample depends on the length of the episode, which
is not known while recording, so a histogram of every frame is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from piston.data.record.declare import Features
from piston.data.record.labels import describe_language, language_array

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped, UInt8

# The statistics of one feature by name: "mean", "q01", ...
FeatureStats = dict[str, np.ndarray]
EpisodeStats = dict[str, FeatureStats]

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STAT_NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
NUM_BINS = 5000
# The range is widened by this much at both ends, so that the extreme values fall inside a bin.
MARGIN = 1e-10


def data_table(columns: Mapping[str, Any], features: Features) -> pa.Table:
    """Return the rows of one episode: every feature that is not a video.

    Numeric columns are (n, *shape) arrays, image columns lists of encoded images, columns of labels
    lists of cells (see `labels`). The metadata describes the columns to Hugging Face `datasets`.
    """
    fields, arrays = [], []
    described: dict[str, dict[str, Any]] = {}
    for key, feature in features.items():
        dtype, shape, extension = feature.dtype, feature.shape, None
        if dtype == "video":
            continue
        described[key] = {"dtype": dtype, "_type": "Value"}
        if dtype == "image":
            described[key] = {"_type": "Image"}
            type_ = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            array = pa.array([{"bytes": data, "path": None} for data in columns[key]], type_)
        elif dtype == "language":
            described[key] = describe_language(key)
            array = language_array(key, columns[key])
        elif dtype == "string":
            array = pa.array(list(columns[key]), pa.string())
        else:
            array = pa.array(np.ascontiguousarray(columns[key], np.dtype(dtype)).ravel())
            if len(shape) > 1:
                for size in reversed(shape):
                    offsets = pa.array(np.arange(0, len(array) + 1, size), pa.int32())
                    array = pa.ListArray.from_arrays(offsets, array)
                # `datasets` stores these as an extension type over plain lists.
                name = f"Array{len(shape)}D"
                described[key] = {"shape": shape, "dtype": dtype, "_type": name}
                extension = {
                    "ARROW:extension:name": f"datasets.features.features.{name}ExtensionType",
                    "ARROW:extension:metadata": json.dumps([shape, dtype]),
                }
            elif shape != (1,):
                described[key] = {"feature": described[key], "length": shape[0], "_type": "List"}
                array = pa.FixedSizeListArray.from_arrays(array, shape[0])
        fields.append(pa.field(key, array.type, metadata=extension))
        arrays.append(array)
    metadata = {"huggingface": json.dumps({"info": {"features": described}})}
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))


def column_stats(values: np.ndarray) -> FeatureStats:
    """Compute statistics over the rows of (n, ...); a column (n,) counts as one dimension."""
    if len(values) == 0:
        raise ValueError("an episode without frames has no statistics")
    rows, shape = values.reshape(len(values), -1), values.shape[1:] or (1,)
    stats = _stats(rows, np.ones(rows.shape), len(values))
    return {n: value if n == "count" else value.reshape(shape) for n, value in stats.items()}


def image_stats(histograms: Sequence[Int[np.ndarray, "c 256"]]) -> FeatureStats:
    """Compute statistics per channel (c, 1, 1) from the histograms of the sampled frames."""
    counts = np.sum(histograms, axis=0).T
    values = np.broadcast_to(np.arange(256)[:, None], counts.shape)
    stats = _stats(values, counts, len(histograms))
    return {n: value if n == "count" else value[:, None, None] / 255 for n, value in stats.items()}


def _stats(
    values: Shaped[np.ndarray, "n d"], counts: Shaped[np.ndarray, "n d"], num_frames: int
) -> FeatureStats:
    """Compute the statistics of each column, in which values occur `counts` times."""
    exact, total, occurs = values.astype(np.float64), counts.sum(axis=0), counts > 0
    mean = (exact * counts).sum(axis=0) / total
    stats = {
        "min": np.where(occurs, values, values.max(axis=0)).min(axis=0),
        "max": np.where(occurs, values, values.min(axis=0)).max(axis=0),
        "mean": mean,
        "std": np.sqrt(((exact - mean) ** 2 * counts).sum(axis=0) / total),
        "count": np.array([num_frames]),
    }
    low, high = stats["min"].astype(np.float64), stats["max"].astype(np.float64)
    order = exact.argsort(axis=0)
    exact, counts = (np.take_along_axis(array, order, axis=0) for array in (exact, counts))
    start = low - MARGIN
    width = np.where(low == high, 1.0, (high + MARGIN - start) / NUM_BINS)
    bins = np.floor((exact - start) / width)
    # Rounding may have moved a value across an edge.
    bins += (exact >= start + (bins + 1) * width).astype(int) - (exact < start + bins * width)
    bins = np.clip(bins, 0, NUM_BINS - 1)
    cumulative = counts.cumsum(axis=0)
    for name, quantile in QUANTILES.items():
        target = quantile * total
        found = np.take_along_axis(bins, (cumulative < target).sum(axis=0)[None], axis=0)[0]
        before, inside = ((counts * where).sum(axis=0) for where in (bins < found, bins == found))
        fraction = np.where(found > 0, (target - before) / inside, 0.0)
        stats[name] = np.where(low == high, low, start + (found + fraction) * width)
    return stats


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


def merge_stats(episodes: Iterable[EpisodeStats]) -> EpisodeStats:
    """Compute the statistics of all episodes together from those of each.

    Mean and std are exact. Quantiles cannot be merged exactly; as in LeRobot's files, the result
    holds outer bounds: the smallest q01, q10 and q50 and the largest q90 and q99 of any episode.
    """
    merged: EpisodeStats = {}
    for episode in episodes:
        for key, b in episode.items():
            if key not in merged:
                merged[key] = b
                continue
            a = merged[key]
            count = a["count"] + b["count"]
            share = b["count"] / count
            difference = b["mean"] - a["mean"]
            variance = (1 - share) * a["std"] ** 2 + share * b["std"] ** 2
            merged[key] = {
                "min": np.minimum(a["min"], b["min"]),
                "max": np.maximum(a["max"], b["max"]),
                "mean": a["mean"] + share * difference,
                "std": np.sqrt(variance + share * (1 - share) * difference**2),
                "count": count,
            }
            for name, quantile in QUANTILES.items():
                if name in a and name in b:
                    bound = np.minimum if quantile <= 0.5 else np.maximum
                    merged[key][name] = bound(a[name], b[name])
    return merged
