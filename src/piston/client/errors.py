"""What can go wrong between a robot and its server, as the caller sees it."""

from __future__ import annotations

from typing import Any

# The `type` of an error reply from a server that has too much to do.
BUSY = "busy"

_ENOUGH = 60


class ProtocolError(ValueError):
    """A message that is not what the protocol allows, or a value that it cannot carry."""


class ServerError(RuntimeError):
    """The server refused this request. The next one may succeed: the client goes on."""


class ServerBusy(ServerError):
    """The server has too much to do at the moment: ask again later."""


class ConnectionLost(ConnectionError):
    """The server is away, or the connection broke before the reply came. The next call retries."""


class ReplyTimeout(ConnectionLost, TimeoutError):
    """No reply in time. Should it still come, it is thrown away."""


# What passes by itself: the robot holds still and asks again. Everything else is a mistake.
TRANSIENT = (ConnectionError, TimeoutError, ServerBusy)


def shortened(value: Any) -> str:
    """Enough of a value to recognise it: what an error quotes may be huge, and errors are sent."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= _ENOUGH else f"{value[:_ENOUGH]!r}…"
    if isinstance(value, list | tuple):
        parts = [shortened(part) if _is_plain(part) else type(part).__name__ for part in value[:6]]
        return "[" + ", ".join(parts) + (", …]" if len(value) > 6 else "]")
    return repr(value) if _is_plain(value) else type(value).__name__


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | bytes)
