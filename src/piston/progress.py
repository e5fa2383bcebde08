"""How far something is: a bar on a terminal; elsewhere (a log, a pipe) a line every half minute.

Knows terminals and the log. Knows nothing of what is done.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time

from rich import filesize, progress
from rich.console import Console

logger = logging.getLogger(__name__)

BYTES = "bytes"
LOG_INTERVAL = 30.0


class ProgressBar:
    """Counts `unit`s (`BYTES` get prefixes and a speed). Any thread may call.

    It shows nothing in the first `after` seconds, so that what is quick leaves no trace.
    """

    def __init__(self, title: str, unit: str, total: int | None = None, *, after: float = 0.5):
        self._title, self._unit, self._total, self._after = title, unit, total, after
        self._done = 0
        self._begun = self._logged = time.monotonic()
        self._first: int | None = None  # what was done before, by an earlier attempt
        self._lock = threading.Lock()
        self._console = Console(stderr=True)
        self._bar: progress.Progress | None = None

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
            self._show(done, total, note)

    def advance(self, more: int, note: str = "") -> None:
        """So many more are done."""
        with self._lock:
            self._show(self._done + more, None, note)

    def _show(self, done: int, total: int | None, note: str) -> None:
        self._done, self._total = done, total or self._total
        self._first = done if self._first is None else self._first
        now = time.monotonic()
        if not self._console.is_interactive:
            if now - self._logged >= LOG_INTERVAL:
                self._logged = now
                logger.info("%s: %s", self._title, self._in_words(now, note))
        elif now - self._begun >= self._after:
            self._draw(note)

    def _draw(self, note: str) -> None:
        if self._bar is None:
            self._bar = progress.Progress(*self._columns(), console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, note=note)
        self._bar.update(self._task, completed=self._done, total=self._total, note=note)

    def _columns(self) -> list[progress.ProgressColumn]:
        amount: list[progress.ProgressColumn] = (
            [progress.DownloadColumn(), progress.TransferSpeedColumn()]
            if self._unit == BYTES
            else [progress.MofNCompleteColumn(), progress.TextColumn(self._unit, markup=False)]
        )
        return [
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            *amount,
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}", markup=False),
        ]

    def _in_words(self, now: float, note: str) -> str:
        """`12 of 50 episodes, 0:03:10 left, 11 succeeded`"""
        number = filesize.decimal if self._unit == BYTES else "{:,}".format
        amount = number(self._done)
        if self._total is not None:
            amount += f" of {number(self._total)}"
        parts = [amount if self._unit == BYTES else f"{amount} {self._unit}"]
        here = self._done - (self._first or 0)
        if self._total is not None and here > 0:
            seconds = (now - self._begun) / here * (self._total - self._done)
            parts.append(f"{datetime.timedelta(seconds=round(seconds))} left")
        return ", ".join([*parts, note] if note else parts)
