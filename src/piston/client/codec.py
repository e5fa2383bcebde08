"""The wire format: openpi's msgpack with NumPy arrays, byte for byte.

`pack` uses the msgpack library. `unpack` reads the bytes itself, because what arrives is not to be
trusted: every length is checked against the bytes that are there before anything is allocated, the
nesting and the number of values are bounded, and arrays are views of the message, not copies.
Nothing is ever unpickled. This module knows nothing of observations, policies or sockets.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from piston.client.arrays import ARRAY, SCALAR, read_array, read_scalar, to_message
from piston.client.errors import ProtocolError, shortened


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
    """`value` (dictionaries, lists, arrays, text, numbers) as one message."""
    try:
        return bytes(msgpack.packb(value, default=to_message))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(_explain(value, error)) from error


def unpack(
    data: bytes | bytearray | memoryview,
    *,
    limits: Limits = DEFAULT_LIMITS,
    writable: bool = False,
) -> Any:
    """The value in a message; arrays are read-only views of `data` unless `writable`.

    Tuples come back as lists and arrays in the machine's own byte order.
    """
    reader = _Reader(data, limits, writable)
    value = reader.value(0)
    reader.expect_end()
    return value


def _explain(value: Any, error: Exception) -> str:
    """msgpack's errors do not say where; look for the first value that fails on its own."""
    if isinstance(error, RecursionError) or "recursion" in str(error):
        return "The message is nested too deeply, or contains itself."
    path = ""
    while True:
        step = _failing_part(value)
        if step is None:
            break
        key, value = step
        path += f"[{shortened(key)}]"
    hint = " Convert a tensor with .numpy() first." if hasattr(value, "numpy") else ""
    return f"The value{' at ' + path if path else ''} cannot be sent: {error}.{hint}"


def _failing_part(value: Any) -> tuple[Any, Any] | None:
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    else:
        return None
    for key, part in parts:
        try:
            msgpack.packb(part, default=to_message)
        except (TypeError, ValueError, OverflowError):
            return key, part
    return None


class _Reader:
    """One pass over a message, from the first byte to the last."""

    def __init__(
        self, data: bytes | bytearray | memoryview, limits: Limits, writable: bool
    ) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ProtocolError(f"A message is bytes; found {type(data).__name__}.")
        self._data = memoryview(data).cast("B")
        self._size = len(self._data)
        if self._size > limits.max_bytes:
            raise ProtocolError(
                f"A message of {self._size} bytes; at most {limits.max_bytes} are allowed."
            )
        self._position = 0
        self._values_left = limits.max_values
        self._limits = limits
        self._writable = writable

    def expect_end(self) -> None:
        if self._position < self._size:
            raise ProtocolError(
                f"The message ends at byte {self._position}, but {self._size - self._position} "
                "more follow."
            )

    def value(self, depth: int, view: bool = False) -> Any:
        """The next value. With `view` binary data stays a view of the message."""
        start = self._position
        if start >= self._size:
            raise self._cut_off(1)
        code = self._data[start]
        self._position = start + 1
        # The likeliest first: short text and small numbers.
        if 0xA0 <= code < 0xC0:
            return self._text(code & 0x1F)
        if code < 0x80:
            return code
        if code < 0x90:
            return self._map(code & 0x0F, depth)
        if code < 0xA0:
            return self._list(code & 0x0F, depth)
        if code >= 0xE0:
            return code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return self._number(_NUMBERS[code])
        if code not in _SIZED:
            raise ProtocolError(f"Byte 0x{code:02x} at {start} begins no value that is allowed.")
        kind, form = _SIZED[code]
        size = self._number(form)
        if kind == "binary":
            data = self._take(size)
            return data if view else bytes(data)
        if kind == "text":
            return self._text(size)
        return self._list(size, depth) if kind == "list" else self._map(size, depth)

    def _take(self, count: int) -> memoryview:
        start = self._position
        end = start + count
        if end > self._size:
            raise self._cut_off(count)
        self._position = end
        return self._data[start:end]

    def _number(self, form: struct.Struct) -> Any:
        start = self._position
        end = start + form.size
        if end > self._size:
            raise self._cut_off(form.size)
        self._position = end
        return form.unpack_from(self._data, start)[0]

    def _text(self, count: int) -> str:
        try:
            return str(self._take(count), "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"Text at byte {self._position - count} is not UTF-8.") from error

    def _cut_off(self, count: int) -> ProtocolError:
        return ProtocolError(
            f"The message is cut off: {count} bytes expected at byte {self._position}, "
            f"{self._size - self._position} are left."
        )

    def _enter(self, count: int, depth: int, what: str) -> None:
        """Refuse a list or map before anything is allocated for it."""
        if depth >= self._limits.max_depth:
            raise ProtocolError(f"Nested deeper than {self._limits.max_depth} levels.")
        if count > self._size - self._position:
            raise ProtocolError(
                f"The message is cut off: a {what} of {count} at byte {self._position}, but only "
                f"{self._size - self._position} bytes are left."
            )
        self._values_left -= count
        if self._values_left < 0:
            raise ProtocolError(
                f"More than {self._limits.max_values} values. Send numbers as an array."
            )

    def _list(self, count: int, depth: int) -> list[Any]:
        self._enter(count, depth, "list")
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> Any:
        self._enter(count, depth, "map")
        result: dict[str | bytes, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str | bytes):
                raise ProtocolError(f"A key is text; found {shortened(key)}.")
            if key in result:
                raise ProtocolError(f"The key {shortened(key)} occurs twice in one map.")
            result[key] = self.value(depth + 1, ARRAY in result)
        if ARRAY in result:
            return read_array(result, writable=self._writable)
        if SCALAR in result:
            return read_scalar(result)
        return result


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# First byte → the number that follows. Extensions (0xC7-0xC9, 0xD4-0xD8) are left out on purpose.
_NUMBERS = {
    code: struct.Struct(">" + form)
    for code, form in zip(range(0xCA, 0xD4), ("f", "d", *"BHIQ", *"bhiq"))
}
# First byte → what follows, and how its size is written.
_SIZED = {
    code: (kind, struct.Struct(">" + form))
    for kind, first, forms in (
        ("binary", 0xC4, "BHI"),
        ("text", 0xD9, "BHI"),
        ("list", 0xDC, "HI"),
        ("map", 0xDE, "HI"),
    )
    for code, form in enumerate(forms, start=first)
}
