"""The features of a data set to write: declaration, check of frames, Arrow columns, statistics.

Statistics of episodes describe a data set to other tools, as LeRobot's metadata holds them.
Training uses norm stats, which are computed after the robot's transforms (see `statistics`).

Columns: min, max, mean, std, count and quantiles per dimension. Quantiles follow LeRobot: the range
is divided into 5,000 equal bins and the value is interpolated within its bin.

Images: per channel, scaled to 0..1, over a sample of the frames (see `sampled_frames`); images of
300 pixels or more are thinned to about 150. The sample depends on the length of the episode, which
is not known while recording, so a histogram of every frame is kept.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int, Shaped, UInt8

from piston.data.format import CAMERA_DTYPES, DERIVED, LANGUAGE, Feature
from piston.data.language import Question, describe_language, is_text, language_array
from piston.suggestions import did_you_mean

Features = dict[str, Feature]
# The statistics of one feature by name: "mean", "q01", ...
FeatureStats = dict[str, np.ndarray]
EpisodeStats = dict[str, FeatureStats]

NUMERIC_DTYPES = (
    *("float16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
IMAGE_NAMES = ["height", "width", "channels"]

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STAT_NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
NUM_BINS = 5000
# The range is widened by this much at both ends, so that the extreme values fall inside a bin.
MARGIN = 1e-10


class FrameError(ValueError):
    """A frame does not match the declared features; the message names the key."""


def declare_features(
    entries: Mapping[str, Mapping[str, Any]], *, language: bool = False
) -> Features:
    """Return the features, bookkeeping and labels last. ValueError if one cannot be recorded."""
    added = DERIVED | LANGUAGE if language else DERIVED
    features = {key: _declare(key, entry, added) for key, entry in entries.items()}
    for key in features.keys() & added.keys():
        if str(features[key]) != str(added[key]):
            raise ValueError(
                f"feature {key!r} is filled in by the recorder as {added[key]}, found "
                f"{features[key]}: remove it or choose another name"
            )
    declared = {key: one for key, one in features.items() if key not in added}
    if not declared:
        raise ValueError("no features: declare at least one, such as 'observation.state'")
    return declared | added


def _declare(key: str, entry: Mapping[str, Any], added: Features) -> Feature:
    if not key or "/" in key:
        raise ValueError(f"feature name {key!r}: it must not be empty or contain '/' (use '.')")
    # LeRobot's own tools add "info" and "fps".
    if not {"dtype", "shape"} <= set(entry) <= {"dtype", "shape", "names", "info", "fps"}:
        raise ValueError(
            f"feature {key!r} needs 'dtype' and 'shape', may have 'names'; found {sorted(entry)}"
        )
    feature = Feature.parse(key, {**entry, "shape": list(entry["shape"])})
    if feature.is_language and key in added:
        return feature
    if feature.is_language:
        raise ValueError(
            f"feature {key!r} holds labels, which the recorder fills in: remove it and give "
            "language=True"
        )
    if feature.dtype not in NUMERIC_DTYPES + CAMERA_DTYPES:
        allowed = ", ".join(CAMERA_DTYPES + NUMERIC_DTYPES)
        raise ValueError(f"feature {key!r}: dtype {feature.dtype!r} is not one of {allowed}")
    shape = list(feature.shape)
    if not 1 <= len(shape) <= 5 or min(shape) < 1:
        raise ValueError(f"feature {key!r}: shape {shape} needs one to five positive sizes")
    if feature.is_camera and (len(shape) != 3 or shape[2] != 3):
        raise ValueError(f"feature {key!r}: images are (height, width, 3), found shape {shape}")
    names = feature.names or (IMAGE_NAMES if feature.is_camera else None)
    return dataclasses.replace(feature, names=names)


def check_frame(frame: Mapping[str, Any], features: Features) -> dict[str, np.ndarray]:
    """Return the frame as arrays of the declared shapes and types. Raise FrameError otherwise."""
    expected = [key for key in features if key not in DERIVED and key not in LANGUAGE]
    missing = [key for key in expected if key not in frame]
    extra = [key for key in frame if key not in expected]
    if missing or extra:
        raise FrameError(f"frame keys: missing {missing or 'none'}, not declared {extra or 'none'}")
    return {key: _check_value(key, frame[key], features[key]) for key in expected}


def _check_value(key: str, value: Any, feature: Feature) -> np.ndarray:
    is_image, shape = feature.is_camera, feature.shape
    dtype = np.dtype("uint8" if is_image else feature.dtype)
    array = np.asarray(value)
    if isinstance(value, bool | int | float) and shape == (1,):
        # A Python number has no dtype of its own: it only has to be one that the dtype can hold.
        if not np.can_cast(array.dtype, dtype, casting="same_kind"):
            raise FrameError(f"{key!r}: found {value!r}, expected a {dtype} number")
        array = array.astype(dtype).reshape(1)
    if (array.dtype, array.shape) != (dtype, shape):
        advice = f"Convert it: .astype(np.{dtype.name})" if array.dtype != dtype else ""
        if is_image:
            advice = "Images hold 0..255, channels last: transpose(1, 2, 0) if they come first"
        raise FrameError(
            f"{key!r}: found {array.dtype}{list(array.shape)}, declared {dtype}{list(shape)}. "
            f"{advice}".rstrip()
        )
    if dtype.kind == "f" and not np.isfinite(array).all():
        bad = np.flatnonzero(~np.isfinite(array)).tolist()
        raise FrameError(f"{key!r}: NaN or infinite at position {bad} (of the flattened value)")
    return array.copy()  # the caller may reuse its buffer before the episode is saved


def check_labels(subtask: str | None, questions: Sequence[Question], features: Features) -> None:
    """Raise FrameError if these are not labels that a frame can have."""
    if (subtask or questions) and not LANGUAGE.keys() <= features.keys():
        raise FrameError(
            "the frame has a subtask or questions, but the set has no columns for them: make the "
            "recorder with language=True"
        )
    if subtask and not is_text(subtask):
        raise FrameError(f"the subtask must be a sentence, found {subtask!r}")
    cameras = [key for key, feature in features.items() if feature.is_camera]
    for one in questions:
        if not isinstance(one, Question) or not (is_text(one.question) and is_text(one.answer)):
            raise FrameError(
                f"found {one!r} in questions, expected a Question with a camera, a question and "
                "an answer that are not empty"
            )
        if one.camera not in cameras:
            raise FrameError(
                f"the question {one.question!r} names the camera {one.camera!r}."
                f"{did_you_mean(str(one.camera), cameras)} Cameras: {', '.join(cameras) or 'none'}"
            )


def data_table(columns: Mapping[str, Any], features: Features) -> pa.Table:
    """Return the rows of one episode: every feature that is not a video.

    Numeric columns are (n, *shape) arrays, image columns lists of encoded images, columns of labels
    lists of cells (see `language`). The metadata describes the columns to Hugging Face `datasets`.
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
