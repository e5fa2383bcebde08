"""How far something is: a bar on a terminal; elsewhere (a log, a pipe) a line every half minute.

Knows terminals and the log. Knows nothing of what is done.
"""

from __future__ import annotations

import datetime
import logging
import sys
import threading
import time
from typing import Any, Protocol

from rich import filesize, progress
from rich.console import Console

logger = logging.getLogger(__name__)

BYTES = "bytes"
LOG_INTERVAL = 30.0
# Columns of a terminal: what bytes with their speed take, the time left, and the rest at best.
_BYTES_WIDTH, _TIME_WIDTH, _BAR_WIDTH, _NOTE_WIDTH = 26, 8, 40, 22
_SMALLEST = 8


class Progress(Protocol):
    """What a long operation reports to: what is done so far, the total once known, and a note.

    `ProgressBar.show` is one.
    """

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


def no_progress(done: int, total: int | None = None, note: str = "") -> None:
    """Report to nobody."""


class Live(progress.Progress):
    """rich's bars, and log lines above them: without this the two write into each other."""

    _redirected: list[tuple[logging.StreamHandler[Any], Any]] = []  # noqa: RUF012  (none yet)

    def start(self) -> None:
        before = sys.stderr
        super().start()
        # rich has taken the place of stderr; handlers still hold what was there.
        self._redirected = [
            (handler, handler.setStream(sys.stderr))
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is before
        ]

    def stop(self) -> None:
        for handler, stream in self._redirected:
            if stream is not None:
                handler.setStream(stream)
        super().stop()


class ProgressBar:
    """Counts `unit`s (`BYTES` get prefixes and a speed). Any thread may call.

    `done` were there before. It shows nothing in the first `after` seconds, so that what is quick
    leaves no trace.
    """

    def __init__(
        self, title: str, unit: str, total: int | None = None, *, done: int = 0, after: float = 0.5
    ) -> None:
        self._title, self._unit, self._total, self._after = title, unit, total, after
        self._done = self._before = done
        self._begun = self._logged = time.monotonic()
        self._lock = threading.Lock()
        self._console = Console(stderr=True)
        self._bar: Live | None = None

    def __enter__(self) -> ProgressBar:
        if self._after == 0 and self._console.is_interactive:
            self._draw("")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, total: int | None = None, note: str = "") -> None:
        """So many are done; `note` is added behind."""
        with self._lock:
            self._done, self._total = done, total or self._total
            self._tell(note)

    def advance(self, more: int, note: str = "") -> None:
        """So many more are done."""
        with self._lock:
            self._done += more
            self._tell(note)

    def _tell(self, note: str) -> None:
        now = time.monotonic()
        if not self._console.is_interactive:
            if now - self._logged >= LOG_INTERVAL:
                self._logged = now
                logger.info("%s: %s", self._title, self._in_words(now, note))
        elif now - self._begun >= self._after:
            self._draw(note)

    def _draw(self, note: str) -> None:
        if self._bar is None:
            self._bar = Live(*self._columns(), console=self._console, transient=True)
            self._bar.start()
            # With what was there before: the speed is that of what comes.
            self._task = self._bar.add_task("", completed=self._before, total=self._total, note="")
        note = shortened(note, self._room_for_note)
        self._bar.update(self._task, completed=self._done, total=self._total, note=note)

    def _columns(self) -> list[progress.ProgressColumn]:
        """Numbers always; of the title, the bar and the note what there is room for."""
        amount: list[progress.ProgressColumn]
        if self._unit == BYTES:
            amount = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
            room = self._console.width - _BYTES_WIDTH
        else:
            amount = [progress.MofNCompleteColumn(), progress.TextColumn(self._unit, markup=False)]
            room = self._console.width - 2 * len(str(self._total)) - len(self._unit) - 3
        room -= _TIME_WIDTH
        columns: list[progress.ProgressColumn] = []
        if room > _SMALLEST:
            title = shortened(self._title, room - 1)
            columns.append(progress.TextColumn(title, markup=False))
            room -= len(title) + 1
        width = min(_BAR_WIDTH, room - _NOTE_WIDTH - 2)
        if width >= _SMALLEST:
            columns.append(progress.BarColumn(bar_width=width))
            room -= width + 1
        self._room_for_note = max(room - 1, 0)
        note = progress.TextColumn("{task.fields[note]}", markup=False)
        return [*columns, *amount, progress.TimeRemainingColumn(), note]

    def _in_words(self, now: float, note: str) -> str:
        """`12 of 50 episodes, 0:03:10 left, 11 succeeded`"""
        number = filesize.decimal if self._unit == BYTES else "{:,}".format
        amount = number(self._done)
        if self._total is not None:
            amount += f" of {number(self._total)}"
        parts = [amount if self._unit == BYTES else f"{amount} {self._unit}"]
        here = self._done - self._before
        if self._total is not None and here > 0:
            seconds = (now - self._begun) / here * (self._total - self._done)
            parts.append(f"{datetime.timedelta(seconds=round(seconds))} left")
        return ", ".join([*parts, note] if note else parts)


def shortened(text: str, width: int) -> str:
    """At most so many columns; cut off, it ends in dots."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…" * (width > 0)
