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

from piston.client.codec import BUSY, REQUEST_ID, ProtocolError, pack, unpack
from piston.serving.batching import Batcher, Busy, Observation, Outcome, Request
from piston.serving.metrics import Metrics

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


class BadRequest(ValueError):
    """The request cannot be understood; `request_id` is set if that much could be read."""

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


def decode_request(message: bytes | str) -> tuple[Observation, int | None]:
    """Return the observation and the request id, or raise BadRequest."""
    if isinstance(message, str):
        raise BadRequest("A request is a binary frame (msgpack); found a text frame.")
    try:
        observation = unpack(message, max_values=_MAX_VALUES)
    except ProtocolError as error:
        raise BadRequest(f"The message cannot be read. {error}") from error
    if not isinstance(observation, dict):
        kind = type(observation).__name__
        raise BadRequest(f"An observation is a map of names to values; found a {kind}.")
    request_id = observation.pop(REQUEST_ID, None)
    if request_id is not None and type(request_id) is not int:
        kind = type(request_id).__name__
        raise BadRequest(f"{REQUEST_ID!r} is a whole number; found a {kind}.")
    # A policy that let NaN or infinity through would move the robot by it.
    if (path := _find_not_finite(observation)) is not None:
        where = path[1:] if len(path) <= 200 else f"{path[1:200]}…"
        raise BadRequest(f"{where!r} holds NaN or infinity; expected finite numbers.", request_id)
    return observation, request_id


def _find_not_finite(value: Any) -> str | None:
    """Return the path to the first NaN or infinity, None if there is none."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if (path := _find_not_finite(part)) is not None:
                return f"/{key}{path}" if isinstance(value, dict) else f"[{key}]{path}"
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    is_float = isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "f"
    return "" if is_float and not np.isfinite(value).all() else None


def encode_error(kind: str, message: str, request_id: int | None) -> bytes | str:
    """Return an error reply of at most 4 KB, whatever the message quotes."""
    # A lone surrogate, which a policy may have quoted, can be neither packed nor sent.
    data = message.encode("utf-8", errors="backslashreplace")
    if len(data) > _MAX_ERROR_BYTES:
        # Leave out the middle: the beginning says what failed, the end of a traceback where.
        half = _MAX_ERROR_BYTES // 2
        data = data[:half] + " … ".encode() + data[-half:]
    message = data.decode(errors="ignore")
    if request_id is None:
        return f"{kind}: {message}"
    return pack({"error": {"type": kind, "message": message}, REQUEST_ID: request_id})


def describe(error: Exception, *, debug: bool) -> tuple[str, str]:
    """Return an error's type, and its message with the notes that transforms added to it.

    Policies refuse bad observations with ValueError and LookupError. With `debug` the message is a
    traceback.
    """
    is_bad_request = isinstance(error, ValueError | LookupError)
    kind = BUSY if isinstance(error, Busy) else BAD_REQUEST if is_bad_request else INTERNAL
    if debug:
        return kind, "".join(traceback.format_exception(error))
    # str(KeyError("…")) would quote the message.
    is_quoted = type(error) is KeyError and error.args
    message = str(error.args[0] if is_quoted else error) or type(error).__name__
    if kind == INTERNAL:
        message = f"{type(error).__name__}: {message}"
    return kind, "\n".join([message, *getattr(error, "__notes__", [])])


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
        send_timeout: float,
        debug: bool,
    ) -> None:
        self._connection = connection
        self._batcher = batcher
        self._metrics = metrics
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
                answered = asyncio.gather(*(self._slots.acquire() for _ in range(_SLOTS)))
                await first_of(answered, self._connection.wait_closed())
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
                observation, request_id = decode_request(message)
            else:
                observation, request_id = await asyncio.to_thread(decode_request, message)
        except BadRequest as error:
            self._refuse(self._open(error.request_id, arrived), error)
            return False
        ticket = self._open(request_id, arrived)
        finish = functools.partial(self._finish, ticket)
        try:
            self._batcher.submit(Request(observation, self, finish, arrived))
        except Busy as error:
            self._refuse(ticket, error)
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
        if isinstance(outcome.result, Exception):
            self._refuse(ticket, outcome.result)
            return
        timing = {name: getattr(outcome, name) for name in ("infer_ms", "queue_ms", "batch_size")}
        if self._previous_total_ms is not None:
            timing["prev_total_ms"] = self._previous_total_ms
        id_field = {} if ticket.request_id is None else {REQUEST_ID: ticket.request_id}
        try:
            reply = pack({**outcome.result, "server_timing": timing, **id_field})
        except (ProtocolError, TypeError) as error:
            self._refuse(ticket, RuntimeError(f"The policy's result cannot be sent. {error}"))
        else:
            self._answer(ticket, reply)

    def _refuse(self, ticket: _Ticket, error: Exception) -> None:
        """Answer with an error."""
        kind, message = describe(error, debug=self._debug)
        self._metrics.errors[kind] += 1
        peer = self._connection.remote_address
        if kind == INTERNAL:
            logger.error("The policy failed with a request of %s.", peer, exc_info=error)
        elif not self._has_warned:
            # Once: a robot whose requests are refused asks many times a second.
            self._has_warned = True
            logger.warning("A request of %s was refused (more are only counted): %s", peer, error)
        self._answer(ticket, encode_error(kind, message, ticket.request_id))

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
