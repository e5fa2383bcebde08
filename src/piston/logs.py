"""Logging: the line format, and warnings that are logged once."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from typing import Any, TextIO

# A terminal with fewer columns gets short lines.
_WIDE = 130


def line_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal, or COLUMNS if it is set; None: there is no limit."""
    if stream.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


class LineFormatter(logging.Formatter):
    """`17:04:11.042 [I] Saved checkpoint   (4711:loop.py:212)`, message padded to 80 columns.

    In a narrow terminal `17:04:11 [I] Saved checkpoint`, wrapped between words.
    """

    def __init__(self) -> None:
        place = "(%(process)d:%(filename)s:%(lineno)d)"
        line = f"%(asctime)s.%(msecs)03d [%(levelname).1s] %(message)-80s {place}"
        super().__init__(line, datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        width = line_width(sys.stderr)
        if width is None or width >= _WIDE:
            return super().formatMessage(record)
        begin = f"{record.asctime} [{record.levelname[0]}] "
        wrapped = textwrap.TextWrapper(
            width,
            subsequent_indent=" " * len(begin),
            replace_whitespace=False,
            drop_whitespace=True,
            break_long_words=False,
            break_on_hyphens=False,
        )
        first, *others = record.message.splitlines() or [""]
        wrapped.initial_indent = begin
        lines = wrapped.wrap(first)
        wrapped.initial_indent = wrapped.subsequent_indent
        return "\n".join([*lines, *(line for other in others for line in wrapped.wrap(other))])


def init_logging() -> None:
    """Set the root logger to INFO with our line format, on the handler it has or on a new one.

    Handlers refuse DEBUG as well, since a logger below the root may have a level of its own.
    """
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    if not root.handlers:
        root.addHandler(logging.StreamHandler())
    root.handlers[0].setFormatter(LineFormatter())
    for handler in root.handlers:
        handler.setLevel(max(handler.level, logging.INFO))


_warned: set[tuple[str, str]] = set()


def warn_once(logger: logging.Logger, kind: str, message: str, *args: Any) -> None:
    """Log a warning the first time that this logger is asked for one of this kind."""
    if (logger.name, kind) not in _warned:
        _warned.add((logger.name, kind))
        logger.warning(f"{message} (This is logged once.)", *args)


def forget_warnings() -> None:
    """Let every kind of warning be logged once more; for tests."""
    _warned.clear()
