"""The client: asks a policy server for actions, whatever happens to the connection.

It waits for a server that is not up yet, reconnects to one that went away, gives up in time, and
never takes a late reply for the answer to a newer request. It knows nothing of robots or chunks;
`brokers` and `runtime` do.
"""

from __future__ import annotations

import itertools
import logging
import random
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from piston.client.codec import pack
from piston.client.connection import Connection, Refused
from piston.client.errors import ConnectionLost, ReplyTimeout

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8000
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 2.0
_SECONDS_BETWEEN_LOGS = 10.0


class Client:
    """A served policy, used as if it were here: `Client("robot-server").infer(observation)`.

    Nothing is connected before the first use. Safe to use from several threads: one request at a
    time. `timeout` bounds one `infer` altogether, reconnecting included; `connect_timeout` bounds
    the wait for a server that is not up yet, once, before the first request. Both in seconds.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        *,
        api_key: str | None = None,
        timeout: float = 10.0,
        connect_timeout: float = 60.0,
        ca_file: str | Path | None = None,
    ) -> None:
        """`host` is a name, an address, or a whole `ws://` or `wss://` location."""
        if timeout <= 0 or connect_timeout <= 0:
            raise ValueError(
                f"Timeouts are positive seconds; found {timeout} and {connect_timeout}."
            )
        self.uri = make_uri(host, port)
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else {}
        self._tls = _tls_context(self.uri, ca_file)
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connection: Connection | None = None
        self._metadata: dict[str, Any] | None = None
        self._numbers = itertools.count(1)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the server said of its policy, e.g. `reset_pose`; connects where needed."""
        if self._metadata is None:
            self.connect()
        assert self._metadata is not None
        return self._metadata

    def connect(self) -> None:
        """Wait for the server, `connect_timeout` at most. `infer` does this by itself."""
        with self._lock:
            self._connected(time.monotonic() + self._connect_timeout)

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """The server's reply, with `actions` (horizon, dim).

        Raises ServerError (this request was refused), ServerBusy, ReplyTimeout, ConnectionLost.
        After each of them the next call works as soon as the server does.
        """
        if self._metadata is None:
            self.connect()
        deadline = time.monotonic() + self._timeout
        acquired = self._lock.acquire(timeout=self._timeout)
        try:
            if not acquired or time.monotonic() >= deadline:
                raise ReplyTimeout(f"Another thread's request took all of {self._timeout} s.")
            return self._infer(observation, deadline)
        finally:
            if acquired:
                self._lock.release()

    def _infer(self, observation: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        connection = self._connected(deadline)
        try:
            return self._ask(connection, observation, deadline)
        except ReplyTimeout:
            raise
        except ConnectionLost as error:
            # Asking twice does no harm, and most often the server has only been restarted.
            logger.warning("%s Asking again.", error)
            return self._ask(self._connected(deadline), observation, deadline)

    def _ask(
        self, connection: Connection, observation: Mapping[str, Any], deadline: float
    ) -> dict[str, Any]:
        if "rtc" in observation and not connection.is_numbered:
            raise ValueError(
                f"{self.uri} is no Piston server: it knows no real-time chunking and would ignore "
                "it. Use AsyncChunkBroker."
            )
        return connection.ask(observation, next(self._numbers), deadline)

    def reset(self) -> None:
        """A served policy keeps nothing between requests; here so that a client stands for one."""

    def close(self) -> None:
        """Hang up; a request under way in another thread ends with ConnectionLost."""
        self._closed.set()
        connection = self._connection
        if connection is None:
            return
        if self._lock.acquire(blocking=False):
            connection.close()
            self._lock.release()
        else:
            connection.drop()

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connected(self, deadline: float) -> Connection:
        """The connection, opened again where it broke. Call with the lock held."""
        if self._connection is None or not self._connection.is_usable:
            self._connection = self._open(deadline)
            self._accept(self._connection.metadata)
        # After opening: `close` may have come in between, and saw only the old connection.
        if self._closed.is_set():
            self._connection.drop()
            raise ConnectionLost("The client was closed.")
        return self._connection

    def _open(self, deadline: float) -> Connection:
        if self._closed.is_set():
            raise ConnectionLost("The client was closed.")
        started = last_log = time.monotonic()
        for attempt, delay in enumerate(_delays()):
            try:
                connection = Connection.open(
                    self.uri,
                    headers=self._headers,
                    tls=self._tls,
                    send_timeout=self._timeout,
                    deadline=deadline,
                )
            except Refused:
                raise
            except OSError as error:
                now = time.monotonic()
                if now + delay >= deadline or self._closed.is_set():
                    waited = f"waited {now - started:.1f} s"
                    raise ConnectionLost(f"No server at {self.uri} ({waited}): {error}") from error
                if attempt == 0 or now - last_log > _SECONDS_BETWEEN_LOGS:
                    logger.info("Waiting for the policy server at %s: %s", self.uri, error)
                    last_log = now
                self._closed.wait(delay)
            else:
                logger.info("Connected to the policy server at %s.", self.uri)
                return connection
        raise AssertionError("the delays never end")

    def _accept(self, metadata: dict[str, Any]) -> None:
        if self._metadata is not None and pack(metadata) != pack(self._metadata):
            logger.warning("The server at %s came back with other metadata.", self.uri)
        self._metadata = metadata


def make_uri(host: str, port: int | None) -> str:
    """`ws://host:port` from a name, an address, `name:port`, or a location with its scheme."""
    if "://" not in host:
        is_bare_ipv6 = host.count(":") > 1 and not host.startswith("[")
        location = f"ws://[{host}]" if is_bare_ipv6 else f"ws://{host}"
        default = DEFAULT_PORT
    else:
        location, default = host, None
    parts = urllib.parse.urlsplit(location)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ValueError(
            f"A policy server is named by its host, or as ws://… or wss://…; found {host!r}."
        )
    if parts.port is not None and port is not None and parts.port != port:
        raise ValueError(f"Two ports are given: {host!r} and {port}.")
    chosen = port or default
    if parts.port is None and chosen is not None:
        parts = parts._replace(netloc=f"{parts.netloc}:{chosen}")
    return parts.geturl()


def _tls_context(uri: str, ca_file: str | Path | None) -> ssl.SSLContext | None:
    if not uri.startswith("wss://"):
        if ca_file is not None:
            raise ValueError(f"A ca_file is of use with wss:// only; the location is {uri}.")
        return None
    return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))


def _delays() -> Iterator[float]:
    """Doubling, with some chance in it so that many robots do not come back all at once."""
    delay = _FIRST_DELAY
    while True:
        yield delay * random.uniform(0.7, 1.3)
        delay = min(2 * delay, _LONGEST_DELAY)
