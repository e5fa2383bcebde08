"""Requests to stop: SIGTERM, as clusters send it, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self


class StopSignals:
    """Within it, a signal only leaves a note for the loop; a second Ctrl-C ends at once.

    Python hands signals to the main thread alone; in any other this does nothing.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number)
        # Not by logging: what is interrupted may be in the midst of a log line.
        line = f"{self.asked.name}: finishing the step, then saving.\n"
        os.write(2, line.encode())
