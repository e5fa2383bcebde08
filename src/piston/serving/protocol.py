"""The protocol of one connection: messages, and the session that exchanges them.

    server → client   metadata, once: the policy's own keys, and "piston": version, protocol, name
    client → server   an observation, in the robot's own keys, with an optional "request_id" (int)
    server → client   the policy's result with "server_timing", and "request_id" if there was one

A request that fails is answered like any other: with a request id by the map {"error": {"type",
"message"}, "request_id"}, without one by a text frame, which openpi's client reports as an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import time
import traceback
from collections.abc import Awaitable
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection, broadcast
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from piston.serving.batching import Batcher, Busy, Observation, Outcome, drop_frames
from piston.serving.metrics import Metrics
from piston_client.codec import BUSY, REQUEST_ID, ProtocolError, pack, unpack

logger = logging.getLogger(__name__)

VERSION = 1

# The types of errors that a client may want to distinguish; BUSY: ask again later.
BAD_REQUEST = "bad_request"  # the request is wrong: the same one will fail again
INTERNAL = "internal"  # the policy failed: the server's log says why
ERROR_TYPES = (BAD_REQUEST, BUSY, INTERNAL)

_MAX_ERROR_BYTES = 3_500  # a whole error reply stays below 4 KB
# Decoding a value takes some microseconds of the event loop, and an observation has tens of them.
_MAX_VALUES = 5_000
# Smaller messages are decoded in the event loop (a tenth of a millisecond); a thread costs more.
_LARGE_MESSAGE = 4 * 2**20
# Larger replies are sent by a task that waits until the client takes them.
_LARGE_REPLY = 64 * 2**10
# Requests of one connection that may be unanswered at the same time.
_SLOTS = 8


def name_of_peer(connection: ServerConnection) -> str:
    """Return the client's address for a log: `127.0.0.1:44184`."""
    address = connection.remote_address
    if not isinstance(address, tuple):
        return str(address)
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Bounds of a request that are checked before any other work is done with it."""

    text_length: int = 10_000
    image_side: int = 4_096


_DEFAULT_LIMITS = RequestLimits()


class BadRequest(ValueError):
    """The request cannot be understood; `request_id` is set if that much could be read."""

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


def decode_request(
    message: bytes | str, limits: RequestLimits = _DEFAULT_LIMITS
) -> tuple[Observation, int | None]:
    """Return the observation and the request id, or raise BadRequest."""
    if isinstance(message, str):
        raise BadRequest("A request is a binary frame (msgpack); found a text frame.")
    try:
        observation = unpack(message, max_values=_MAX_VALUES, max_text=limits.text_length)
    except ProtocolError as error:
        raise BadRequest(f"The message cannot be read. {error}") from error
    if not isinstance(observation, dict):
        kind = type(observation).__name__
        raise BadRequest(f"An observation is a map of names to values; found a {kind}.")
    request_id = observation.pop(REQUEST_ID, None)
    if request_id is not None and type(request_id) is not int:
        kind = type(request_id).__name__
        raise BadRequest(f"{REQUEST_ID!r} is a whole number; found a {kind}.")
    if (fault := _find_fault(observation, limits)) is not None:
        path, reason = fault
        where = path[1:] if len(path) <= 200 else f"{path[1:200]}…"
        raise BadRequest(f"{where!r} {reason}", request_id)
    return observation, request_id


def _find_fault(value: Any, limits: RequestLimits) -> tuple[str, str] | None:
    """Return the path to the first value that is refused, and the reason; None if there is none."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if (fault := _find_fault(part, limits)) is not None:
                path, reason = fault
                return (f"/{key}{path}" if isinstance(value, dict) else f"[{key}]{path}"), reason
        return None
    found = _fault_of(value, limits)
    return None if found is None else ("", found)


def _fault_of(value: Any, limits: RequestLimits) -> str | None:
    # A policy that let NaN or infinity through would move the robot by it.
    not_finite = "holds NaN or infinity; expected finite numbers."
    if isinstance(value, float):
        return None if math.isfinite(value) else not_finite
    length = len(value) if isinstance(value, str) else 0
    if isinstance(value, np.ndarray | np.generic):
        kind = value.dtype.kind
        if kind in "SU":
            length = value.dtype.itemsize // (4 if kind == "U" else 1)
        # Resizing an image of 10 million by 1 pixels takes long, however small its data is.
        if value.ndim >= 3 and max(value.shape) > limits.image_side:
            return (
                f"has the shape {value.shape}; expected sides of at most {limits.image_side} "
                "(images)."
            )
        if kind == "f" and not np.isfinite(value).all():
            return not_finite
    if length > limits.text_length:
        return f"is a text of {length} characters; expected at most {limits.text_length}."
    return None


def encode_error(
    error: Exception, request_id: int | None, *, debug: bool = False
) -> tuple[str, bytes | str]:
    """Return an error's type, and a reply of at most 4 KB with its message and notes.

    Policies refuse bad observations with ValueError and LookupError. With `debug` the message is a
    traceback.
    """
    is_bad_request = isinstance(error, ValueError | LookupError)
    kind = BUSY if isinstance(error, Busy) else BAD_REQUEST if is_bad_request else INTERNAL
    if debug:
        message = "".join(traceback.format_exception(error))
    else:
        # str(KeyError("…")) would quote the message.
        is_quoted = type(error) is KeyError and error.args
        message = str(error.args[0] if is_quoted else error) or type(error).__name__
        prefix = f"{type(error).__name__}: " if kind == INTERNAL else ""
        message = "\n".join([prefix + message, *getattr(error, "__notes__", [])])
    # A lone surrogate, which a policy may have quoted, can be neither packed nor sent.
    data = message.encode("utf-8", errors="backslashreplace")
    if len(data) > _MAX_ERROR_BYTES:
        # Leave out the middle: the beginning says what failed, the end of a traceback where.
        half = _MAX_ERROR_BYTES // 2
        data = data[:half] + " … ".encode() + data[-half:]
    message = data.decode(errors="ignore")
    if request_id is None:
        return kind, f"{kind}: {message}"
    return kind, pack({"error": {"type": kind, "message": message}, REQUEST_ID: request_id})


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait until one of them is done, then cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


@dataclasses.dataclass(eq=False)
class Session:
    """Serves one connection until it closes, or the server stops and all requests are answered.

    A request takes one of a few slots until its reply is sent, so a client that sends faster than
    the policy works, or does not take its replies, is read no further. Replies to requests without
    an id keep their order, because their sender could not tell them apart: the policy answers in
    order, and what is refused waits for the request before it.
    """

    connection: ServerConnection
    batcher: Batcher
    metrics: Metrics
    limits: RequestLimits
    send_timeout: float
    debug: bool

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(_SLOTS)
        self._nothing: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._nothing.set_result(None)
        # The outcome of the last request without an id.
        self._last = self._nothing
        # Replies that the client has to take first, one after the other.
        self._sends: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._previous_total_ms: float | None = None
        self._has_warned = False
        self._num_unanswered = 0
        # The server is not ready yet: its clients are waiting, not idle.
        self._last_active = math.inf
        self._has_asked = False
        # Set when another robot needs the connection.
        self._dismissed = asyncio.Event()

    @property
    def idle_seconds(self) -> float:
        """For how long a client that could ask has had no request under way."""
        return 0.0 if self._num_unanswered else time.monotonic() - self._last_active

    @property
    def dismissal_order(self) -> tuple[bool, float]:
        """The smallest is dismissed first: clients that have never asked, then the longest idle."""
        return self._has_asked, -self.idle_seconds

    def dismiss(self) -> ServerConnection:
        """End because another robot needs the connection; return it, which is being closed."""
        self._dismissed.set()
        return self.connection

    async def run(self, metadata: bytes, ready: asyncio.Event, stopping: asyncio.Event) -> None:
        """Send the metadata once the server is ready, then a reply to each request."""
        reading = asyncio.create_task(self._read(metadata, ready))
        try:
            ends = (self.connection.wait_closed(), stopping.wait(), self._dismissed.wait())
            await first_of(reading, *ends)
            if reading.done():
                reading.result()
            if self._dismissed.is_set():
                reason = f"idle for {self.idle_seconds:.0f} s, and another robot needs it"
                await self.connection.close(CloseCode.TRY_AGAIN_LATER, reason)
            if stopping.is_set():
                answered = asyncio.gather(*(self._slots.acquire() for _ in range(_SLOTS)))
                await first_of(answered, self.connection.wait_closed())
                await self.connection.close(CloseCode.GOING_AWAY, "the server is shutting down")
        finally:
            for task in (reading, *self._sends):
                task.cancel()
            self.batcher.forget(self)

    async def _read(self, metadata: bytes, ready: asyncio.Event) -> None:
        await ready.wait()
        with contextlib.suppress(ConnectionClosed):
            self._last_active = time.monotonic()
            await self.connection.send(metadata)
            while True:
                await self._accept(await self.connection.recv())

    async def _accept(self, message: bytes | str) -> None:
        """Hand a request to the policy, or refuse it."""
        arrived = time.perf_counter()
        self.metrics.requests += 1
        request_id: int | None = None
        await self._slots.acquire()
        self._has_asked = True
        self._num_unanswered += 1
        try:
            if len(message) < _LARGE_MESSAGE:
                observation, request_id = decode_request(message, self.limits)
            else:
                observation, request_id = await asyncio.to_thread(
                    decode_request, message, self.limits
                )
            outcome = self.batcher.submit(observation, self)
        except (BadRequest, Busy) as error:
            request_id = getattr(error, "request_id", request_id)
            reply = self._refuse(error, request_id)
            previous = self._last if request_id is None else self._nothing
            previous.add_done_callback(lambda _: self._post(reply, arrived))
        except asyncio.CancelledError:
            self._release()
            raise
        else:
            outcome.add_done_callback(functools.partial(self._finish, request_id, arrived))
            if request_id is None:
                self._last = outcome

    def _finish(
        self, request_id: int | None, arrived: float, outcome: asyncio.Future[Outcome]
    ) -> None:
        self._post(self._encode(outcome.result(), request_id), arrived)

    def _post(self, reply: bytes | str, arrived: float) -> None:
        """Send a reply at once if the connection takes it, otherwise in a task that waits."""
        is_behind = self._sends or self.connection.transport.get_write_buffer_size() > 0
        if is_behind or len(reply) >= _LARGE_REPLY:
            task = asyncio.create_task(self._send(reply, arrived))
            self._sends.add(task)
            task.add_done_callback(self._sends.discard)
        else:
            # websockets' way to send without waiting.
            broadcast([self.connection], reply)
            self._end(arrived)

    async def _send(self, reply: bytes | str, arrived: float) -> None:
        try:
            async with self._sending, asyncio.timeout(self.send_timeout):
                await self.connection.send(reply)
        except TimeoutError:
            peer = name_of_peer(self.connection)
            logger.warning("%s took nothing for %g s: cut off.", peer, self.send_timeout)
            self.connection.transport.abort()
        except ConnectionClosed:
            pass
        self._end(arrived)

    def _end(self, arrived: float) -> None:
        total = time.perf_counter() - arrived
        self._previous_total_ms = 1e3 * total
        self.metrics.observe("request_seconds", total)
        self._release()

    def _release(self) -> None:
        self._last_active = time.monotonic()
        self._num_unanswered -= 1
        self._slots.release()

    def _encode(self, outcome: Outcome, request_id: int | None) -> bytes | str:
        self.metrics.observe("batch_size", outcome.batch_size)
        self.metrics.observe("inference_seconds", outcome.infer_ms / 1e3)
        self.metrics.observe("queue_seconds", outcome.queue_ms / 1e3)
        if isinstance(outcome.result, Exception):
            return self._refuse(outcome.result, request_id)
        timing = {name: getattr(outcome, name) for name in ("infer_ms", "queue_ms", "batch_size")}
        if self._previous_total_ms is not None:
            timing["prev_total_ms"] = self._previous_total_ms
        id_field = {} if request_id is None else {REQUEST_ID: request_id}
        try:
            return pack({**outcome.result, "server_timing": timing, **id_field})
        except (ProtocolError, TypeError) as error:
            failure = RuntimeError(f"The policy's result cannot be sent. {error}")
            return self._refuse(failure, request_id)

    def _refuse(self, error: Exception, request_id: int | None) -> bytes | str:
        """Count and log an error; return the reply that says it."""
        kind, reply = encode_error(error, request_id, debug=self.debug)
        self.metrics.errors[kind] += 1
        peer = name_of_peer(self.connection)
        if kind == INTERNAL:
            logger.error("The policy failed with a request of %s.", peer, exc_info=error)
        elif not self._has_warned:
            # Once: a robot whose requests are refused asks many times a second.
            self._has_warned = True
            logger.warning("A request of %s was refused (more are only counted): %s", peer, error)
        drop_frames(error)
        return reply
