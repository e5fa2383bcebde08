"""One websocket to a policy server: opening it, and exchanging one request for its reply.

Two kinds of server answer. Piston's number their replies (`request_id`), so a late one is known and
skipped. Others speak openpi's protocol without numbers: replies come in order, and one that did not
come in time would be taken for the answer to the next request, so the connection goes with it.
This file knows nothing of retrying; `client` does that.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from piston.client.codec import pack, unpack
from piston.client.errors import (
    BUSY,
    ConnectionLost,
    ProtocolError,
    ReplyTimeout,
    ServerBusy,
    ServerError,
    shortened,
)

logger = logging.getLogger(__name__)

# Waiting longer for an answer to "goodbye" helps nobody.
_CLOSE_SECONDS = 1.0
# One attempt to reach a machine.
_HANDSHAKE_SECONDS = 5.0
# Unanswered requests in a row after which even a numbered connection counts as dead.
_MAX_UNANSWERED = 2


class Refused(ConnectionLost):
    """Trying again will not help: the server, or what stands at its address, does not want us."""


class Connection:
    """An open connection: the server has said who it is (`metadata`)."""

    def __init__(self, websocket: ClientConnection, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.is_usable = True
        # Piston's own servers say so, and number their replies.
        self.is_numbered = isinstance(metadata.get("piston"), Mapping)
        self._websocket = websocket
        self._num_unanswered = 0

    @classmethod
    def open(
        cls,
        uri: str,
        *,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        send_timeout: float,
        deadline: float,
    ) -> Connection:
        """Connect and read the metadata. Raises OSError; `Refused` where retrying is in vain.

        A server that warms up lets us in and speaks when it is ready, so that wait may be long; a
        machine that is off does not even say so, so that one is not.
        """
        handshake = min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
        websocket = _open_websocket(uri, headers, tls, handshake)
        try:
            _limit_sending(websocket.socket, send_timeout)
            return cls(websocket, _read_metadata(websocket, uri, deadline))
        except BaseException:
            _hang_up(websocket)
            raise

    def ask(self, observation: Mapping[str, Any], number: int, deadline: float) -> dict[str, Any]:
        """Send a request and wait for its own reply; earlier requests' replies are skipped."""
        request = {**observation, "request_id": number} if self.is_numbered else observation
        message = pack(request)
        try:
            self._websocket.send(message)
            while True:
                reply = self._receive(deadline)
                if not self.is_numbered or self._is_reply_to(number, reply):
                    return _successful(reply)
        except ConnectionClosed as error:
            self.drop()
            if time.monotonic() >= deadline:
                raise ReplyTimeout("The server did not take the request in time.") from error
            raise ConnectionLost(f"The connection broke: {error}.") from error
        except ProtocolError:
            self.drop()
            raise

    def _receive(self, deadline: float) -> dict[str, Any]:
        try:
            message = self._websocket.recv(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self._num_unanswered += 1
            if not self.is_numbered or self._num_unanswered >= _MAX_UNANSWERED:
                self.drop()
            raise ReplyTimeout("The server did not reply in time.") from None
        self._num_unanswered = 0
        if isinstance(message, str):
            # An openpi server reports an error as text, then closes.
            if not self.is_numbered:
                self.drop()
            raise ServerError(message)
        reply = unpack(message, writable=True)
        if not isinstance(reply, dict):
            raise ProtocolError(f"A reply is a dictionary; found {shortened(reply)}.")
        return reply

    def _is_reply_to(self, number: int, reply: dict[str, Any]) -> bool:
        found = reply.pop("request_id", None)
        if not isinstance(found, int) or found > number:
            raise ProtocolError(
                f"A reply to request {shortened(found)} came; {number} was the last one sent."
            )
        if found < number:
            logger.warning("Skipped the late reply to request %d; %d is asked.", found, number)
        return found == number

    def close(self) -> None:
        """Say goodbye, then hang up."""
        if self.is_usable:
            self.is_usable = False
            self._websocket.close()

    def drop(self) -> None:
        """Hang up at once; wakes a thread that waits for a reply."""
        self.is_usable = False
        _hang_up(self._websocket)


def _open_websocket(
    uri: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, deadline: float
) -> ClientConnection:
    try:
        opening = connect(
            uri,
            additional_headers=dict(headers),
            ssl=tls,
            compression=None,
            max_size=None,
            open_timeout=max(0.01, deadline - time.monotonic()),
            close_timeout=_CLOSE_SECONDS,
            # A server that computes without answering pings is slow, not dead; `timeout` decides.
            ping_interval=None,
        )
        return opening.__enter__()
    except InvalidStatus as error:
        raise _refusal(uri, error.response.status_code) from error
    except ssl.SSLCertVerificationError as error:
        raise Refused(
            f"{uri} has a certificate that is not trusted: {error.verify_message}. Give the "
            "authority's certificate as ca_file."
        ) from error
    except InvalidHandshake as error:
        raise ConnectionLost(f"{uri} does not answer as a policy server: {error}.") from error
    except (EOFError, ConnectionClosed) as error:
        raise ConnectionLost(f"{uri} hung up at once.") from error


def _refusal(uri: str, status: int) -> ConnectionLost:
    if status in (401, 403):
        return Refused(f"{uri} refused the API key (HTTP {status}). Give the server's as api_key.")
    if status >= 500:
        return ConnectionLost(f"{uri} is not ready (HTTP {status}).")
    return Refused(f"{uri} is no policy server: it answered HTTP {status}.")


def _read_metadata(websocket: ClientConnection, uri: str, deadline: float) -> dict[str, Any]:
    try:
        message = websocket.recv(timeout=max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise ConnectionLost(f"{uri} accepted the connection, but says nothing.") from None
    except ConnectionClosed as error:
        raise ConnectionLost(f"{uri} hung up: {error}.") from error
    if isinstance(message, str):
        raise ConnectionLost(f"{uri} turned the connection away: {shortened(message)}")
    try:
        metadata = unpack(message, writable=True)
    except ProtocolError as error:
        raise Refused(f"{uri} is no policy server: {error}") from error
    if not isinstance(metadata, dict):
        raise Refused(f"{uri} introduced itself with {shortened(metadata)}, not a dictionary.")
    return metadata


def _successful(reply: dict[str, Any]) -> dict[str, Any]:
    error = reply.get("error")
    if not isinstance(error, Mapping):
        return reply
    kind = ServerBusy if error.get("type") == BUSY else ServerError
    raise kind(str(error.get("message", "The server gave no reason.")))


def _limit_sending(sock: socket.socket, seconds: float) -> None:
    """A peer that reads no more would otherwise block `send` for a quarter of an hour."""
    if sys.platform == "win32":
        value = struct.pack("@L", max(1, int(seconds * 1e3)))
    else:
        value = struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    # A request is one message; waiting to fill a packet only adds delay.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _hang_up(websocket: ClientConnection) -> None:
    # Closed already: fine.
    with contextlib.suppress(OSError):
        websocket.socket.shutdown(socket.SHUT_RDWR)
