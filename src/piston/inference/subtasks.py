"""Which subtask a policy goes on with: the text that it wrote lately, or none, so that it writes.

Writing a text takes longer than a chunk of actions, and the subtask seldom changes from one chunk
to the next. Requests with the same `session`, by default those of one connection, share the text
for some chunks or seconds, and as long as the prompt stays the same.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from collections.abc import Callable, Hashable

# Sessions that are remembered; the one that was used longest ago is dropped first.
_MAX_SESSIONS = 1024


@dataclasses.dataclass(frozen=True)
class SubtaskInterval:
    """How long a written subtask is kept: for a number of chunks, or of seconds."""

    chunks: int | None = 1
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> SubtaskInterval:
        """Read "4" (chunks) or "2.5s" (seconds)."""
        match = re.fullmatch(r"\s*(?:(\d+)|(\d*\.?\d+)\s*s)\s*", text)
        chunks, seconds = match.groups() if match else (None, None)
        if chunks is not None and int(chunks) > 0:
            return cls(int(chunks))
        if seconds is not None and float(seconds) > 0:
            return cls(None, float(seconds))
        raise ValueError(
            f"The interval of subtasks is {text!r}; expected a number of chunks, e.g. 4, or "
            "seconds, e.g. 2.5s."
        )


@dataclasses.dataclass
class _Written:
    prompt: str | None
    text: str
    at: float
    # How many chunks have used it.
    uses: int = 1


class SubtaskMemory:
    """The texts that sessions go on with."""

    def __init__(
        self, interval: SubtaskInterval, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval, self._clock = interval, clock
        self._written: collections.OrderedDict[Hashable, _Written] = collections.OrderedDict()

    def recall(self, session: Hashable, prompt: str | None) -> str | None:
        """Return the text that a session's next chunk uses; None if it has to be written."""
        found = self._written.get(session)
        if found is None or found.prompt != prompt:
            return None
        limit = self._interval
        if limit.chunks is not None and found.uses >= limit.chunks:
            return None
        if limit.seconds is not None and self._clock() - found.at >= limit.seconds:
            return None
        found.uses += 1
        self._written.move_to_end(session)
        return found.text

    def store(self, session: Hashable, prompt: str | None, text: str) -> None:
        """Remember what was written for a chunk."""
        self._written[session] = _Written(prompt, text, self._clock())
        self._written.move_to_end(session)
        while len(self._written) > _MAX_SESSIONS:
            self._written.popitem(last=False)
