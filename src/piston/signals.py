"""Requests to stop: SIGTERM, as clusters send it, and SIGINT (Ctrl-C)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, Self


class StopSignals:
    """Inside this context a signal sets `received`, for a loop to check; the loop decides.

    A second Ctrl-C raises KeyboardInterrupt at once. `message` is printed when the first signal
    arrives. What cannot check passes `then`, which is called at the first signal, while any line of
    the program may be running; a second signal of either kind then has its usual effect. Python
    delivers signals to the main thread only; in other threads this does nothing.
    """

    def __init__(self, message: str, then: Callable[[], object] | None = None) -> None:
        self.received: signal.Signals | None = None
        self._message = message
        self._then = then
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None and self._then is not None:
            # It came before the first signal had restored the handlers.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = signal.Signals(number)
        if self._then is not None:
            self.__exit__()
        # Logging is not safe here: the signal may interrupt a log line.
        os.write(2, f"{self.received.name}: {self._message}\n".encode())
        if self._then is not None:
            self._then()


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack like Ctrl-C, so that processes that we started are ended."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        # Once: a second signal must not interrupt the unwinding.
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def ignore_stop_signals(*numbers: signal.Signals) -> None:
    """In a worker process: leave it to the parent to decide when to stop (default: both)."""
    for number in numbers or (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def exit_with_parent() -> None:
    """In a worker process: end when the parent ends; one that is killed cannot end its workers."""

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
