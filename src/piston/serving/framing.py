"""A websocket connection for large messages, and for clients that do not behave.

- A large frame is received straight into its place, not collected from pieces.
- A frame above the limit is thrown away as it arrives: the connection goes on, and the server never
  holds more of it than one read from the socket.
- `post` never waits. A client that does not take its replies is noticed, and cut off in the end.

Knows websockets' framing and nothing of what is inside a message.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Generator
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

logger = logging.getLogger(__name__)

# Small, because thousands of tiny frames in one read would keep the event loop from all others.
_READ = 16 * 2**10
_DISCARD = 256 * 2**10


class MessageTooLarge(ValueError):
    """A message of more bytes than allowed; its bytes are gone, the next message is intact."""

    def __init__(self, num_bytes: int, limit: int) -> None:
        super().__init__(
            f"A message of {num_bytes} bytes; at most {limit} are allowed. Send smaller images."
        )


class _Reader(StreamReader):
    """What has arrived and is not parsed yet.

    buffer     [ header | payload of a small frame | header | ...     fed by the base class
    _place     [ payload of one large frame       | missing ]         filled from the socket
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._scratch = memoryview(bytearray(_READ))
        self._place = self._scratch
        self._missing = 0
        # Sizes of the frames that were above the limit and came out empty.
        self.discarded: collections.deque[int] = collections.deque()

    def space(self) -> memoryview:
        """Where the next bytes from the socket belong."""
        return self._place[-self._missing :] if self._missing else self._scratch

    def take(self, num_bytes: int) -> bytes | None:
        """So many bytes were put into `space`: what of them to parse; None while a frame fills."""
        if self._missing == 0:
            return bytes(self._scratch[:num_bytes])
        self._missing -= num_bytes
        return None if self._missing else b""

    def read_exact(self, n: int) -> Generator[None, None, Any]:
        if n <= min(self._limit, max(_READ, len(self.buffer))):
            return (yield from super().read_exact(n))
        num_here = min(n, len(self.buffer))
        here = self.buffer[:num_here]
        del self.buffer[:num_here]
        self._missing = n - num_here
        if n > self._limit:
            # Written over and over again; nobody reads it.
            self._place = memoryview(bytearray(_DISCARD))
        else:
            # Memory that is not touched before bytes arrive: a header alone costs nothing.
            self._place = np.empty(n, np.uint8).data
            self._place[:num_here] = here
        while self._missing:
            if self.eof:
                raise EOFError(f"the stream ends {self._missing} bytes before its frame")
            yield
        place, self._place = self._place, self._scratch
        if n > self._limit:
            self.discarded.append(n)
            return b""
        return place


class _LimitedProtocol(ServerProtocol):
    def __init__(self, limit: int, **kwargs: Any) -> None:
        super().__init__(max_size=None, **kwargs)
        self.reader: _Reader = _Reader(limit)
        # The parser that the base class has begun reads from the base class's reader.
        self.parser = self.parse()
        next(self.parser)


class Connection(ServerConnection, asyncio.BufferedProtocol):
    def __init__(
        self,
        protocol: ServerProtocol,
        *args: Any,
        max_message_bytes: int,
        send_timeout: float,
        **kwargs: Any,
    ) -> None:
        limited = _LimitedProtocol(max_message_bytes, logger=protocol.logger)
        super().__init__(limited, *args, **kwargs)
        self._limit = max_message_bytes
        self._reader = limited.reader
        self._send_timeout = send_timeout
        self._stalled: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    async def receive(self) -> bytes | str:
        """The next message, or MessageTooLarge; ConnectionClosed at the end.

        Waits first until the client has taken what was posted.
        """
        await self._writable.wait()
        num_bytes = 0
        parts: list[Any] = []
        # One frame is never above the limit, but a message may have many.
        async for part in self.recv_streaming():
            lost = self._reader.discarded
            num_bytes += len(part) if part or not lost else lost.popleft()
            if num_bytes > self._limit:
                parts.clear()
            elif part:
                parts.append(part)
        if num_bytes > self._limit:
            raise MessageTooLarge(num_bytes, self._limit)
        if len(parts) <= 1:
            return parts[0] if parts else b""
        return type(parts[0])().join(parts)

    def post(self, message: bytes | str) -> None:
        """Send, without waiting; nothing where the connection is closed."""
        if self.protocol.state is not State.OPEN:
            return
        if isinstance(message, str):
            self.protocol.send_text(message.encode())
        else:
            self.protocol.send_binary(message)
        self.send_data()

    # What asyncio calls.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (asyncio's signature)
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        data = self._reader.take(nbytes)
        if data is not None:
            self.data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writable.clear()
        self._stalled = self.loop.call_later(self._send_timeout, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_stall()
        super().connection_lost(exc)

    def _end_stall(self) -> None:
        self._writable.set()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _cut_off(self) -> None:
        logger.warning(
            "%s took nothing for %g s: cut off.", self.remote_address, self._send_timeout
        )
        self.transport.abort()
