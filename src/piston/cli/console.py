"""Output of the commands: the console, tables, and how an error ends a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from piston.logs import line_width

if TYPE_CHECKING:  # `fail` works without rich, which is not installed on a robot
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


class UsageError(ValueError):
    """The command line cannot be understood; the command ends with exit code 2."""


def console() -> Console:
    """In a log or a pipe, tables have up to 160 columns and sentences are not broken."""
    from rich.console import Console

    width = line_width(sys.stdout)
    return Console(width=width or 160, soft_wrap=width is None)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    right: Collection[str] = (),
    drop: Sequence[str] = (),
    **options: Any,
) -> Table:
    """Return a table to print; the columns in `right` are right-aligned.

    Where the table is too wide, columns of `drop` are left out, the first one first, and named
    below. Strings are shown as they are. The first column holds names, which are never broken; a
    word elsewhere that is longer than its column continues in the next line.
    """
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table

    screen, rows = console(), list(rows)
    for count in range(len(drop) + 1):
        left_out = drop[:count]
        made = Table(title=escape(title) or None, title_justify="left", **options)
        for index, column in enumerate(columns):
            justify: Any = "right" if column in right else "left"
            if column not in left_out:
                made.add_column(column, justify=justify, overflow="fold", no_wrap=index == 0)
        for row in rows:
            cells = (cell for cell, column in zip(row, columns) if column not in left_out)
            made.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in cells))
        unlimited = screen.options.update(max_width=10_000)
        if Measurement.get(screen, unlimited, made).maximum <= screen.width:
            break
    if left_out:
        made.caption_justify = "left"
        made.caption = f"A wider terminal also shows: {', '.join(left_out)}."
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
