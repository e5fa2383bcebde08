"""NumPy arrays and scalars as the maps that carry them in a message.

    array     {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}
    scalar    {b"__npgeneric__": True, b"data": number, b"dtype": "<f4"}

Reading trusts nothing: a dtype is one of a few plain kinds, the data has the size that shape and
dtype say, and every value is one that its dtype can hold. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from piston.client.errors import ProtocolError, shortened

ARRAY, SCALAR = b"__ndarray__", b"__npgeneric__"

# What dtype.str gives for bool, integers, floats, bytes and text; no objects, records or dates.
_DTYPE = re.compile(r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|\|S[1-9]\d{0,8}|[<>]U[1-9]\d{0,8}")
_DTYPES_IN_WORDS = "bool, integers, floats of 16 to 64 bits, and fixed-length text"
_ARRAY_KEYS = frozenset([ARRAY, b"data", b"dtype", b"shape"])
_SCALAR_KEYS = frozenset([SCALAR, b"data", b"dtype"])
# NumPy 1 knows no more axes.
_MAX_AXES = 32
_LAST_CODE_POINT = 0x10FFFF


def to_message(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        _check_packable(value.dtype)
        return {
            ARRAY: True,
            b"data": _buffer(value),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        _check_packable(value.dtype)
        return {SCALAR: True, b"data": value.item(), b"dtype": value.dtype.str}
    what = "an integer of more than 64 bits" if isinstance(value, int) else type(value).__name__
    raise TypeError(f"{what} cannot be sent")


def _check_packable(dtype: np.dtype) -> None:
    if not _DTYPE.fullmatch(dtype.str):
        raise TypeError(f"arrays of {dtype} cannot be sent; only {_DTYPES_IN_WORDS}")


def _buffer(array: np.ndarray) -> memoryview | bytes:
    """The array's bytes in C order, without a copy where they lie so already."""
    if array.size == 0:
        return b""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _read_dtype(found: Mapping[Any, Any], expected: frozenset[bytes], what: str) -> np.dtype:
    if found.keys() != expected:
        raise ProtocolError(f"{what} with the wrong keys: {shortened(list(found))}.")
    dtype = found[b"dtype"]
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ProtocolError(f"{what} of dtype {shortened(dtype)}; allowed are {_DTYPES_IN_WORDS}.")
    return np.dtype(dtype)


def read_array(found: Mapping[Any, Any], *, writable: bool) -> np.ndarray:
    dtype = _read_dtype(found, _ARRAY_KEYS, "An array")
    data, shape = found[b"data"], found[b"shape"]
    if not isinstance(data, bytes | memoryview):
        raise ProtocolError(f"An array's data is binary; found {type(data).__name__}.")
    _check_shape(shape, dtype, len(data))
    array = np.frombuffer(data, dtype).reshape(shape)
    _check_contents(array)
    native = dtype.newbyteorder("=")
    # PyTorch assumes both; a camera's image always has both and is not copied.
    if writable or not array.flags.aligned or dtype != native:
        array = array.astype(native)
    array.flags.writeable = writable
    return array


def _check_shape(shape: Any, dtype: np.dtype, num_bytes: int) -> None:
    if not isinstance(shape, list) or not all(type(axis) is int and axis >= 0 for axis in shape):
        raise ProtocolError(f"An array's shape is a list of sizes; found {shortened(shape)}.")
    if len(shape) > _MAX_AXES:
        raise ProtocolError(f"An array of {len(shape)} axes; at most {_MAX_AXES} are allowed.")
    expected = math.prod(shape) * dtype.itemsize
    if expected != num_bytes:
        raise ProtocolError(
            f"An array of shape {shortened(tuple(shape))} and dtype {dtype.str} has {expected} "
            f"bytes; found {num_bytes}."
        )
    # An empty array needs no bytes, so its other axes are bounded by nothing else.
    if max(shape, default=0) >= 2**31:
        raise ProtocolError(f"An array of shape {shortened(tuple(shape))} is too large.")


def _check_contents(array: np.ndarray) -> None:
    """Bytes that are no value of their dtype would only fail later, in someone else's code."""
    if array.size == 0:
        return
    if array.dtype.kind == "b" and array.view(np.uint8).max() > 1:
        raise ProtocolError("An array of bool holds bytes other than 0 and 1.")
    if array.dtype.kind == "U":
        points = array.reshape(-1).view(array.dtype.byteorder + "u4")
        if points.max() > _LAST_CODE_POINT:
            raise ProtocolError("An array of text holds numbers that are no characters.")


def read_scalar(found: Mapping[Any, Any]) -> np.generic:
    dtype = _read_dtype(found, _SCALAR_KEYS, "A scalar")
    value = found[b"data"]
    read = _SCALARS.get(dtype.kind)
    result = None if read is None else read(value, dtype)
    if result is None:
        raise ProtocolError(f"A scalar of dtype {dtype.str} cannot be {shortened(value)}.")
    return result


def _read_integer(value: Any, dtype: np.dtype) -> np.generic | None:
    info = np.iinfo(dtype)
    fits = type(value) is int and info.min <= value <= info.max
    return dtype.type(value) if fits else None


def _read_float(value: Any, dtype: np.dtype) -> np.generic | None:
    if type(value) not in (int, float):
        return None
    with np.errstate(over="ignore"):
        result = dtype.type(value)
    return None if math.isfinite(value) and not np.isfinite(result) else result


_SCALARS: Mapping[str, Callable[[Any, np.dtype], np.generic | None]] = {
    "b": lambda value, _: np.bool_(value) if type(value) is bool else None,
    "i": _read_integer,
    "u": _read_integer,
    "f": _read_float,
}
