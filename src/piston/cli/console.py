"""What people see: the console, tables, and how an error ends a command."""

from __future__ import annotations

import os
import sys

from rich.console import Console


def console() -> Console:
    """Wide enough for tables when the output is not a terminal (a log, a pipe)."""
    return Console(width=None if sys.stdout.isatty() else 140)


def fail(error: Exception | str, code: int = 1) -> int:
    """Print one clear message, with the notes that were added on the way, to stderr."""
    # str(KeyError("…")) would quote the message.
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    notes = getattr(error, "__notes__", [])
    print("\n".join([f"error: {message}", *notes]), file=sys.stderr)
    return code


def stdout_closed_early() -> int:
    """`piston … | head` closes the pipe; Python must not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
