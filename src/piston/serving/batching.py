"""Requests of several robots become batches for one policy, in one thread that does nothing else.

Requests that came while the policy was at work form the next batch. When it is idle, it waits a
little only for robots that are about to ask, judged by how soon each asked again after its last
replies: a robot that is alone never waits.

    robot A   ──?───────?───────?──      ?  asks
    robot B   ───?────────?──────?─      [  policy at work
    policy    ───[ AB ]───[ AB ]─[       a batch begins when B, which is due, has asked as well

Knows nothing of sockets or messages.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable

from piston.serving.protocol import Busy, Observation, Policy, Result

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one request: a result or an error, and how long it took."""

    result: Result | Exception
    queue_ms: float
    infer_ms: float
    batch_size: int


@dataclasses.dataclass(eq=False)
class Request:
    observation: Observation
    source: Hashable  # who asks: a connection
    finish: Callable[[Outcome], None]  # called in the batching thread
    arrived: float = dataclasses.field(default_factory=time.perf_counter)


@dataclasses.dataclass
class _Rhythm:
    """How soon a source asks again after a reply."""

    replied: float = -math.inf
    pause: float = math.inf

    @property
    def due(self) -> float:
        return self.replied + self.pause


class Batcher:
    """One thread, one policy, one queue. `start` it once, `stop` it once."""

    def __init__(self, policy: Policy, *, max_batch: int, max_wait: float, max_queue: int) -> None:
        self._policy = policy
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._max_queue = max_queue
        self._queue: collections.deque[Request] = collections.deque()
        self._rhythms: dict[Hashable, _Rhythm] = {}
        # Guards the queue, the rhythms and `_stopping`.
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Requests that wait; those the policy works on are not counted."""
        return len(self._queue)

    def start(self, warm_up: Callable[[], object] | None = None) -> concurrent.futures.Future[None]:
        """Begin with `warm_up`, in the thread that will infer; the future tells how it went."""
        warm: concurrent.futures.Future[None] = concurrent.futures.Future()
        # A daemon: a policy that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(warm_up, warm), name="piston-inference", daemon=True
        )
        self._thread.start()
        return warm

    def submit(self, request: Request) -> None:
        """Take a request, or refuse it at once: waiting longer would help nobody."""
        with self._changed:
            if len(self._queue) >= self._max_queue:
                raise Busy(f"{len(self._queue)} requests are waiting already; ask again later.")
            rhythm = self._rhythms.setdefault(request.source, _Rhythm())
            rhythm.pause = request.arrived - rhythm.replied
            self._queue.append(request)
            self._changed.notify()

    def forget(self, source: Hashable) -> None:
        """A connection has gone: nobody waits for it, or for what it asked."""
        with self._changed:
            self._rhythms.pop(source, None)
            kept = [request for request in self._queue if request.source != source]
            self._queue.clear()
            self._queue.extend(kept)
            self._changed.notify()

    def stop(self, timeout: float | None = None) -> bool:
        """Finish what is waiting; whether all of it was done in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(
        self,
        warm_up: Callable[[], object] | None,
        warm: concurrent.futures.Future[None],
    ) -> None:
        # Whoever waits for it may lose interest, but warming up cannot be cancelled.
        warm.set_running_or_notify_cancel()
        try:
            if warm_up is not None:
                warm_up()
        except BaseException as error:
            warm.set_exception(error)
            return
        warm.set_result(None)
        while (batch := self._next_batch()) is not None:
            for request, outcome in zip(batch, self._infer(batch), strict=True):
                self._finish(request, outcome)

    def _next_batch(self) -> list[Request] | None:
        """Block until there is something to do; None once stopped with nothing left."""
        with self._changed:
            while True:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if not self._queue:
                    return None
                self._wait_for_others()
                # Empty where all of them have gone meanwhile.
                if size := min(len(self._queue), self._max_batch):
                    return [self._queue.popleft() for _ in range(size)]

    def _wait_for_others(self) -> None:
        # Counted from the first arrival: whoever waited for the policy does not wait again.
        deadline = self._queue[0].arrived + self._max_wait
        while len(self._queue) < self._max_batch and not self._stopping:
            now = time.perf_counter()
            if now >= deadline or not self._others_are_due(now, deadline):
                return
            self._changed.wait(deadline - now)

    def _others_are_due(self, now: float, deadline: float) -> bool:
        waiting = {request.source for request in self._queue}
        return any(
            # One that is late by more than the wait has changed its rhythm.
            source not in waiting and now - self._max_wait < rhythm.due <= deadline
            for source, rhythm in self._rhythms.items()
        )

    def _infer(self, batch: list[Request]) -> list[Outcome]:
        """Results of a batch; where it fails as a whole, each on its own."""
        began = time.perf_counter()
        result: list[Result] | Exception
        try:
            result = self._policy.infer_batch([request.observation for request in batch])
            if len(result) != len(batch):
                raise RuntimeError(f"The policy gave {len(result)} results for {len(batch)}.")
        except Exception as error:
            if len(batch) > 1:
                logger.debug("A batch of %d failed; running it one by one.", len(batch))
                return [outcome for request in batch for outcome in self._infer([request])]
            result = error
        infer_ms = 1e3 * (time.perf_counter() - began)
        return [
            Outcome(
                result=result if isinstance(result, Exception) else result[position],
                queue_ms=1e3 * (began - request.arrived),
                infer_ms=infer_ms,
                batch_size=len(batch),
            )
            for position, request in enumerate(batch)
        ]

    def _finish(self, request: Request, outcome: Outcome) -> None:
        with self._changed:
            if request.source in self._rhythms:
                self._rhythms[request.source].replied = time.perf_counter()
        try:
            request.finish(outcome)
        except Exception:
            # The thread serves everyone; what one receiver does wrong must not end it.
            logger.exception("A reply could not be delivered.")
