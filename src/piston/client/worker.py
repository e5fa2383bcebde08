"""A background thread that does one call after another.

Unlike an executor's, it never keeps the program from ending: a request that a dead server will not
answer must not delay a Ctrl-C.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """Calls in the order in which they were submitted; the thread ends with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._calls.put, None)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._calls,), name=self._name, daemon=True
            )
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, function, args))
        return future


_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


def _run(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        future, function, args = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        # Nothing of a finished call stays alive while waiting for the next.
        del call, future, function, args
