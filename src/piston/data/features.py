"""Declare the features of a data set to record, and check frames against them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from piston.data.format import DERIVED

# One entry of "features" in info.json: {"dtype": ..., "shape": [...], "names": ...}
FeatureEntry = dict[str, Any]
Features = dict[str, FeatureEntry]

NUMERIC_DTYPES = (
    *("float16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
IMAGE_DTYPES = ("video", "image")
IMAGE_NAMES = ["height", "width", "channels"]

# Columns that the recorder fills in itself, in LeRobot's order.
BOOKKEEPING: Features = {
    key: {"dtype": "float32" if key == "timestamp" else "int64", "shape": [1], "names": None}
    for key in DERIVED
}

# LeRobot's own tools add these to an entry; they are kept, not used.
_CARRIED = ("info", "fps")


class FrameError(ValueError):
    """A frame does not match the declared features; the message names the key."""


def declare_features(features: Mapping[str, Mapping[str, Any]]) -> Features:
    """Return the entries of info.json, bookkeeping last. Raise ValueError if one is impossible."""
    declared: Features = {}
    for key, entry in features.items():
        if key in BOOKKEEPING:
            if _comparable(entry) != _comparable(BOOKKEEPING[key]):
                raise ValueError(
                    f"feature {key!r} is filled in by the recorder as {BOOKKEEPING[key]}, found "
                    f"{dict(entry)}: remove it or choose another name"
                )
            continue
        declared[key] = _declare(key, entry)
    if not declared:
        raise ValueError("no features: declare at least one, such as 'observation.state'")
    return declared | {key: dict(entry) for key, entry in BOOKKEEPING.items()}


def _declare(key: str, entry: Mapping[str, Any]) -> FeatureEntry:
    if not key or "/" in key:
        raise ValueError(f"feature name {key!r}: it must not be empty or contain '/' (use '.')")
    unknown = set(entry) - {"dtype", "shape", "names", *_CARRIED}
    if unknown or "dtype" not in entry or "shape" not in entry:
        raise ValueError(
            f"feature {key!r} needs 'dtype' and 'shape', may have 'names'; found {sorted(entry)}"
        )
    dtype, shape = entry["dtype"], [int(size) for size in entry["shape"]]
    if dtype not in NUMERIC_DTYPES + IMAGE_DTYPES:
        allowed = ", ".join(IMAGE_DTYPES + NUMERIC_DTYPES)
        raise ValueError(f"feature {key!r}: dtype {dtype!r} is not one of {allowed}")
    if not 1 <= len(shape) <= 5 or min(shape) < 1:
        raise ValueError(f"feature {key!r}: shape {shape} needs one to five positive sizes")
    names = entry.get("names")
    if dtype in IMAGE_DTYPES:
        if len(shape) != 3 or shape[2] != 3:
            raise ValueError(f"feature {key!r}: images are (height, width, 3), found shape {shape}")
        names = names or IMAGE_NAMES
    names = list(names) if isinstance(names, tuple) else names  # as JSON has them
    declared: FeatureEntry = {"dtype": dtype, "shape": shape, "names": names}
    return declared | {name: entry[name] for name in _CARRIED if name in entry}


def cameras(features: Features) -> list[str]:
    """Return the features whose frames are in video files."""
    return [key for key, entry in features.items() if entry["dtype"] == "video"]


def image_columns(features: Features) -> list[str]:
    """Return the features whose frames are in the data files, as PNG."""
    return [key for key, entry in features.items() if entry["dtype"] == "image"]


def same_features(a: Features, b: Features) -> bool:
    """Return whether frames for one match the other; names and video details may differ."""
    return {k: _comparable(v) for k, v in a.items()} == {k: _comparable(v) for k, v in b.items()}


def check_frame(frame: Mapping[str, Any], features: Features) -> dict[str, np.ndarray]:
    """Return the frame as arrays of the declared shapes and types. Raise FrameError otherwise."""
    expected = [key for key in features if key not in BOOKKEEPING]
    missing = [key for key in expected if key not in frame]
    extra = [key for key in frame if key not in expected]
    if missing or extra:
        found = [f"missing {missing}"] * bool(missing) + [f"not declared {extra}"] * bool(extra)
        raise FrameError(f"frame keys do not match the features: {'; '.join(found)}")
    return {key: _check_value(key, frame[key], features[key]) for key in expected}


def _check_value(key: str, value: Any, entry: FeatureEntry) -> np.ndarray:
    shape = tuple(entry["shape"])
    if entry["dtype"] in IMAGE_DTYPES:
        return _check_image(key, np.asarray(value), shape)
    dtype = np.dtype(entry["dtype"])
    if isinstance(value, bool | int | float) and shape == (1,):
        # A Python number has no dtype of its own: it only has to be one that the dtype can hold.
        array = np.array([value])
        if not np.can_cast(array.dtype, dtype, casting="same_kind"):
            raise FrameError(f"{key!r}: found {value!r}, expected a {dtype} number")
        array = array.astype(dtype)
    else:
        array = np.asarray(value)
    if array.dtype != dtype:
        raise FrameError(
            f"{key!r}: dtype is {array.dtype}, declared {dtype}. "
            f"Convert it: .astype(np.{dtype.name})"
        )
    if array.shape != shape:
        raise FrameError(f"{key!r}: shape is {array.shape}, declared {shape}")
    if dtype.kind == "f" and not np.isfinite(array).all():
        bad = [int(i) for i in np.flatnonzero(~np.isfinite(array))]
        raise FrameError(f"{key!r}: NaN or infinite at position {bad} (of the flattened value)")
    return array.copy()  # the caller may reuse its buffer before the episode is saved


def _check_image(key: str, image: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if image.dtype != np.uint8:
        raise FrameError(
            f"{key!r}: image dtype is {image.dtype}, expected uint8 with values 0..255"
        )
    if image.shape != shape:
        turned = image.ndim == 3 and (*image.shape[1:], image.shape[0]) == shape
        advice = ". Channels go last: transpose(1, 2, 0)" if turned else ""
        raise FrameError(f"{key!r}: image shape is {image.shape}, declared {shape}{advice}")
    return image.copy()


def _comparable(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    return entry["dtype"], tuple(entry["shape"])
