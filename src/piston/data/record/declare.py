"""The features of a dataset to write: their declaration, and the check of each frame."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from piston.data.format import CAMERA_DTYPES, DERIVED, LANGUAGE, Feature
from piston.data.record.labels import Question, is_text
from piston.suggestions import did_you_mean

Features = dict[str, Feature]

NUMERIC_DTYPES = (
    *("float16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
IMAGE_NAMES = ["height", "width", "channels"]


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
