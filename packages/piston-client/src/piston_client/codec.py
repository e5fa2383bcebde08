"""The wire format: openpi's msgpack with NumPy arrays, byte for byte.

    array     {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}
    scalar    {b"__npgeneric__": True, b"data": number, b"dtype": "<f4"}

`msgpack` does the parsing, within its own limits. What it returns is checked: the number of values
and their nesting are bounded, a dtype is one of a few plain kinds, and the data of an array has the
size that its shape and dtype require. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

import msgpack
import numpy as np

# The `type` of an error reply from a server whose queue is full.
BUSY = "busy"
REQUEST_ID = "request_id"
# Of a request: how many steps of the chunk before it are past. The server records it.
EXECUTED_STEPS = "executed_steps"

_ARRAY, _SCALAR = b"__ndarray__", b"__npgeneric__"
_SCALAR_KEYS = frozenset([_SCALAR, b"data", b"dtype"])
_ARRAY_KEYS = frozenset([_ARRAY, b"data", b"dtype", b"shape"])
_SCALAR_TYPES = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}
# What dtype.str gives for bool, integers, floats, bytes and text; no objects, records or dates.
_DTYPE = re.compile(r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|\|S[1-9]\d{0,8}|[<>]U[1-9]\d{0,8}")
_DTYPES_IN_WORDS = "bool, integers, floats of 16 to 64 bits, and fixed-length text"
_MAX_DEPTH = 32  # maps and lists inside one another; an observation has three levels
_TOO_DEEP = f"The message is nested deeper than {_MAX_DEPTH} levels."
_MAX_AXES = 32  # NumPy 1 supports no more.
_LAST_CODE_POINT = 0x10FFFF


class ProtocolError(ValueError):
    """A message that the protocol does not allow, or a value that it cannot carry."""


def pack(value: Any) -> bytes:
    """Return `value` (dictionaries, lists, arrays, text, numbers) as one message."""
    try:
        return bytes(msgpack.packb(value, default=_to_map))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, RecursionError) or "recursion" in str(error):
            message = "The message is nested too deeply, or contains itself."
        else:
            path = _path_to_failure(value)
            message = f"The value{' at ' + path if path else ''} cannot be sent: {error}."
        raise ProtocolError(message) from error


def unpack(
    data: bytes | bytearray | memoryview,
    *,
    max_values: int = 20_000,
    max_text: int | None = None,
    writable: bool = False,
) -> Any:
    """Return the value in a message, or raise ProtocolError. Arrays are read-only by default.

    Tuples come back as lists and arrays in the machine's own byte order. `max_values` bounds the
    values in all maps and lists together; an array counts as four, whatever its size. A text that
    has more than `max_text` characters in any case, by its number of bytes, is not even decoded.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ProtocolError(f"A message consists of bytes; found {type(data).__name__}.")
    too_many = f"The message has more than {max_values} values. Send numbers as an array."
    num_values = 0

    def count(values: list[Any]) -> list[Any]:
        nonlocal num_values
        num_values += len(values)
        if num_values > max_values:
            raise ProtocolError(too_many)
        return values

    try:
        value = msgpack.unpackb(
            data,
            object_pairs_hook=lambda pairs: _read_map(count(pairs), writable),
            list_hook=count,
            ext_hook=_refuse_extension,
            # Lists are allocated when their length is read, before any of their values.
            max_array_len=max_values,
            max_map_len=max_values,
            max_ext_len=0,
            # A character has at most four bytes; -1 is no limit.
            max_str_len=-1 if max_text is None else 4 * max_text,
        )
    except ProtocolError:
        raise
    except ValueError as error:
        raise ProtocolError(_describe_malformed(error, too_many, max_text)) from error
    _check_depth(value, _MAX_DEPTH)
    return value


class _ShortRepr(reprlib.Repr):
    repr_bytes = reprlib.Repr.repr_str  # without this, all of a large value would be shown first


def shortened(value: Any) -> str:
    """Return enough of a value to recognise it; errors are sent, and must stay small."""
    short = _ShortRepr()
    short.maxlevel, short.maxstring, short.maxother = 1, 60, 60
    return short.repr(value)


def _check_depth(value: Any, levels_left: int) -> None:
    if isinstance(value, (dict, list)):
        if levels_left == 0:
            raise ProtocolError(_TOO_DEEP)
        for part in value.values() if isinstance(value, dict) else value:
            _check_depth(part, levels_left - 1)


def _describe_malformed(error: ValueError, too_many: str, max_text: int | None) -> str:
    text = str(error)
    if isinstance(error, msgpack.StackError):
        return _TOO_DEEP
    if isinstance(error, msgpack.ExtraData):
        return f"The message has {len(error.extra)} bytes after its end."
    if "incomplete" in text:
        return "The message is cut off."
    if "max_array_len" in text or "max_map_len" in text:
        return too_many
    if "max_str_len" in text:
        found = text.split()[0]
        return f"It contains a text of {found} bytes; expected at most {max_text} characters."
    return f"The message is not valid msgpack: {text or 'it contains an undefined type code'}."


def _refuse_extension(code: int, data: bytes) -> NoReturn:  # noqa: ARG001 (msgpack's signature)
    raise ProtocolError(f"The message contains the extension type {code}; none is allowed.")


def _path_to_failure(value: Any) -> str:
    """Return where the first part is that cannot be packed: msgpack's errors do not say it."""
    is_sequence = isinstance(value, (list, tuple))
    parts = enumerate(value) if is_sequence else value.items() if isinstance(value, dict) else ()
    for key, part in parts:
        try:
            msgpack.packb(part, default=_to_map)
        except (TypeError, ValueError, OverflowError):
            return f"[{shortened(key)}]{_path_to_failure(part)}"
    return ""


def _to_map(value: Any) -> dict[bytes, Any]:
    """Return the map that carries an array or a NumPy scalar; msgpack calls this when packing."""
    if not isinstance(value, (np.ndarray, np.generic)):
        kind = "an integer of more than 64 bits" if isinstance(value, int) else type(value).__name__
        hint = "; convert it with .numpy() first" if hasattr(value, "numpy") else ""
        raise TypeError(f"{kind} cannot be sent{hint}")
    dtype = value.dtype.str
    if not _DTYPE.fullmatch(dtype):
        raise TypeError(f"arrays of {value.dtype} cannot be sent; only {_DTYPES_IN_WORDS}")
    if isinstance(value, np.generic):
        return {_SCALAR: True, b"data": value.item(), b"dtype": dtype}
    # A memoryview of the array's bytes in C order, copied only where they lie in another order.
    flat = np.ascontiguousarray(value).reshape(-1)
    data = flat.view(np.uint8).data if value.size else b""
    return {_ARRAY: True, b"data": data, b"dtype": dtype, b"shape": value.shape}


def _read_map(pairs: list[tuple[str | bytes, Any]], writable: bool) -> Any:
    found: dict[Any, Any] = dict(pairs)
    if len(found) != len(pairs):
        raise ProtocolError(f"A map has the same key twice; its keys are {_keys(found)}.")
    if _ARRAY in found:
        return _read_array(found, writable)
    return _read_scalar(found) if _SCALAR in found else found


def _read_dtype(found: Mapping[Any, Any], expected: frozenset[bytes]) -> np.dtype:
    if found.keys() != expected:
        raise ProtocolError(f"An array has the keys {_keys(found)}; expected {_keys(expected)}.")
    text = found[b"dtype"]
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise ProtocolError(
            f"An array has the dtype {shortened(text)}; allowed are {_DTYPES_IN_WORDS}."
        )
    return np.dtype(text)


def _read_array(found: Mapping[Any, Any], writable: bool) -> np.ndarray:
    dtype = _read_dtype(found, _ARRAY_KEYS)
    data, shape = found[b"data"], found[b"shape"]
    if not isinstance(data, bytes):
        raise ProtocolError(f"The data of an array is binary; found {type(data).__name__}.")
    # The axes of an empty array are not bounded by the number of its bytes, so each is.
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_AXES
        or any(type(size) is not int or not 0 <= size < 2**31 for size in shape)
    ):
        raise ProtocolError(
            f"An array has the shape {shortened(shape)}; expected at most {_MAX_AXES} sizes."
        )
    if (expected := math.prod(shape) * dtype.itemsize) != len(data):
        raise ProtocolError(
            f"An array of shape {shortened(shape)} and dtype {dtype.str} has {expected} bytes; "
            f"found {len(data)}."
        )
    if data and dtype.kind == "b" and np.frombuffer(data, np.uint8).max() > 1:
        raise ProtocolError("An array of bool contains bytes other than 0 and 1.")
    if data and dtype.kind == "U":
        points = np.frombuffer(data, dtype.byteorder + "u4")
        if points.max() > _LAST_CODE_POINT:
            raise ProtocolError("An array of text contains numbers that are not characters.")
    # A view of the bytes that msgpack has read; copied only to be writable or in native order.
    array: np.ndarray = np.ndarray(shape, dtype, data)
    return array.astype(dtype.newbyteorder("=")) if writable or not dtype.isnative else array


def _read_scalar(found: Mapping[Any, Any]) -> np.generic:
    dtype = _read_dtype(found, _SCALAR_KEYS)
    value = found[b"data"]
    fits = type(value) in _SCALAR_TYPES.get(dtype.kind, ())
    if fits and dtype.kind in "iu":
        fits = np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    elif fits and dtype.kind == "f":
        fits = not math.isfinite(value) or abs(value) <= float(np.finfo(dtype).max)
    if not fits:
        raise ProtocolError(f"A scalar of dtype {dtype.str} cannot be {shortened(value)}.")
    return dtype.type(value)


def _keys(keys: Any) -> str:
    return shortened(sorted(keys, key=str))
