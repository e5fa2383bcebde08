"""The errors that a robot's program sees, and how messages quote values."""

from __future__ import annotations

from typing import Any

# The `type` of an error reply from a server whose queue is full.
BUSY = "busy"

_MAX_QUOTED = 60


class ProtocolError(ValueError):
    """A message that the protocol does not allow, or a value that it cannot carry."""


class ServerError(RuntimeError):
    """The server refused this request. The connection is usable: the next one may succeed."""


class ServerBusy(ServerError):
    """The server's queue is full: ask again later."""


class ConnectionLost(ConnectionError):
    """The server is away, or the connection broke before the reply. The next call reconnects."""


class ReplyTimeout(ConnectionLost, TimeoutError):
    """No reply arrived in time. If it still comes, it is discarded."""


# Errors that may pass by themselves: the robot holds still and asks again.
TRANSIENT = (ConnectionError, TimeoutError, ServerBusy)


def shortened(value: Any) -> str:
    """Return enough of a value to recognise it; errors are sent, and must stay small."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= _MAX_QUOTED else f"{value[:_MAX_QUOTED]!r}…"
    if isinstance(value, list | tuple):
        parts = [shortened(part) if _is_plain(part) else type(part).__name__ for part in value[:6]]
        return "[" + ", ".join(parts) + (", …]" if len(value) > 6 else "]")
    return repr(value) if _is_plain(value) else type(value).__name__


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | bytes)
