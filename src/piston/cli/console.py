"""Output of the commands: the console, tables, and how an error ends a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Wide enough for tables when the output is not a terminal (a log, a pipe)."""
    return Console(width=None if sys.stdout.isatty() else 140)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    right: Collection[str] = (),
    **options: Any,
) -> Table:
    """Return a table to print; the columns in `right` are right-aligned.

    Strings are shown as they are. A word that is longer than its column continues in the next line.
    """
    made = Table(title=escape(title) or None, title_justify="left", **options)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def fail(error: BaseException | str, code: int = 1) -> int:
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
