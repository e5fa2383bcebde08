"""Progress: a bar on a terminal; elsewhere (a log, a pipe) a log line every half minute."""

from __future__ import annotations

import datetime
import logging
import sys
import threading
import time
from typing import Any, Protocol, runtime_checkable

from rich import filesize, progress
from rich.console import Console

logger = logging.getLogger(__name__)

BYTES = "bytes"
LOG_INTERVAL = 30.0
# Terminal columns: for bytes with their speed, the remaining time, the bar at most, a usual note.
_BYTES_WIDTH, _TIME_WIDTH, _BAR_WIDTH, _NOTE_WIDTH = 26, 8, 40, 22
_SMALLEST = 8


@runtime_checkable
class Progress(Protocol):
    """What a long operation reports to: what is done so far, the total once known, and a note.

    `ProgressBar.show` is one.
    """

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


def no_progress(done: int, total: int | None = None, note: str = "") -> None:
    """Report to nobody."""


class ProgressBar:
    """Counts `unit`s (`BYTES` get prefixes and a speed). Safe for threads.

    `done` of them existed before. Nothing is shown in the first `after` seconds, so that a quick
    operation shows nothing at all. `note_width` columns are reserved for the note, if need be at
    the cost of the title. `logs` False is for callers that log their own lines.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        total: int | None = None,
        *,
        done: int = 0,
        after: float = 0.5,
        note_width: int = 0,
        logs: bool = True,
    ) -> None:
        self._note_width, self._logs = note_width, logs
        self._title, self._unit, self._total, self._after = title, unit, total, after
        self._done = self._before = done
        self._begun = self._logged = time.monotonic()
        self._lock = threading.Lock()
        # Soft wrap: log lines above the bar may hold paths that are longer than a line.
        self._console = Console(stderr=True, soft_wrap=True)
        self._bar: progress.Progress | None = None
        self._handlers: list[logging.StreamHandler[Any]] = []

    def __enter__(self) -> ProgressBar:
        if self._after == 0 and self._console.is_interactive:
            self._draw("")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def show(self, done: int, total: int | None = None, note: str = "") -> None:
        """Set what is done; `note` is shown after it."""
        with self._lock:
            self._done, self._total = done, total or self._total
            self._update(note)

    def advance(self, more: int, note: str = "") -> None:
        """Add to what is done."""
        with self._lock:
            self._done += more
            self._update(note)

    def _update(self, note: str) -> None:
        now = time.monotonic()
        if not self._console.is_interactive:
            if self._logs and now - self._logged >= LOG_INTERVAL:
                self._logged = now
                logger.info("%s: %s", self._title, self._in_words(now, note))
        elif now - self._begun >= self._after:
            self._draw(note)

    def _draw(self, note: str) -> None:
        if self._bar is None:
            stderr = sys.stderr
            self._bar = progress.Progress(*self._columns(), console=self._console, transient=True)
            self._bar.start()
            # rich has replaced sys.stderr. Log handlers follow, so that lines stand above the bar.
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                    handler.setStream(sys.stderr)
                    self._handlers.append(handler)
            # What existed before does not count for the speed.
            self._task = self._bar.add_task("", completed=self._before, total=self._total, note="")
        note = shortened(note, self._room_for_note)
        self._bar.update(self._task, completed=self._done, total=self._total, note=note)

    def _columns(self) -> list[progress.ProgressColumn]:
        """Return the counts always, and title, bar and note as far as there is room."""
        amount: list[progress.ProgressColumn]
        if self._unit == BYTES:
            amount = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
            room = self._console.width - _BYTES_WIDTH
        else:
            amount = [progress.MofNCompleteColumn(), progress.TextColumn(self._unit, markup=False)]
            room = self._console.width - 2 * len(str(self._total)) - len(self._unit) - 3
        room -= _TIME_WIDTH
        columns: list[progress.ProgressColumn] = []
        if room - self._note_width > _SMALLEST:
            title = shortened(self._title, room - self._note_width - 1)
            columns.append(progress.TextColumn(title, markup=False))
            room -= len(title) + 1
        width = min(_BAR_WIDTH, room - max(self._note_width, _NOTE_WIDTH) - 2)
        if width >= _SMALLEST:
            columns.append(progress.BarColumn(bar_width=width))
            room -= width + 1
        self._room_for_note = max(room - 1, 0)
        note = progress.TextColumn("{task.fields[note]}", markup=False)
        return [*columns, *amount, progress.TimeRemainingColumn(), note]

    def _in_words(self, now: float, note: str) -> str:
        """Return, for example, `12 of 50 episodes, 0:03:10 left, 11 succeeded`."""
        number = filesize.decimal if self._unit == BYTES else "{:,}".format
        amount = number(self._done)
        if self._total is not None:
            amount += f" of {number(self._total)}"
        parts = [amount if self._unit == BYTES else f"{amount} {self._unit}"]
        here = self._done - self._before
        if self._total is not None and here > 0:
            # A total that is an estimate may be exceeded.
            seconds = (now - self._begun) / here * max(0, self._total - self._done)
            parts.append(f"{datetime.timedelta(seconds=round(seconds))} left")
        return ", ".join([*parts, note] if note else parts)


def shortened(text: str, width: int) -> str:
    """Cut a text to `width` columns; if cut, it ends in `…`."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…" * (width > 0)
