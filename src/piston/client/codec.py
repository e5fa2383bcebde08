"""The wire format: openpi's msgpack with NumPy arrays, byte for byte.

    array     {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}
    scalar    {b"__npgeneric__": True, b"data": number, b"dtype": "<f4"}

`msgpack` does the parsing, within its own limits. What it returns is checked: the number of values
and their nesting are bounded, a dtype is one of a few plain kinds, and the data of an array has the
size that its shape and dtype require. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgpack
import numpy as np

from piston.client.errors import ProtocolError, shortened

_ARRAY, _SCALAR = b"__ndarray__", b"__npgeneric__"
_ARRAY_KEYS = frozenset([_ARRAY, b"data", b"dtype", b"shape"])
_SCALAR_KEYS = frozenset([_SCALAR, b"data", b"dtype"])
# What dtype.str gives for bool, integers, floats, bytes and text; no objects, records or dates.
_DTYPE = re.compile(r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|\|S[1-9]\d{0,8}|[<>]U[1-9]\d{0,8}")
_DTYPES_IN_WORDS = "bool, integers, floats of 16 to 64 bits, and fixed-length text"
_MAX_AXES = 32  # NumPy 1 supports no more.
_LAST_CODE_POINT = 0x10FFFF
_CONTAINERS = (dict, list)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much a message may hold. An observation has tens of values, three levels deep."""

    # The whole message.
    max_bytes: int = 256 * 2**20
    # Maps, lists and arrays inside one another.
    max_depth: int = 32
    # Values in all maps and lists together; an array counts as four, whatever its size.
    max_values: int = 20_000


DEFAULT_LIMITS = Limits()


def pack(value: Any) -> bytes:
    """Return `value` (dictionaries, lists, arrays, text, numbers) as one message."""
    try:
        return bytes(msgpack.packb(value, default=_to_map))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(_describe_unpackable(value, error)) from error


def unpack(
    data: bytes | bytearray | memoryview,
    *,
    limits: Limits = DEFAULT_LIMITS,
    writable: bool = False,
) -> Any:
    """Return the value in a message, or raise ProtocolError. Arrays are read-only by default.

    Tuples come back as lists and arrays in the machine's own byte order.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ProtocolError(f"A message consists of bytes; found {type(data).__name__}.")
    if len(data) > limits.max_bytes:
        raise ProtocolError(
            f"The message has {len(data)} bytes; at most {limits.max_bytes} are allowed."
        )
    builder = _Builder(limits, writable)
    try:
        value = msgpack.unpackb(
            data,
            object_pairs_hook=builder.map,
            list_hook=builder.list,
            ext_hook=_refuse_extension,
            # Lists are allocated when their length is read, before any of their values.
            max_array_len=limits.max_values,
            max_map_len=limits.max_values,
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    except msgpack.StackError:
        raise _too_deep(limits) from None
    except ValueError as error:
        raise ProtocolError(_describe_malformed(error, limits)) from error
    _check_depth(value, limits)
    return value


class _Builder:
    """Receives the maps and lists of one message from msgpack, innermost first."""

    def __init__(self, limits: Limits, writable: bool) -> None:
        self._limits = limits
        self._writable = writable
        self._num_values = 0

    def map(self, pairs: list[tuple[str | bytes, Any]]) -> Any:
        self._count(len(pairs))
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ProtocolError(f"A map has the same key twice; its keys are {_keys(found)}.")
        if _ARRAY in found:
            return _read_array(found, writable=self._writable)
        if _SCALAR in found:
            return _read_scalar(found)
        return found

    def list(self, values: list[Any]) -> list[Any]:
        self._count(len(values))
        return values

    def _count(self, count: int) -> None:
        self._num_values += count
        if self._num_values > self._limits.max_values:
            raise _too_many_values(self._limits)


def _refuse_extension(code: int, data: bytes) -> NoReturn:  # noqa: ARG001 (msgpack's signature)
    raise ProtocolError(f"The message contains the extension type {code}; none is allowed.")


def _too_many_values(limits: Limits) -> ProtocolError:
    return ProtocolError(
        f"The message has more than {limits.max_values} values. Send numbers as an array."
    )


def _too_deep(limits: Limits) -> ProtocolError:
    return ProtocolError(f"The message is nested deeper than {limits.max_depth} levels.")


def _describe_malformed(error: ValueError, limits: Limits) -> str:
    if isinstance(error, msgpack.ExtraData):
        return f"The message has {len(error.extra)} bytes after its end."
    text = str(error)
    if "incomplete" in text:
        return "The message is cut off."
    if "max_array_len" in text or "max_map_len" in text:
        return f"{_too_many_values(limits)} (A length is too large: {text}.)"
    return f"The message is not valid msgpack: {text or 'it contains an undefined type code'}."


def _check_depth(value: Any, limits: Limits) -> None:
    containers = [value] if isinstance(value, _CONTAINERS) else []
    depth = 0
    while containers:
        depth += 1
        if depth > limits.max_depth:
            raise _too_deep(limits)
        containers = [
            part
            for container in containers
            for part in (container.values() if isinstance(container, dict) else container)
            if isinstance(part, _CONTAINERS)
        ]


def _to_map(value: Any) -> dict[bytes, Any]:
    """Return the map that carries an array or a NumPy scalar; msgpack calls this when packing."""
    if not isinstance(value, np.ndarray | np.generic):
        kind = "an integer of more than 64 bits" if isinstance(value, int) else type(value).__name__
        raise TypeError(f"{kind} cannot be sent")
    dtype = value.dtype.str
    if not _DTYPE.fullmatch(dtype):
        raise TypeError(f"arrays of {value.dtype} cannot be sent; only {_DTYPES_IN_WORDS}")
    if isinstance(value, np.generic):
        return {_SCALAR: True, b"data": value.item(), b"dtype": dtype}
    # A memoryview of the array's bytes in C order, copied only where they lie in another order.
    flat = np.ascontiguousarray(value).reshape(-1)
    data = flat.view(np.uint8).data if value.size else b""
    return {_ARRAY: True, b"data": data, b"dtype": dtype, b"shape": value.shape}


def _read_dtype(found: Mapping[Any, Any], expected: frozenset[bytes]) -> np.dtype:
    if found.keys() != expected:
        raise ProtocolError(f"An array has the keys {_keys(found)}; expected {_keys(expected)}.")
    text = found[b"dtype"]
    dtype = _dtype(text) if isinstance(text, str) else None
    if dtype is None:
        raise ProtocolError(
            f"An array has the dtype {shortened(text)}; allowed are {_DTYPES_IN_WORDS}."
        )
    return dtype


@functools.lru_cache(maxsize=64)
def _dtype(text: str) -> np.dtype | None:
    return np.dtype(text) if _DTYPE.fullmatch(text) else None


def _read_array(found: Mapping[Any, Any], *, writable: bool) -> np.ndarray:
    dtype = _read_dtype(found, _ARRAY_KEYS)
    data, shape = found[b"data"], found[b"shape"]
    if not isinstance(data, bytes):
        raise ProtocolError(f"The data of an array is binary; found {type(data).__name__}.")
    _check_shape(shape, dtype, len(data))
    if data and dtype.kind == "b" and np.frombuffer(data, np.uint8).max() > 1:
        raise ProtocolError("An array of bool contains bytes other than 0 and 1.")
    if data and dtype.kind == "U":
        points = np.frombuffer(data, dtype.byteorder + "u4")
        if points.max() > _LAST_CODE_POINT:
            raise ProtocolError("An array of text contains numbers that are not characters.")
    # A view of the bytes that msgpack has read; copied only to be writable or in native order.
    array: np.ndarray = np.ndarray(shape, dtype, data)
    return array.astype(dtype.newbyteorder("=")) if writable or not dtype.isnative else array


def _check_shape(shape: Any, dtype: np.dtype, num_bytes: int) -> None:
    if not isinstance(shape, list) or len(shape) > _MAX_AXES:
        raise ProtocolError(
            f"The shape of an array is a list of at most {_MAX_AXES} sizes; found "
            f"{shortened(shape)}."
        )
    expected = dtype.itemsize
    for size in shape:
        # The axes of an empty array are not bounded by the number of its bytes.
        if type(size) is not int or not 0 <= size < 2**31:
            raise ProtocolError(f"An array has the shape {shortened(shape)}; expected sizes.")
        expected *= size
    if expected != num_bytes:
        raise ProtocolError(
            f"An array of shape {shortened(shape)} and dtype {dtype.str} has {expected} bytes; "
            f"found {num_bytes}."
        )


def _read_scalar(found: Mapping[Any, Any]) -> np.generic:
    dtype = _read_dtype(found, _SCALAR_KEYS)
    value = found[b"data"]
    if not _fits(value, dtype):
        raise ProtocolError(f"A scalar of dtype {dtype.str} cannot be {shortened(value)}.")
    return dtype.type(value)


def _fits(value: Any, dtype: np.dtype) -> bool:
    if dtype.kind == "b":
        return type(value) is bool
    if dtype.kind in "iu":
        return type(value) is int and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    if dtype.kind != "f" or type(value) not in (int, float):
        return False
    with np.errstate(over="ignore"):
        return not math.isfinite(value) or bool(np.isfinite(dtype.type(value)))


def _keys(keys: Any) -> str:
    return shortened(sorted(keys, key=str))


def _describe_unpackable(value: Any, error: Exception) -> str:
    """msgpack's errors do not say where: find the first part that fails on its own."""
    if isinstance(error, RecursionError) or "recursion" in str(error):
        return "The message is nested too deeply, or contains itself."
    path = ""
    while (part := _failing_part(value)) is not None:
        key, value = part
        path += f"[{shortened(key)}]"
    hint = " Convert a tensor with .numpy() first." if hasattr(value, "numpy") else ""
    return f"The value{' at ' + path if path else ''} cannot be sent: {error}.{hint}"


def _failing_part(value: Any) -> tuple[Any, Any] | None:
    is_sequence = isinstance(value, list | tuple)
    parts = enumerate(value) if is_sequence else value.items() if isinstance(value, dict) else ()
    for key, part in parts:
        try:
            msgpack.packb(part, default=_to_map)
        except (TypeError, ValueError, OverflowError):
            return key, part
    return None
