"""Batches: requests of several robots share one inference, in a thread that does nothing else.

Requests that arrive while the policy is working form the next batch. When the policy is idle, a
request waits only if another robot is about to ask, judged by how soon that robot asked again after
its previous replies, and never longer than the policy took last time: a robot that is alone, or
whose policy is fast, does not wait.

    robot A   ──?───────?───────?──      ?  request
    robot B   ───?────────?──────?─      [  policy working
    policy    ───[ AB ]───[ AB ]─[       a batch starts when B, which is due, has asked as well

Everything but the work of the policy runs in the event loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from piston_client.worker import Worker

logger = logging.getLogger(__name__)

# A robot that has asked within this time has a share of the queue.
_ACTIVE_SECONDS = 10.0
# How often to look whether the inference thread is alive.
_SECONDS_BETWEEN_LOOKS = 1.0

Observation = dict[str, Any]
Result = dict[str, Any]


class Policy(Protocol):
    """What a server needs of a policy: results in the order of the observations."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def infer_batch(self, observations: list[Observation], /) -> list[Result]: ...


@runtime_checkable
class PreparingPolicy(Policy, Protocol):
    """A policy that checks each observation before the batch: a bad one then costs no inference.

    `infer_batch` receives what `prepare` returned in place of the observations. A policy with an
    attribute `has_sessions` that is True gets the key `session`, which is the same for requests of
    one connection, and of one episode if the client says when it begins.
    """

    def prepare(self, observation: Observation, /) -> Any: ...


class Busy(RuntimeError):
    """The queue is full, or the policy did not answer in time."""


def drop_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its causes; call this when it has been reported.

    Their frames hold requests, and they refer to each other: without this, 30 MB might stay in
    memory until the garbage collector runs.
    """
    errors, seen = [error], set()
    while errors:
        one = errors.pop()
        one.__traceback__ = None
        seen.add(id(one))
        further = (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
        errors += [other for other in further if other is not None and id(other) not in seen]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result or the error of one request, and how long it took."""

    result: Result | Exception
    queue_ms: float
    infer_ms: float
    batch_size: int


@dataclasses.dataclass(eq=False)
class _Request:
    observation: Any  # as it arrived; then as the policy prepared it
    source: Hashable  # the connection that asks
    arrived: float
    outcome: asyncio.Future[Outcome]
    deadline: asyncio.TimerHandle | None = None


@dataclasses.dataclass
class _Rhythm:
    """How soon a source asks again after a reply, in seconds."""

    # Of the source, never used for another one.
    number: int = 0
    asked: float = -math.inf
    replied: float = -math.inf
    pause: float = math.inf


class Batcher:
    """One policy, one queue and one inference thread. Call `start` once, `stop` once."""

    def __init__(
        self,
        policy: Policy,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        request_timeout: float = 60.0,
    ) -> None:
        # Seconds after which a request is answered with an error.
        self._request_timeout = request_timeout
        # When the inference under way began, None if there is none.
        self._began: float | None = None
        # Why no inference will ever run again.
        self.failure: BaseException | None = None
        self._policy = policy
        self.max_batch, self._max_wait, self._max_queue = max_batch, max_wait, max_queue
        self._queue: collections.deque[_Request] = collections.deque()
        self._rhythms: dict[Hashable, _Rhythm] = {}
        self._source_numbers = itertools.count()
        self._worker = Worker("piston-inference")
        # The requests that the policy works on.
        self._batch: list[_Request] = []
        self._waiting: asyncio.TimerHandle | None = None
        self._idle_since = -math.inf
        self._last_seconds = 0.0

    def __len__(self) -> int:
        """Return the number of waiting requests, without those that the policy works on."""
        return len(self._queue)

    def start(self, warm_up: Callable[[], object] | None = None) -> asyncio.Future[object]:
        """Run `warm_up` in the thread that will infer; the future is done when it is."""
        self._loop = asyncio.get_running_loop()
        # Set with `failure`.
        self._failed = asyncio.Event()
        return asyncio.wrap_future(self._worker.submit(warm_up or (lambda: None)))

    def submit(self, observation: Observation, source: Hashable) -> asyncio.Future[Outcome]:
        """Add a request to the queue, or raise Busy if the queue or the source's share is full."""
        request = _Request(observation, source, time.perf_counter(), self._loop.create_future())
        if source not in self._rhythms:
            self._rhythms[source] = _Rhythm(next(self._source_numbers))
        rhythm = self._rhythms[source]
        if getattr(self._policy, "has_sessions", False):
            observation["session"] = (rhythm.number, observation.get("session"))
        rhythm.asked = request.arrived
        if self.failure is not None:
            raise Busy("The inference thread has ended, and the server stops.")
        if len(self._queue) >= self._max_queue:
            raise Busy(f"{len(self._queue)} requests are waiting already; ask again later.")
        self._check_share(source, request.arrived)
        rhythm.pause = request.arrived - rhythm.replied
        request.deadline = self._loop.call_later(self._request_timeout, self._expire, request)
        self._queue.append(request)
        self._schedule()
        return request.outcome

    def _check_share(self, source: Hashable, now: float) -> None:
        """Raise Busy if a source has as many waiting requests as its share of the queue allows.

        Every source that has asked lately has the same share, and one share is left to the next
        robot that connects. A source may always have one request in the queue.
        """
        waiting = sum(request.source == source for request in self._queue)
        if waiting == 0:
            return
        active = sum(rhythm.asked > now - _ACTIVE_SECONDS for rhythm in self._rhythms.values())
        if waiting >= (share := self._max_queue // (active + 1)):
            raise Busy(
                f"{waiting} requests of this connection are waiting already; its share of the "
                f"queue is {max(1, share)}. Ask again later."
            )

    @property
    def has_failed(self) -> bool:
        """Whether the inference thread has ended."""
        return self.failure is not None or self._worker.has_ended

    async def wait_failed(self) -> None:
        """Wait until the inference thread has ended; `failure` says why."""
        while self.failure is None:
            if self._worker.has_ended:
                self._fail(RuntimeError("it is not alive"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS_BETWEEN_LOOKS):
                    await self._failed.wait()

    def seconds_in_inference(self) -> float:
        """Return for how long the inference under way has been running, 0 if there is none."""
        began = self._began
        return 0.0 if began is None else time.perf_counter() - began

    def _expire(self, request: _Request) -> None:
        """Answer a request that has waited too long, in the queue or for the inference."""
        if request in self._queue:
            self._queue.remove(request)
        waited = time.perf_counter() - request.arrived
        limit = f"the limit is {self._request_timeout:g} s"
        error = Busy(f"The request has waited {waited:.1f} s for the policy; {limit}.")
        if not request.outcome.done():
            request.outcome.set_result(Outcome(error, 1e3 * waited, 0.0, batch_size=0))

    def forget(self, source: Hashable) -> None:
        """Drop the waiting requests of a connection that is closed."""
        self._rhythms.pop(source, None)
        kept: collections.deque[_Request] = collections.deque()
        for request in self._queue:
            if request.source != source:
                kept.append(request)
            elif request.deadline is not None:
                request.deadline.cancel()
        self._queue = kept
        self._schedule()

    def stop(self, timeout: float) -> bool:
        """Drop the waiting requests; return whether the policy finishes its work in time."""
        self._queue.clear()
        self._schedule()
        if self._worker.has_ended:
            return True
        last = self._worker.submit(lambda: None)
        return bool(concurrent.futures.wait([last], timeout).done)

    def _schedule(self) -> None:
        """Start the next batch, now or when the wait for other robots is over."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._batch or not self._queue:
            return
        if (seconds := self._seconds_to_wait()) > 0:
            self._waiting = self._loop.call_later(seconds, self._start_batch)
        else:
            self._start_batch()

    def _seconds_to_wait(self) -> float:
        # Counted from the first arrival: time spent waiting for the policy is part of it.
        arrived = self._queue[0].arrived
        deadline = min(
            arrived + self._max_wait, max(arrived, self._idle_since) + self._last_seconds
        )
        now = time.perf_counter()
        if len(self._queue) >= self.max_batch or now >= deadline:
            return 0.0
        waiting = {request.source for request in self._queue}
        others_are_due = any(
            # One that is late by more than the wait has changed its rhythm.
            source not in waiting
            and now - self._max_wait < rhythm.replied + rhythm.pause <= deadline
            for source, rhythm in self._rhythms.items()
        )
        return deadline - now if others_are_due else 0.0

    def _start_batch(self) -> None:
        self._waiting = None
        self._batch = self._take_batch()
        self._worker.submit(self._run_batch, self._batch)

    def _fail(self, failure: BaseException) -> None:
        """Answer all requests with an error: the inference thread has ended."""
        self.failure, self._began = failure, None
        error = RuntimeError(f"The inference thread has ended: {failure!r}.")
        waiting, self._batch = [*self._batch, *self._queue], []
        self._queue.clear()
        for request in waiting:
            if request.deadline is not None:
                request.deadline.cancel()
            if not request.outcome.done():
                request.outcome.set_result(Outcome(error, 0.0, 0.0, batch_size=0))
        self._failed.set()

    def _take_batch(self) -> list[_Request]:
        """Take the next requests from the queue: the first of each source, then the second ones."""
        batch, rest = list(self._queue), []
        if len(batch) > self.max_batch:
            numbers: collections.Counter[Hashable] = collections.Counter()
            turns = []
            for request in batch:
                turns.append((numbers[request.source], request))
                numbers[request.source] += 1
            turns.sort(key=lambda turn: turn[0])  # keeps the order of arrival within a turn
            batch = [request for _, request in turns[: self.max_batch]]
            taken = set(map(id, batch))
            rest = [request for request in self._queue if id(request) not in taken]
        self._queue = collections.deque(rest)
        return batch

    def _run_batch(self, batch: list[_Request]) -> None:
        """Called in the inference thread, as `_prepare` and `_infer` are."""
        began = self._began = time.perf_counter()
        # The loop is closed if the server has given up waiting for the policy.
        with contextlib.suppress(RuntimeError):
            try:
                outcomes = self._prepare(batch)
                ready = [request for request in batch if request not in outcomes]
                if ready:
                    outcomes.update(zip(ready, self._infer(ready, began), strict=True))
            except BaseException as error:  # SystemExit, for instance, must not go unseen
                self._loop.call_soon_threadsafe(self._fail, error)
                raise
            self._began = None
            self._loop.call_soon_threadsafe(self._finish_batch, batch, outcomes)

    def _prepare(self, batch: Sequence[_Request]) -> dict[_Request, Outcome]:
        """Prepare every request for the policy; return the outcomes of those that failed."""
        failed: dict[_Request, Outcome] = {}
        if not isinstance(self._policy, PreparingPolicy):
            return failed
        for request in batch:
            began = time.perf_counter()
            try:
                request.observation = self._policy.prepare(request.observation)
            except Exception as error:
                seconds = time.perf_counter() - began
                queue_ms = 1e3 * (began - request.arrived)
                failed[request] = Outcome(error, queue_ms, 1e3 * seconds, batch_size=0)
        return failed

    def _infer(self, batch: Sequence[_Request], began: float) -> list[Outcome]:
        """Return the outcomes of a batch; if it fails as a whole, run each half of it."""
        results: Sequence[Result | Exception]
        self._began = began
        try:
            results = self._policy.infer_batch([request.observation for request in batch])
            if len(results) != len(batch):
                raise RuntimeError(
                    f"The policy returned {len(results)} results for {len(batch)} observations."
                )
        except Exception as error:
            if len(batch) > 1:
                half = len(batch) // 2
                logger.debug("A batch of %d failed; running its halves.", len(batch))
                first = self._infer(batch[:half], time.perf_counter())
                return first + self._infer(batch[half:], time.perf_counter())
            results = [error]
        infer_ms = 1e3 * (time.perf_counter() - began)
        return [
            Outcome(result, 1e3 * (began - request.arrived), infer_ms, len(batch))
            for request, result in zip(batch, results, strict=True)
        ]

    def _finish_batch(
        self, batch: Sequence[_Request], outcomes: Mapping[_Request, Outcome]
    ) -> None:
        self._batch = []
        self._idle_since = time.perf_counter()
        self._last_seconds = max(outcome.infer_ms for outcome in outcomes.values()) / 1e3
        for request in batch:
            if request.deadline is not None:
                request.deadline.cancel()
            if request.source in self._rhythms:
                self._rhythms[request.source].replied = self._idle_since
            result = outcomes[request].result
            if not request.outcome.done():
                request.outcome.set_result(outcomes[request])
            elif isinstance(result, Exception):  # nobody waits for it any more
                drop_frames(result)
        self._schedule()
