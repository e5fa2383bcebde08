"""The protocol of one connection: messages, and the session that exchanges them.

    server → client   metadata, once: the policy's own keys, and "piston": version, protocol, name
    client → server   an observation, in the robot's own keys, with an optional "request_id" (int)
    server → client   the policy's result with "server_timing", and "request_id" if there was one

A request that fails is answered like any other: with a request id by the map {"error": {"type",
"message"}, "request_id"}, without one by a text frame, which openpi's client reports as an error.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import importlib.metadata
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Mapping
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection, broadcast
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from piston.client.codec import Limits, ProtocolError, pack, unpack
from piston.client.errors import BUSY
from piston.serving.batching import Batcher, Busy, Observation, Outcome, Request, Result
from piston.serving.metrics import Metrics

logger = logging.getLogger(__name__)

VERSION = 1
REQUEST_ID = "request_id"

# The types of errors that a client may want to distinguish; BUSY: ask again later.
BAD_REQUEST = "bad_request"  # the request is wrong: the same one will fail again
INTERNAL = "internal"  # the policy failed: the server's log says why
ERROR_TYPES = (BAD_REQUEST, BUSY, INTERNAL)

_MAX_ERROR_BYTES = 3_500  # a whole error reply stays below 4 KB
# Decoding a value takes some microseconds of the event loop, and an observation has tens of them.
_MAX_VALUES = 5_000
_MAX_DEPTH = 32
# Smaller messages are decoded in the event loop (a tenth of a millisecond); a thread costs more.
_LARGE_MESSAGE = 4 * 2**20
# Larger replies are sent by a task that waits until the client takes them.
_LARGE_REPLY = 64 * 2**10
# Requests of one connection that may be unanswered at the same time.
_SLOTS = 8


class BadRequest(ValueError):
    """The request cannot be understood; `request_id` is set if that much could be read."""

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


def message_limits(max_bytes: int) -> Limits:
    return Limits(max_bytes=max_bytes, max_depth=_MAX_DEPTH, max_values=_MAX_VALUES)


def encode_metadata(metadata: Mapping[str, Any], name: str | None = None) -> bytes:
    about = {"version": importlib.metadata.version("piston"), "protocol": VERSION, "name": name}
    return pack({**metadata, "piston": about})


def decode_request(message: bytes | str, limits: Limits) -> tuple[Observation, int | None]:
    """Return the observation and the request id, or raise BadRequest."""
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
    # A policy that let NaN or infinity through would move the robot by it.
    if (path := _find_not_finite(observation)) is not None:
        where = path[1:] if len(path) <= 200 else f"{path[1:200]}…"
        raise BadRequest(f"{where!r} holds NaN or infinity; expected finite numbers.", request_id)
    return observation, request_id


def encode_result(result: Result, timing: Mapping[str, Any], request_id: int | None) -> bytes:
    reply = {**result, "server_timing": timing}
    if request_id is not None:
        reply[REQUEST_ID] = request_id
    return pack(reply)


def encode_error(kind: str, message: str, request_id: int | None) -> bytes | str:
    """Return an error reply of at most 4 KB, whatever the message quotes."""
    message = _shortened(message)
    if request_id is None:
        return f"{kind}: {message}"
    return pack({"error": {"type": kind, "message": message}, REQUEST_ID: request_id})


def classify(error: BaseException) -> str:
    """Policies refuse bad observations with ValueError and LookupError."""
    if isinstance(error, Busy):
        return BUSY
    return BAD_REQUEST if isinstance(error, ValueError | LookupError) else INTERNAL


def describe(error: BaseException, *, debug: bool) -> str:
    """Return the message and the notes that transforms added to it; with `debug` a traceback."""
    if debug:
        return "".join(traceback.format_exception(error))
    # str(KeyError("…")) would quote the message.
    is_quoted = type(error) is KeyError and error.args
    message = str(error.args[0] if is_quoted else error) or type(error).__name__
    if classify(error) == INTERNAL:
        message = f"{type(error).__name__}: {message}"
    return "\n".join([message, *getattr(error, "__notes__", [])])


def _shortened(message: str) -> str:
    """Leave out the middle: the beginning says what failed, the end of a traceback where."""
    # A lone surrogate, which a policy may have quoted, can be neither packed nor sent.
    data = message.encode("utf-8", errors="backslashreplace")
    if len(data) <= _MAX_ERROR_BYTES:
        return data.decode()
    half = _MAX_ERROR_BYTES // 2
    return " … ".join(part.decode(errors="ignore") for part in (data[:half], data[-half:]))


def _find_not_finite(value: Any) -> str | None:
    """Return the path to the first NaN or infinity, None if there is none."""
    if isinstance(value, dict):
        for key, part in value.items():
            if (path := _find_not_finite(part)) is not None:
                return f"/{key}{path}"
    elif isinstance(value, list):
        for index, part in enumerate(value):
            if (path := _find_not_finite(part)) is not None:
                return f"[{index}]{path}"
    elif isinstance(value, float):
        return None if math.isfinite(value) else ""
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "f":
        return None if np.isfinite(value).all() else ""
    return None


@dataclasses.dataclass(eq=False)
class _Ticket:
    """One request of a session, and its reply once there is one."""

    request_id: int | None
    arrived: float
    reply: bytes | str | None = None


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait until one of them is done, then cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class Session:
    """Serves one connection until it closes, or until `stop` and the last reply.

    A request takes one of a few slots until its reply is sent, so a client that sends faster than
    the policy works, or does not take its replies, is read no further. Replies to requests without
    an id keep their order, because their sender could not tell them apart.
    """

    def __init__(
        self,
        connection: ServerConnection,
        batcher: Batcher,
        metrics: Metrics,
        *,
        limits: Limits,
        send_timeout: float,
        debug: bool,
    ) -> None:
        self._connection = connection
        self._batcher = batcher
        self._metrics = metrics
        self._limits = limits
        self._send_timeout = send_timeout
        self._debug = debug
        self._slots = asyncio.Semaphore(_SLOTS)
        # Requests without an id that are not answered yet, oldest first.
        self._in_order: collections.deque[_Ticket] = collections.deque()
        # Replies that the client has to take first, and the task that sends them.
        self._outbox: collections.deque[_Ticket] = collections.deque()
        self._sending: asyncio.Task[None] | None = None
        self._previous_total_ms: float | None = None
        self._has_warned = False
        self._reading: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def run(self, metadata: bytes) -> None:
        """Send the metadata, then a reply to each request."""
        try:
            await self._connection.send(metadata)
            self._reading = asyncio.create_task(self._read())
            if self._is_stopping:
                self._reading.cancel()
            await first_of(self._reading, self._connection.wait_closed())
            if self._reading.done() and not self._reading.cancelled():
                self._reading.result()
            if self._is_stopping:
                await first_of(self._wait_until_answered(), self._connection.wait_closed())
                await self._connection.close(CloseCode.GOING_AWAY, "the server is shutting down")
        except ConnectionClosed:
            pass
        finally:
            for task in (self._reading, self._sending):
                if task is not None:
                    task.cancel()
            self._batcher.forget(self)

    def stop(self) -> None:
        """Read no more; `run` returns when every request has been answered."""
        self._is_stopping = True
        if self._reading is not None:
            self._reading.cancel()

    async def _wait_until_answered(self) -> None:
        for _ in range(_SLOTS):
            await self._slots.acquire()

    async def _read(self) -> None:
        while True:
            await self._slots.acquire()
            try:
                is_accepted = await self._handle(await self._connection.recv())
            except asyncio.CancelledError:
                self._slots.release()
                raise
            if not is_accepted:
                # Without this, a flood of bad messages that have arrived would run in one go.
                await asyncio.sleep(0)

    async def _handle(self, message: bytes | str) -> bool:
        """Hand a request to the policy; return False if it is refused, which is answered here."""
        arrived = time.perf_counter()
        try:
            if len(message) < _LARGE_MESSAGE:
                observation, request_id = decode_request(message, self._limits)
            else:
                decoding = asyncio.to_thread(decode_request, message, self._limits)
                observation, request_id = await decoding
        except BadRequest as error:
            ticket = self._open(error.request_id, arrived)
            self._answer(ticket, self._encode_error(error, ticket))
            return False
        ticket = self._open(request_id, arrived)
        finish = functools.partial(self._finish, ticket)
        try:
            self._batcher.submit(Request(observation, self, finish, arrived))
        except Busy as error:
            self._answer(ticket, self._encode_error(error, ticket))
            return False
        return True

    def _open(self, request_id: int | None, arrived: float) -> _Ticket:
        self._metrics.requests += 1
        ticket = _Ticket(request_id, arrived)
        if request_id is None:
            self._in_order.append(ticket)
        return ticket

    def _finish(self, ticket: _Ticket, outcome: Outcome) -> None:
        self._metrics.batch_size.observe(outcome.batch_size)
        self._metrics.inference.observe(outcome.infer_ms / 1e3)
        self._metrics.queue.observe(outcome.queue_ms / 1e3)
        self._answer(ticket, self._encode(ticket, outcome))

    def _encode(self, ticket: _Ticket, outcome: Outcome) -> bytes | str:
        if isinstance(outcome.result, Exception):
            return self._encode_error(outcome.result, ticket)
        timing = {
            "infer_ms": outcome.infer_ms,
            "queue_ms": outcome.queue_ms,
            "batch_size": outcome.batch_size,
        }
        if self._previous_total_ms is not None:
            timing["prev_total_ms"] = self._previous_total_ms
        try:
            return encode_result(outcome.result, timing, ticket.request_id)
        except (ProtocolError, TypeError) as error:
            unsendable = RuntimeError(f"The policy's result cannot be sent. {error}")
            return self._encode_error(unsendable, ticket)

    def _encode_error(self, error: Exception, ticket: _Ticket) -> bytes | str:
        kind = classify(error)
        self._metrics.errors[kind] += 1
        peer = self._connection.remote_address
        if kind == INTERNAL:
            logger.error("The policy failed with a request of %s.", peer, exc_info=error)
        elif not self._has_warned:
            # Once: a robot whose requests are refused asks many times a second.
            self._has_warned = True
            logger.warning("A request of %s was refused (more are only counted): %s", peer, error)
        return encode_error(kind, describe(error, debug=self._debug), ticket.request_id)

    def _answer(self, ticket: _Ticket, reply: bytes | str) -> None:
        """Send the reply; one without an id only after all those before it."""
        ticket.reply = reply
        if ticket.request_id is not None:
            self._post(ticket)
        while self._in_order and self._in_order[0].reply is not None:
            self._post(self._in_order.popleft())

    def _post(self, ticket: _Ticket) -> None:
        """Send at once if the connection takes it, otherwise in a task that waits for the client.

        `broadcast` is websockets' way to send without waiting.
        """
        assert ticket.reply is not None
        is_behind = self._outbox or self._connection.transport.get_write_buffer_size() > 0
        if not is_behind and len(ticket.reply) < _LARGE_REPLY:
            broadcast([self._connection], ticket.reply)
            self._end(ticket)
            return
        self._outbox.append(ticket)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_outbox())

    async def _send_outbox(self) -> None:
        try:
            while self._outbox:
                ticket = self._outbox[0]
                assert ticket.reply is not None
                async with asyncio.timeout(self._send_timeout):
                    await self._connection.send(ticket.reply)
                self._end(self._outbox.popleft())
        except TimeoutError:
            peer = self._connection.remote_address
            logger.warning("%s took nothing for %g s: cut off.", peer, self._send_timeout)
            self._connection.transport.abort()
        except ConnectionClosed:
            pass

    def _end(self, ticket: _Ticket) -> None:
        total = time.perf_counter() - ticket.arrived
        self._previous_total_ms = 1e3 * total
        self._metrics.total.observe(total)
        self._slots.release()
