"""The memory of messages: kept for the next message, and given back when a robot has gone."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable

# glibc keeps freed blocks up to the size of the largest one that was freed so far, at most 32 MB.
# Without this, it returns the memory of every message to the kernel and fetches it again.
_KEPT_BYTES = 16 * 2**20
# The connections that close meanwhile are served by one return.
_SECONDS_TO_RETURN = 1.0


def keep_blocks() -> None:
    """Let glibc keep the blocks of messages."""
    bytes(_KEPT_BYTES)


class MemoryReturn:
    """Returns free memory to the kernel a moment after it was asked to, in a thread.

    glibc keeps what lies below a block in use: without this, hundreds of megabytes after a few
    large messages at the same time. Other C libraries are left alone.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._is_asked = False
        self._trim: Callable[[int], int] | None = None
        with contextlib.suppress(OSError, TypeError, AttributeError):
            self._trim = ctypes.CDLL(None).malloc_trim

    def schedule(self) -> None:
        self._is_asked = True
        if self._trim is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(self._trim))

    async def _run(self, trim: Callable[[int], int]) -> None:
        # Once more if it was asked for meanwhile: what was freed since then would stay.
        while self._is_asked:
            self._is_asked = False
            await asyncio.sleep(_SECONDS_TO_RETURN)
            # ctypes lets other threads run meanwhile.
            await asyncio.to_thread(trim, 0)
