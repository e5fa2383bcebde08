"""Connections that are being opened or closed: bounded in number, so that health checks get in.

A server accepts a connection before it knows whether a robot, a health check or nobody at all will
speak, and each costs a file descriptor. If there are too many, the oldest one is cut off: a client
that speaks at once is answered long before its turn comes.

    TCP ── TLS ── HTTP request ──┬── session (a robot) ── closing ── TCP closed
    └─────────── opening ────────┴── response ── closing ── TCP closed
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection

from piston.logs import warn_once
from piston.serving.batching import drop_frames

logger = logging.getLogger(__name__)

# An opening or closing handshake, and each step of one, takes at most as long.
OPEN_TIMEOUT, CLOSE_TIMEOUT = 10.0, 2.0
# Handshakes at the same time, as far as the limit of open files allows.
_MOST, _LEAST = 256, 16
# Connections that asyncio accepts in one iteration of the event loop. The oldest ones are closed
# some iterations later, so that more descriptors are in use for a moment.
BACKLOG = 16
_MOST_ACCEPTED = 4 * BACKLOG
# Connections that the kernel holds until they are accepted.
_KERNEL_BACKLOG = 1024
# Descriptors that are left to the policy, logs and recordings.
_RESERVED = 16


class Handshakes:
    """The connections that have no session: not yet, or not any more."""

    def __init__(self, tls: ssl.SSLContext | None, most: int) -> None:
        self.tls = tls
        self._most = most
        # The oldest come first.
        self._transports: dict[ServerConnection, asyncio.Transport] = {}

    def __len__(self) -> int:
        return len(self._transports)

    def begin(self, connection: ServerConnection, transport: asyncio.Transport) -> None:
        """Count a connection until `end`; cut off the oldest if there are too many."""
        if connection in self._transports or transport.is_closing():
            return
        if len(self) >= self._most:
            self._transports.pop(next(iter(self._transports))).abort()
            warn_once(
                logger,
                "handshakes",
                "More than %d connections are being opened at the same time: the oldest are cut "
                "off.",
                self._most,
            )
        self._transports[connection] = transport

    def end(self, connection: ServerConnection) -> None:
        """Count a connection no longer: its session begins, or it is closed."""
        self._transports.pop(connection, None)

    def make_connection(self, *args: Any, **options: Any) -> ServerConnection:
        """Return a connection that is counted, for websockets' `create_connection`."""
        return _CountedConnection(self, *args, **options)


class _CountedConnection(ServerConnection):
    """A connection that is counted from when TCP is accepted, which is before TLS."""

    def __init__(self, handshakes: Handshakes, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._handshakes = handshakes
        self._tls_handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._tcp = transport
        self._handshakes.begin(self, transport)
        if self._handshakes.tls is None:
            super().connection_made(transport)
        else:
            # Nothing is read until TLS has taken over.
            transport.pause_reading()
            self._tls_handshake = asyncio.create_task(self._start_tls(self._handshakes.tls))

    async def _start_tls(self, context: ssl.SSLContext) -> None:
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self._tcp,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=OPEN_TIMEOUT,
                ssl_shutdown_timeout=CLOSE_TIMEOUT,
            )
        except OSError as error:  # no TLS, an untrusted certificate, hung up, took too long
            logger.debug("No TLS connection: %s", error)
            self._tcp.abort()
            return
        finally:
            self._tls_handshake = None
        if transport is not None and not transport.is_closing():
            super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._handshakes.end(self)
        # Without `connection_made` there is nothing that could be lost.
        if hasattr(self, "transport"):
            super().connection_lost(error)
            # The parser's frames hold what was received and not read.
            drop_frames(self.protocol.close_exc)


def most_handshakes(max_connections: int) -> int:
    """Return how many handshakes the limit of open files allows besides the robots' connections.

    Raises OSError if they are too few.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _MOST
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MOST
    others = len(list(Path("/dev/fd").iterdir())) + _RESERVED + _MOST_ACCEPTED + max_connections
    if limit - others < _LEAST:
        needed = others + _LEAST
        raise OSError(
            f"This process may open {limit} files; {max_connections} connections (max_connections) "
            f"need {needed}. Raise the limit (`ulimit -n {needed}`; systemd: LimitNOFILE) or serve "
            "fewer connections."
        )
    return min(limit - others, _MOST)


def lengthen_backlog(sockets: Iterable[socket.socket]) -> None:
    """Let the kernel hold more connections than asyncio accepts at once."""
    for listening in sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(_KERNEL_BACKLOG)
