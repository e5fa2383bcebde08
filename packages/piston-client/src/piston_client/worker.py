"""The background thread that brokers, the runtime and the policy server make their calls in."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")
if TYPE_CHECKING:  # Python 3.8 cannot evaluate it
    _Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Worker:
    """A background thread that makes one call after another, in the order of submission.

    Unlike an executor's, the thread is a daemon: a request that a dead server will not answer must
    not delay the end of the program. The thread ends with this object.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_make_calls, args=(self._calls,), name=name, daemon=True
        )
        weakref.finalize(self, self._calls.put, None)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, so that no call will ever be made again."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        if self._thread.ident is None:
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, function, args))
        return future


def _make_calls(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        future, function, args = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
        # Nothing of a finished call stays alive while waiting for the next.
        del call, future, function, args
