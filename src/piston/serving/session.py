"""One robot's connection: requests in, replies out, nobody else held back.

    receive → decode → Batcher → (inference thread) → encode → post

A request takes one of a few slots until it is answered: a client that sends faster than the policy
works, or does not take its replies, is read no further. Replies to requests without an id keep
their order, because nothing else tells their sender which is which. Knows nothing of what is
observed, or of how batches are formed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from piston.client.codec import Limits, ProtocolError
from piston.serving import protocol
from piston.serving.batching import Batcher, Outcome, Request
from piston.serving.framing import Connection, MessageTooLarge
from piston.serving.metrics import Metrics
from piston.serving.protocol import ServerTiming

logger = logging.getLogger(__name__)

_SLOTS = 8
# Smaller messages are decoded where they arrive (a tenth of a millisecond); a thread costs more.
_LARGE_MESSAGE = 4 * 2**20


@dataclasses.dataclass(eq=False)
class _Ticket:
    """The place of one request's reply."""

    request_id: int | None
    arrived: float
    reply: bytes | str | None = None


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait until one of them is done, then let go of the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class Session:
    """Serves one connection until it closes, or until `stop` and the last reply."""

    def __init__(
        self,
        connection: Connection,
        batcher: Batcher,
        metrics: Metrics,
        *,
        limits: Limits,
        debug: bool,
    ) -> None:
        self._connection = connection
        self._batcher = batcher
        self._metrics = metrics
        self._limits = limits
        self._debug = debug
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(_SLOTS)
        # Requests without an id that are not answered yet, oldest first.
        self._in_order: collections.deque[_Ticket] = collections.deque()
        self._num_open = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._previous_total_ms: float | None = None
        self._complained = False
        self._reading: asyncio.Task[None] | None = None
        self._stopping = False

    async def run(self, metadata: bytes) -> None:
        """Metadata first, then a reply to each request."""
        self._connection.post(metadata)
        self._reading = asyncio.create_task(self._read())
        if self._stopping:
            self._reading.cancel()
        try:
            with contextlib.suppress(ConnectionClosed):
                await asyncio.wait({self._reading})
                if self._stopping and self._reading.cancelled():
                    await self._finish()
                else:
                    await self._reading
        finally:
            self._reading.cancel()
            self._batcher.forget(self)

    def stop(self) -> None:
        """Read no more; `run` returns when every request has been answered."""
        self._stopping = True
        if self._reading is not None:
            self._reading.cancel()

    async def _finish(self) -> None:
        await first_of(self._all_answered.wait(), self._connection.wait_closed())
        await self._connection.close(CloseCode.GOING_AWAY, "the server is shutting down")

    async def _read(self) -> None:
        while True:
            await self._slots.acquire()
            try:
                message = await self._connection.receive()
            except MessageTooLarge as error:
                await self._refuse(self._open(None), error)
                continue
            arrived = time.perf_counter()
            try:
                observation, request_id = await self._decode(message)
            except protocol.BadRequest as error:
                await self._refuse(self._open(error.request_id), error)
                continue
            ticket = self._open(request_id, arrived)
            finish = functools.partial(self._finished, ticket)
            try:
                self._batcher.submit(Request(observation, self, finish, arrived))
            except protocol.Busy as error:
                await self._refuse(ticket, error)

    async def _decode(self, message: bytes | str) -> tuple[protocol.Observation, int | None]:
        if len(message) < _LARGE_MESSAGE:
            return protocol.decode_request(message, self._limits)
        return await asyncio.to_thread(protocol.decode_request, message, self._limits)

    def _open(self, request_id: int | None, arrived: float | None = None) -> _Ticket:
        ticket = _Ticket(request_id, time.perf_counter() if arrived is None else arrived)
        if request_id is None:
            self._in_order.append(ticket)
        self._metrics.requests += 1
        self._num_open += 1
        self._all_answered.clear()
        return ticket

    async def _refuse(self, ticket: _Ticket, error: Exception) -> None:
        kind, reply = self._encode_error(error, ticket)
        self._answer(ticket, reply, kind)
        # Without this, a flood of bad messages that have arrived already would run in one go.
        await asyncio.sleep(0)

    def _finished(self, ticket: _Ticket, outcome: Outcome) -> None:
        """In the inference thread: the event loop gets bytes."""
        kind, reply = self._encode(ticket, outcome)
        # The loop is closed when the server gave up waiting for this very reply.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._answer, ticket, reply, kind, outcome)

    def _encode(self, ticket: _Ticket, outcome: Outcome) -> tuple[str | None, bytes | str]:
        result = outcome.result
        if isinstance(result, Exception):
            return self._encode_error(result, ticket)
        timing = ServerTiming(
            infer_ms=outcome.infer_ms,
            queue_ms=outcome.queue_ms,
            batch_size=outcome.batch_size,
            prev_total_ms=self._previous_total_ms,
        )
        try:
            return None, protocol.encode_result(result, timing, ticket.request_id)
        except (ProtocolError, TypeError) as error:
            unsendable = RuntimeError(f"The policy's result cannot be sent. {error}")
            return self._encode_error(unsendable, ticket)

    def _encode_error(self, error: Exception, ticket: _Ticket) -> tuple[str, bytes | str]:
        kind = protocol.classify(error)
        peer = self._connection.remote_address
        if kind == protocol.INTERNAL:
            logger.error("The policy failed with a request of %s.", peer, exc_info=error)
        elif not self._complained:
            # Once: a robot that asks in vain does so many times a second.
            self._complained = True
            logger.warning("A request of %s was refused (more are only counted): %s", peer, error)
        text = protocol.describe(error, debug=self._debug)
        return kind, protocol.encode_error(kind, text, ticket.request_id)

    def _answer(
        self,
        ticket: _Ticket,
        reply: bytes | str,
        kind: str | None,
        outcome: Outcome | None = None,
    ) -> None:
        """Post the reply; one without an id only when all before it have been posted."""
        ticket.reply = reply
        if ticket.request_id is not None:
            self._post(ticket)
        while self._in_order and self._in_order[0].reply is not None:
            self._post(self._in_order.popleft())
        if kind is not None:
            self._metrics.errors[kind] += 1
        if outcome is not None:
            self._metrics.batch_size.observe(outcome.batch_size)
            self._metrics.inference.observe(outcome.infer_ms / 1e3)
            self._metrics.queue.observe(outcome.queue_ms / 1e3)

    def _post(self, ticket: _Ticket) -> None:
        assert ticket.reply is not None
        self._connection.post(ticket.reply)
        total = time.perf_counter() - ticket.arrived
        self._previous_total_ms = 1e3 * total
        self._metrics.total.observe(total)
        self._slots.release()
        self._num_open -= 1
        if not self._num_open:
            self._all_answered.set()
