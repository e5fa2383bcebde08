"""What server and client say to each other, as values; the bytes are `piston.client.codec`'s.

    server → client   metadata, once: the policy's own keys, and "piston": version, protocol, name
    client → server   an observation, in the robot's own keys, and "request_id" (int) if it likes
    server → client   the policy's result with "server_timing", and "request_id" if there was one

A request that fails is answered in its place: with a request id by the map {"error": {"type",
"message"}, "request_id"}, without one by a text frame, which is how openpi's client knows an error.
Knows nothing of sockets, queues or models.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import traceback
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from piston.client.codec import Limits, ProtocolError, pack, unpack
from piston.client.errors import BUSY

Observation = dict[str, Any]
Result = dict[str, Any]

VERSION = 1
REQUEST_ID = "request_id"

# The types of error a client may want to tell apart; BUSY: too much to do, ask again later.
BAD_REQUEST = "bad_request"  # the request is wrong: the same one will fail again
INTERNAL = "internal"  # the policy failed: the server's log says why
ERROR_TYPES = (BAD_REQUEST, BUSY, INTERNAL)

_MAX_ERROR_BYTES = 3_500  # a whole error reply stays below 4 KB
# A value costs the decoder some microseconds of the event loop, and an observation has tens.
_MAX_VALUES = 5_000
_MAX_DEPTH = 32


class Policy(Protocol):
    """What a server needs of a policy: results in the order of the observations."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def infer_batch(self, observations: list[Observation], /) -> list[Result]: ...


class BadRequest(ValueError):
    """The request cannot be understood; `request_id` where that much could be read."""

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class Busy(RuntimeError):
    """There are more requests than the server accepts to have waiting."""


@dataclasses.dataclass(frozen=True)
class ServerTiming:
    """Milliseconds, as openpi's users know them, and what batching adds."""

    infer_ms: float
    queue_ms: float
    batch_size: int
    # Of the connection's previous request, sending included; its first request has none.
    prev_total_ms: float | None = None

    def as_map(self) -> dict[str, float | int]:
        return {key: value for key, value in vars(self).items() if value is not None}


def message_limits(max_bytes: int) -> Limits:
    return Limits(max_bytes=max_bytes, max_depth=_MAX_DEPTH, max_values=_MAX_VALUES)


def encode_metadata(metadata: Mapping[str, Any], name: str | None = None) -> bytes:
    about = {"version": importlib.metadata.version("piston"), "protocol": VERSION, "name": name}
    return pack({**metadata, "piston": about})


def decode_request(message: bytes | str, limits: Limits) -> tuple[Observation, int | None]:
    """The observation and the request id; anything wrong is a BadRequest."""
    if isinstance(message, str):
        raise BadRequest("A request is a binary frame (msgpack); found a text frame.")
    try:
        observation = unpack(message, limits=limits)
    except ProtocolError as error:
        raise BadRequest(f"The message cannot be read. {error}") from error
    if not isinstance(observation, dict):
        raise BadRequest(
            f"An observation is a map of names to values; found a {type(observation).__name__}."
        )
    request_id = observation.pop(REQUEST_ID, None)
    if request_id is not None and type(request_id) is not int:
        kind = type(request_id).__name__
        raise BadRequest(f"{REQUEST_ID!r} is a whole number; found a {kind}.")
    _require_finite(observation, request_id)
    return observation, request_id


def encode_result(result: Result, timing: ServerTiming, request_id: int | None) -> bytes:
    reply = {**result, "server_timing": timing.as_map()}
    if request_id is not None:
        reply[REQUEST_ID] = request_id
    return pack(reply)


def encode_error(kind: str, message: str, request_id: int | None) -> bytes | str:
    """Never more than 4 KB, whatever the message quotes."""
    message = _shortened(message)
    if request_id is None:
        return f"{kind}: {message}"
    return pack({"error": {"type": kind, "message": message}, REQUEST_ID: request_id})


def classify(error: BaseException) -> str:
    """Policies refuse bad observations with ValueError and KeyError; the rest is their fault."""
    if isinstance(error, Busy):
        return BUSY
    return BAD_REQUEST if isinstance(error, ValueError | LookupError) else INTERNAL


def describe(error: BaseException, *, debug: bool) -> str:
    """The message and the notes that transforms added on the way; a traceback only in debug."""
    if debug:
        return "".join(traceback.format_exception(error))
    # str(KeyError("…")) would quote the message.
    plain = type(error) is KeyError and error.args
    message = str(error.args[0] if plain else error) or type(error).__name__
    if classify(error) == INTERNAL:
        message = f"{type(error).__name__}: {message}"
    return "\n".join([message, *getattr(error, "__notes__", [])])


def _shortened(message: str) -> str:
    """The beginning says what, the end (of a traceback) where; the middle may go."""
    # A lone surrogate, which a policy may have quoted, can be neither packed nor sent.
    data = message.encode("utf-8", errors="backslashreplace")
    if len(data) <= _MAX_ERROR_BYTES:
        return data.decode()
    half = _MAX_ERROR_BYTES // 2
    return " … ".join(part.decode(errors="ignore") for part in (data[:half], data[-half:]))


def _require_finite(value: Any, request_id: int | None, path: str = "") -> None:
    """NaN and infinity are never observed; a policy that let one through would move the robot."""
    if isinstance(value, dict):
        for key, part in value.items():
            _require_finite(part, request_id, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _require_finite(part, request_id, f"{path}[{index}]")
    elif not _is_finite(value):
        where = path if len(path) <= 200 else f"{path[:200]}…"
        raise BadRequest(f"{where!r} holds NaN or infinity; expected finite numbers.", request_id)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "f":
        return bool(np.isfinite(value).all())
    return True
