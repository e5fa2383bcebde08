"""The client: asks a policy server for actions, whatever happens to the connection.

It waits for a server that is not up yet, reconnects to one that went away, gives up in time, and
never takes a late reply for the answer to a newer request. Piston's servers number their replies
(`request_id`), so a late one is recognised and skipped. Other servers speak openpi's protocol
without numbers: after a reply that did not come in time, the connection is replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import os
import random
import re
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from piston_client.codec import (
    BUSY,
    EXECUTED_STEPS,
    REQUEST_ID,
    ProtocolError,
    pack,
    shortened,
    unpack,
)
from piston_client.examples import example_observation

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8000
API_KEY_VARIABLE = "PISTON_API_KEY"
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 2.0
_SECONDS_BETWEEN_LOGS = 10.0
# For the closing handshake, and for one attempt to reach a machine.
_CLOSE_SECONDS, _HANDSHAKE_SECONDS = 1.0, 5.0
# Unanswered requests in a row after which even a connection with numbers is replaced.
_MAX_UNANSWERED = 2
_MAX_REPLY_BYTES = 256 * 2**20
# A server that computes without answering pings is slow, not dead; `timeout` decides. The client
# of websockets sends pings from version 15 on.
_NO_PINGS: dict[str, Any] = (
    {"ping_interval": None} if "ping_interval" in inspect.signature(connect).parameters else {}
)


class ServerError(RuntimeError):
    """The server refused this request. The connection is usable: the next one may succeed."""


class ServerBusy(ServerError):
    """The server's queue is full: ask again later."""


class ConnectionLost(ConnectionError):
    """The server is away, or the connection broke before the reply. The next call reconnects."""


class ReplyTimeout(ConnectionLost, TimeoutError):
    """No reply arrived in time. If it still comes, it is discarded."""


class _Refused(ConnectionLost):
    """Connecting again will not help."""


class _NotReady(ConnectionLost):
    """The server accepted the connection, but did not send its metadata in time."""


# Errors that may pass by themselves: the robot holds still and asks again.
TRANSIENT: tuple[type[Exception], ...] = (ConnectionError, TimeoutError, ServerBusy)
if sys.version_info < (3, 11):  # where these are not the built-in TimeoutError yet
    import asyncio
    import concurrent.futures

    TRANSIENT += (socket.timeout, concurrent.futures.TimeoutError, asyncio.TimeoutError)


class Client:
    """A served policy, used as if it were local: `Client("robot-server").infer(observation)`.

    Nothing is connected before the first use. Safe to use from several threads: one request at a
    time. `timeout` bounds one `infer` altogether, reconnecting included; `connect_timeout` bounds
    the wait for a server that is not up yet, once, before the first request. Both in seconds. A
    server's API key is given as `api_key`, in a file, or in the environment (PISTON_API_KEY).
    `robot` says which robot asks, if the policy drives several.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        *,
        api_key: str | None = None,
        api_key_file: str | Path | None = None,
        timeout: float = 10.0,
        connect_timeout: float = 60.0,
        ca_file: str | Path | None = None,
        robot: str | None = None,
    ) -> None:
        """`host` is a name, an address, or a whole `ws://` or `wss://` location."""
        if timeout <= 0 or connect_timeout <= 0:
            raise ValueError(
                f"Timeouts are positive seconds; found {timeout} and {connect_timeout}."
            )
        self.uri = make_uri(host, port)
        key = find_api_key(api_key, api_key_file)
        self._headers = {} if key is None else {"Authorization": f"Api-Key {key}"}
        self._tls: ssl.SSLContext | None = None
        if self.uri.startswith("wss://"):
            self._tls = ssl.create_default_context(cafile=ca_file)
        elif ca_file is not None:
            raise ValueError(f"A ca_file is of use with wss:// only; the location is {self.uri}.")
        self._robot, self._session = robot, 0
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._metadata: dict[str, Any] | None = None
        # Whether the server is one of Piston's, which number their replies.
        self._has_numbers = False
        self._request_ids = itertools.count(1)
        # The connection, None before the first use and after it broke.
        self._websocket: ClientConnection | None = None
        self._num_unanswered = 0

    @property
    def metadata(self) -> dict[str, Any]:
        """What the server says of its policy; connects if needed.

        `observation` is what the policy expects, in its structure: the dtype and shape of each
        value, whether it is required, the names of its dimensions. `actions` is what it returns.
        Of a policy that drives several robots these are of the client's own one; `robots` has all.
        """
        if self._metadata is None:
            self.connect()
        assert self._metadata is not None
        robots = self._robots
        if self._robot is None or not robots:
            return self._metadata
        if self._robot not in robots:
            raise ServerError(
                f"The policy of {self.uri} has no robot {self._robot!r}; it has "
                f"{', '.join(robots)}."
            )
        # Without what the server says of the robot that it takes for the default.
        of_robots = {key for about in robots.values() for key in about}
        common = {key: one for key, one in self._metadata.items() if key not in of_robots}
        return {**common, **robots[self._robot]}

    @property
    def _robots(self) -> Mapping[str, Mapping[str, Any]]:
        """What the server says of each robot, if its policy drives several."""
        robots = (self._metadata or {}).get("robots")
        return robots if isinstance(robots, Mapping) else {}

    def example_observation(self, *, seed: int = 0) -> dict[str, Any]:
        """Return a random observation in the keys and shapes that the policy expects."""
        return example_observation(self.metadata, seed=seed)

    def connect(self) -> None:
        """Wait for the server, at most `connect_timeout`. `infer` does this by itself."""
        with self._lock:
            self._connected(time.monotonic() + self._connect_timeout)

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's reply, with `actions` (horizon, dim).

        A policy that writes its `subtask` returns that too; an observation with a `subtask` lets it
        go on with that one. To an observation with a `question` the reply is an `answer`, without
        actions, if the model has learned to answer.

        Raises ServerError (this request was refused), ServerBusy, ReplyTimeout, ConnectionLost.
        After each of them the next call works as soon as the server does.
        """
        if self._metadata is None:
            self.connect()
        deadline = time.monotonic() + self._timeout
        if not self._lock.acquire(timeout=self._timeout):
            raise ReplyTimeout(f"Another thread's request took all of {self._timeout} s.")
        try:
            websocket = self._connected(deadline)
            try:
                return self._ask(websocket, observation, deadline)
            except ReplyTimeout:
                raise
            except ConnectionLost as error:
                if self._closed.is_set():  # by `close` in another thread
                    raise
                # Asking twice does no harm, and most often the server has only been restarted.
                logger.warning("%s Asking again.", error)
                return self._ask(self._connected(deadline), observation, deadline)
        finally:
            self._lock.release()

    def reset(self) -> None:
        """Begin a new episode: a policy that writes its subtask does not go on with the old one."""
        self._session += 1

    def close(self) -> None:
        """Hang up; a request under way in another thread ends with ConnectionLost."""
        self._closed.set()
        websocket = self._websocket
        if self._lock.acquire(blocking=False):
            self._websocket = None
            if websocket is not None:
                websocket.close()
            self._lock.release()
        elif websocket is not None:
            _hang_up(websocket)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self, websocket: ClientConnection, observation: Mapping[str, Any], deadline: float
    ) -> dict[str, Any]:
        if "rtc" in observation and not self._has_numbers:
            raise ValueError(
                f"{self.uri} is no Piston server: it does not support real-time chunking and would "
                "ignore it. Use AsyncChunkBroker."
            )
        number = next(self._request_ids)
        extra: dict[str, Any] = {} if self._robot is None else {"robot": self._robot}
        if self._has_numbers and any(
            about.get("subtasks") for about in (self.metadata, *self._robots.values())
        ):
            extra["session"] = self._session
        request = {**extra, **observation}
        if self._has_numbers:
            request[REQUEST_ID] = number
        else:  # another server might take it for a part of the observation
            request.pop(EXECUTED_STEPS, None)
        message = pack(request)
        try:
            websocket.send(message)
            reply = self._receive(websocket, deadline)
            while self._has_numbers and not _is_reply_to(number, reply):
                reply = self._receive(websocket, deadline)
        except ConnectionClosed as error:
            self._drop()
            if error.rcvd is not None and error.rcvd.code == CloseCode.MESSAGE_TOO_BIG:
                raise ServerError(
                    f"The request of {len(message)} bytes is too large: {error.rcvd.reason}. Send "
                    "smaller images, or start the server with a larger --max-message-bytes."
                ) from error
            if error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG:
                raise ProtocolError(f"The reply is too large: {error.sent.reason}.") from error
            if time.monotonic() >= deadline:
                raise ReplyTimeout("The server did not take the request in time.") from error
            raise ConnectionLost(f"The connection broke: {error}.") from error
        except ProtocolError:
            self._drop()
            raise
        if isinstance(refusal := reply.get("error"), Mapping):
            kind = ServerBusy if refusal.get("type") == BUSY else ServerError
            raise kind(str(refusal.get("message", "The server gave no reason.")))
        return reply

    def _receive(self, websocket: ClientConnection, deadline: float) -> dict[str, Any]:
        try:
            message = websocket.recv(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self._num_unanswered += 1
            if not self._has_numbers or self._num_unanswered >= _MAX_UNANSWERED:
                self._drop()
            raise ReplyTimeout("The server did not reply in time.") from None
        self._num_unanswered = 0
        if isinstance(message, str):
            # An openpi server reports an error as text, then closes.
            if not self._has_numbers:
                self._drop()
            raise ServerError(message)
        return _unpack_dictionary(message)

    # The connection. Call these with the lock held.

    def _connected(self, deadline: float) -> ClientConnection:
        """Return the connection, opened again if it broke."""
        if self._websocket is None and not self._closed.is_set():
            self._websocket = self._connect_until(deadline)
            self._num_unanswered = 0
        # After opening: `close` may have been called meanwhile, and found no connection.
        if self._websocket is None or self._closed.is_set():
            self._drop()
            raise ConnectionLost("The client was closed.")
        return self._websocket

    def _connect_until(self, deadline: float) -> ClientConnection:
        """Connect and read the metadata, again and again until the deadline."""
        started, last_log, delay = time.monotonic(), -math.inf, _FIRST_DELAY
        while True:
            try:
                websocket, metadata = self._connect_once(deadline)
                break
            except _Refused:
                raise
            except OSError as error:
                now = time.monotonic()
                # Randomised, so that many robots do not come back at the same moment.
                pause = delay * random.uniform(0.7, 1.3)
                if now + pause >= deadline or self._closed.is_set():
                    waited = f"waited {now - started:.1f} s"
                    what = "No ready server" if isinstance(error, _NotReady) else "No server"
                    raise ConnectionLost(f"{what} at {self.uri} ({waited}): {error}") from error
                if now - last_log > _SECONDS_BETWEEN_LOGS:
                    logger.info("Waiting for the policy server at %s: %s", self.uri, error)
                    last_log = now
                self._closed.wait(pause)
                delay = min(2 * delay, _LONGEST_DELAY)
        logger.info("Connected to the policy server at %s.", self.uri)
        if self._metadata is not None and pack(metadata) != pack(self._metadata):
            logger.warning("The server at %s came back with other metadata.", self.uri)
        self._metadata = metadata
        self._has_numbers = isinstance(metadata.get("piston"), Mapping)
        return websocket

    def _connect_once(self, deadline: float) -> tuple[ClientConnection, dict[str, Any]]:
        """Connect and read the metadata; raise _Refused if trying again will not help.

        A server that warms up accepts the connection and sends its metadata when it is ready, so
        that wait may be long; a machine that is off does not answer at all, so that one may not.
        """
        with contextlib.ExitStack() as on_failure:
            try:
                websocket = connect(
                    self.uri,
                    additional_headers=self._headers,
                    ssl=self._tls,
                    compression=None,
                    max_size=_MAX_REPLY_BYTES,
                    open_timeout=min(max(0.01, deadline - time.monotonic()), _HANDSHAKE_SECONDS),
                    close_timeout=_CLOSE_SECONDS,
                    **_NO_PINGS,
                ).__enter__()
                on_failure.callback(_hang_up, websocket)
                _limit_sending(websocket, self._timeout)
                message = self._first_message(websocket, deadline)
                if isinstance(message, str):
                    raise ConnectionLost(f"{self.uri} refused the connection: {shortened(message)}")
                metadata = _unpack_dictionary(message)
            except InvalidStatus as error:
                status = error.response.status_code
                text = (error.response.body or b"").decode(errors="replace").strip()
                answer = f"HTTP {status}, {shortened(text)}" if text else f"HTTP {status}"
                if status in (401, 403):
                    message = f"{self.uri} refused the API key ({answer})."
                    raise _Refused(
                        f"{message} Give the server's as api_key, in api_key_file, or in the "
                        f"environment variable {API_KEY_VARIABLE}."
                    ) from error
                kind = ConnectionLost if status >= 500 else _Refused
                state = "not ready" if status >= 500 else "no policy server"
                raise kind(f"{self.uri} is {state}: it answered {answer}.") from error
            except ssl.SSLCertVerificationError as error:
                raise _Refused(
                    f"{self.uri} has a certificate that is not trusted: {error.verify_message}. "
                    "Give the authority's certificate as ca_file."
                ) from error
            except ProtocolError as error:
                raise _Refused(f"{self.uri} is no policy server: {error}") from error
            except InvalidHandshake as error:
                message = f"{self.uri} does not answer as a policy server: {error}."
                raise ConnectionLost(message) from error
            except (EOFError, ConnectionClosed) as error:
                raise ConnectionLost(f"{self.uri} hung up: {error}.") from error
            except (TimeoutError, socket.timeout) as error:  # not the same before Python 3.10
                raise ConnectionLost(f"{self.uri} does not answer.") from error
            on_failure.pop_all()
        return websocket, metadata

    def _first_message(self, websocket: ClientConnection, deadline: float) -> str | bytes:
        """Wait for the metadata, and log now and then what is waited for."""
        while True:
            left = deadline - time.monotonic()
            try:
                return websocket.recv(timeout=max(0.0, min(left, _SECONDS_BETWEEN_LOGS)))
            except TimeoutError as error:
                if left <= _SECONDS_BETWEEN_LOGS or self._closed.is_set():
                    raise _NotReady(
                        "it accepts connections, but its policy is still warming up or being "
                        "compiled. Try again later, or wait longer with connect_timeout."
                    ) from error
                logger.info("The policy server at %s is not ready yet.", self.uri)

    def _drop(self) -> None:
        if self._websocket is not None:
            _hang_up(self._websocket)
        self._websocket = None


def find_api_key(api_key: str | None, api_key_file: str | Path | None) -> str | None:
    """Return the key that is given, otherwise the file's, otherwise PISTON_API_KEY's, or None."""
    if api_key is not None and api_key_file is not None:
        raise ValueError("api_key and api_key_file are both given; expected only one of them.")
    if api_key is not None:
        key, origin = api_key, "api_key"
    elif api_key_file is not None:
        key = Path(api_key_file).read_text(encoding="utf-8", errors="replace").strip()
        origin = f"The API key in {api_key_file}"
    elif API_KEY_VARIABLE in os.environ:
        key, origin = os.environ[API_KEY_VARIABLE], API_KEY_VARIABLE
    else:
        return None
    if not re.fullmatch("[!-~]+", key):
        raise ValueError(
            f"{origin} is empty, or has spaces or characters that no HTTP header can carry. Use "
            "ASCII letters, digits and signs, or give no key at all."
        )
    return key


def make_uri(host: str, port: int | None) -> str:
    """Return `ws://host:port` for a name, an address, `name:port`, or a whole location."""
    is_whole = "://" in host
    is_bare_ipv6 = host.count(":") > 1 and not host.startswith("[")
    name = f"[{host}]" if is_bare_ipv6 else host
    parts = urllib.parse.urlsplit(host if is_whole else f"ws://{name}")
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ValueError(
            f"A policy server is named by its host, or as ws://… or wss://…; found {host!r}."
        )
    if parts.port is not None and port is not None and parts.port != port:
        raise ValueError(f"Two ports are given: {host!r} and {port}.")
    chosen = port or (None if is_whole else DEFAULT_PORT)
    if parts.port is None and chosen is not None:
        parts = parts._replace(netloc=f"{parts.netloc}:{chosen}")
    return parts.geturl()


def _unpack_dictionary(message: bytes) -> dict[str, Any]:
    found = unpack(message, writable=True)
    if not isinstance(found, dict):
        raise ProtocolError(f"A message of the server is a dictionary; found {shortened(found)}.")
    return found


def _is_reply_to(number: int, reply: dict[str, Any]) -> bool:
    found = reply.pop(REQUEST_ID, None)
    if not isinstance(found, int) or found > number:
        raise ProtocolError(
            f"A reply to request {shortened(found)} came; {number} was the last one sent."
        )
    if found < number:
        logger.warning("Skipped the late reply to request %d; waiting for %d.", found, number)
    return found == number


def _limit_sending(websocket: ClientConnection, seconds: float) -> None:
    """Without this, a server that reads no more would block `send` for a quarter of an hour."""
    if sys.platform == "win32":
        value = struct.pack("@L", max(1, int(seconds * 1e3)))
    else:
        value = struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
    websocket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _hang_up(websocket: ClientConnection) -> None:
    """Close the connection without a handshake; wakes a thread that waits for a reply."""
    with contextlib.suppress(OSError):  # closed already
        websocket.socket.shutdown(socket.SHUT_RDWR)
