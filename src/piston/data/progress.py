"""A bar for work that is counted in frames: on a terminal only, and only if it takes long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console

Progress = Callable[[int], None]  # told how many more frames are done


@contextlib.contextmanager
def frame_bar(title: str, total: int, *, after: float = 0.5) -> Iterator[Progress]:
    """Gives a function that takes the number of further frames; any thread may call it."""
    console, lock, begun, waiting = Console(stderr=True), threading.Lock(), time.monotonic(), 0
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("frames"),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, console=console, transient=True)
    task = bar.add_task(title, total=total)

    def advance(frames: int) -> None:
        nonlocal waiting
        with lock:
            waiting += frames
            if not console.is_interactive or time.monotonic() - begun < after:
                return
            bar.start()
            bar.update(task, advance=waiting)
            waiting = 0

    try:
        yield advance
    finally:
        bar.stop()
