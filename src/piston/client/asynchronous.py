"""Brokers that ask for the next chunk while the robot executes the current one.

    step            0   1   2   3   4   5   6   7   8   9
    chunk A         A0  A1  A2  A3  A4  A5
    asked for B                 ^ with the observation of step 3; B0 is meant for step 3
    B arrives                               ^ before step 6: B0, B1, B2 are past
    executed        A0  A1  A2  A3  A4  A5  B3  B4  …

Where B comes later than A lasts, the last action is held. Held steps do not count as passed: the
plan waits with the robot, so that nothing is skipped that the robot has not done.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np

from piston.client.brokers import (
    Policy,
    checked_horizon,
    chunk_of,
    executed_steps,
    one_step,
    reset_policy,
)
from piston.client.errors import TRANSIENT
from piston.client.worker import Worker

logger = logging.getLogger(__name__)


class ChunkExhausted(TimeoutError):
    """All of the chunk is executed and the next has not come. It may: call again."""


@dataclasses.dataclass
class _Plan:
    """A chunk under way."""

    result: Mapping[str, Any]
    actions: np.ndarray
    # Of the chunk: the one to execute next.
    step: int

    @property
    def ahead(self) -> np.ndarray:
        return self.actions[self.step :]


@dataclasses.dataclass(frozen=True)
class _Request:
    """A chunk that is being computed."""

    answer: Future[Mapping[str, Any]]
    # Of the plan under way when it was asked for.
    step: int
    # Calls of `infer` until then.
    call: int


class AsyncChunkBroker:
    """Ask for the next chunk once `execute_horizon` steps of this one are executed; do not wait.

    `execute_horizon` is half of a chunk by default; the rest must outlast the policy. Only the
    first call of an episode waits. Where the next chunk is late, the last action is repeated with
    `held` in the result (`when_exhausted="hold"`), or ChunkExhausted is raised.

    An error of the policy is raised by the next call; an error that may pass (connection, timeout,
    busy) only when the chunk is used up, and the policy is asked again meanwhile.
    """

    def __init__(
        self,
        policy: Policy,
        execute_horizon: int | None = None,
        *,
        when_exhausted: Literal["hold", "raise"] = "hold",
    ) -> None:
        if when_exhausted not in ("hold", "raise"):
            raise ValueError(f"when_exhausted is 'hold' or 'raise'; found {when_exhausted!r}.")
        self._policy = policy
        self._execute_horizon = checked_horizon(execute_horizon)
        self._when_exhausted = when_exhausted
        self._worker = Worker("piston chunks")
        self._plan: _Plan | None = None
        self._request: _Request | None = None
        self._num_calls = 0
        # Since construction: steps without an action of their own, and requests that failed.
        self.num_held = 0
        self.num_failures = 0

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        self._num_calls += 1
        self._take_answer()
        if self._plan is None:
            self._plan = self._first_plan(observation)
        elif self._request is None and self._plan.step >= self._steps_before_asking(self._plan):
            self._request = self._ask(observation, self._plan)
        return self._next_action(self._plan)

    def reset(self) -> None:
        """Forget the chunk, and the one being computed: a new episode begins."""
        if self._request is not None:
            self._request.answer.cancel()
        self._plan = self._request = None
        # In the worker, so that the policy never does two things at once.
        self._worker.submit(reset_policy, self._policy).result()

    def _first_plan(self, observation: Mapping[str, Any]) -> _Plan:
        result = self._worker.submit(self._policy.infer, observation).result()
        return _Plan(result, chunk_of(result), step=0)

    def _steps_before_asking(self, plan: _Plan) -> int:
        if self._execute_horizon is None:
            return max(1, len(plan.actions) // 2)
        return executed_steps(plan.actions, self._execute_horizon)

    def _ask(self, observation: Mapping[str, Any], plan: _Plan) -> _Request:
        # A robot may use its buffers again while this request is still being packed.
        request = self._prepared(_copied(observation), plan)
        answer = self._worker.submit(self._policy.infer, request)
        return _Request(answer, step=plan.step, call=self._num_calls)

    def _prepared(self, observation: Mapping[str, Any], plan: _Plan) -> Mapping[str, Any]:
        """What to send with a plan under way."""
        del plan
        return observation

    def _take_answer(self) -> None:
        """Go over to the next chunk if it has come."""
        request, plan = self._request, self._plan
        if request is None or plan is None or not request.answer.done():
            return
        self._request = None
        try:
            result = request.answer.result()
        except TRANSIENT as error:
            self.num_failures += 1
            if len(plan.ahead) == 0:
                raise
            logger.warning("No new chunk (%d actions are left): %s", len(plan.ahead), error)
            return
        self._plan = _Plan(result, chunk_of(result), step=plan.step - request.step)
        self._measure(request)

    def _measure(self, request: _Request) -> None:
        """Called when the answer to a request is taken."""

    def _next_action(self, plan: _Plan) -> dict[str, Any]:
        if len(plan.ahead) > 0:
            plan.step += 1
            return one_step(plan.result, plan.step - 1)
        self.num_held += 1
        if self._when_exhausted == "raise":
            raise ChunkExhausted(
                f"All {len(plan.actions)} actions are executed and the next chunk has not come. "
                "Ask earlier (a smaller execute_horizon), or slow down."
            )
        return {**one_step(plan.result, len(plan.actions) - 1), "held": True}


class RealTimeBroker(AsyncChunkBroker):
    """Real-time chunking: the next chunk continues what is executed while it is computed.

    Each request carries `rtc`: the actions still ahead (`previous_chunk`, beginning with this
    step's), how many of them will be executed before the answer comes (`delay`), and how many steps
    of the chunk are past (`execute_horizon`). The server's policy then makes the next chunk agree:
    in its first `delay` actions fully, in the following ones less and less. It must know how.

    The delay is estimated as the largest of the last `delay_window` measured ones, or their
    `delay_quantile`. Before there are any it is `initial_delay`: by default all that is ahead.
    """

    def __init__(
        self,
        policy: Policy,
        execute_horizon: int | None = None,
        *,
        initial_delay: int | None = None,
        delay_window: int = 10,
        delay_quantile: float = 1.0,
        when_exhausted: Literal["hold", "raise"] = "hold",
    ) -> None:
        if delay_window < 1 or not 0 <= delay_quantile <= 1:
            raise ValueError(
                f"delay_window is 1 or more and delay_quantile within 0 … 1; found {delay_window} "
                f"and {delay_quantile}."
            )
        super().__init__(policy, execute_horizon, when_exhausted=when_exhausted)
        self._initial_delay = initial_delay
        self._quantile = delay_quantile
        self._delays: collections.deque[int] = collections.deque(maxlen=delay_window)

    @property
    def delay(self) -> int | None:
        """Control steps that a request is expected to take; None before it is known."""
        if not self._delays:
            return self._initial_delay
        ordered = sorted(self._delays)
        return ordered[max(0, math.ceil(self._quantile * len(ordered)) - 1)]

    def _prepared(self, observation: Mapping[str, Any], plan: _Plan) -> Mapping[str, Any]:
        ahead = plan.ahead
        if len(ahead) == 0:
            return observation
        delay = len(ahead) if self.delay is None else min(self.delay, len(ahead))
        rtc = {"previous_chunk": ahead, "delay": delay, "execute_horizon": plan.step}
        return {**observation, "rtc": rtc}

    def _measure(self, request: _Request) -> None:
        self._delays.append(self._num_calls - request.call)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value
