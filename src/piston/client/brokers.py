"""Brokers: from chunks of actions to the one action to execute at this control step.

A broker wraps anything with `infer(observation) -> {"actions": (horizon, dim), …}` and has the same
method, which returns one action (dim,): call it once per control step. `chunk_step` in the result
is the action's step within its chunk. `ActionChunkBroker` and `TemporalEnsemble` ask and wait;
`AsyncChunkBroker` and `RealTimeBroker` ask for the next chunk while the robot executes this one:

    step            0   1   2   3   4   5   6   7   8   9
    chunk A         A0  A1  A2  A3  A4  A5
    asked for B                 ^ with the observation of step 3; B0 is meant for step 3
    B arrives                               ^ before step 6: B0, B1, B2 are past
    executed        A0  A1  A2  A3  A4  A5  B3  B4  …

If B arrives after the end of A, the last action is held. Held steps do not count as executed, so no
action is skipped that the robot has not done.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import math
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import numpy as np

from piston.client.client import TRANSIENT
from piston.client.limits import checked_actions
from piston.client.worker import Worker

logger = logging.getLogger(__name__)


class Policy(Protocol):
    """A `Client`, or a policy in this process."""

    def infer(self, observation: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Return a result with `actions` (horizon, dim)."""


class ChunkExhausted(TimeoutError):
    """The whole chunk is executed and the next has not arrived. It may: call again."""


class _Plan:
    """A chunk that is being executed; the next one is asked for after `horizon` steps of it.

    `before` is the plan before it in the episode: the dimension of the actions must not change.
    """

    def __init__(
        self,
        result: Mapping[str, Any],
        execute_horizon: int | None,
        default: float,
        step: int = 0,
        *,
        before: _Plan | None,
    ) -> None:
        self.result = result
        dim = None if before is None else before.actions.shape[1]
        self.actions: np.ndarray = checked_actions(result, 2, "a chunk (horizon, dim)", dim)
        self.step = min(step, len(self.actions))  # the one to execute next
        self.horizon = execute_horizon or max(1, int(default * len(self.actions)))
        if self.horizon > len(self.actions):
            raise ValueError(
                f"execute_horizon is {execute_horizon}, but the policy's chunks have "
                f"{len(self.actions)} steps. Choose one no longer."
            )

    @property
    def ahead(self) -> np.ndarray:
        return self.actions[self.step :]

    def next_step(self) -> dict[str, Any]:
        """Return the next action, or the last one as held, with the rest of the policy's result."""
        held = {} if len(self.ahead) else {"held": True}
        step = min(self.step, len(self.actions) - 1)
        self.step = step + 1
        return {**self.result, "actions": self.actions[step].copy(), "chunk_step": step, **held}


@dataclasses.dataclass(eq=False, repr=False)
class ActionChunkBroker:
    """Execute the first `execute_horizon` steps of a chunk (all of them by default), then ask."""

    policy: Policy
    execute_horizon: int | None = None

    def __post_init__(self) -> None:
        if self.execute_horizon is not None and self.execute_horizon < 1:
            raise ValueError(f"execute_horizon is 1 or more; found {self.execute_horizon}.")
        self._plan: _Plan | None = None

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        if self._plan is None or self._plan.step >= self._plan.horizon:
            result = self.policy.infer(observation)
            self._plan = _Plan(result, self.execute_horizon, 1.0, before=self._plan)
        return self._plan.next_step()

    def reset(self) -> None:
        """Forget the chunk: a new episode begins."""
        self._plan = None
        # A policy without state between requests needs no `reset`.
        getattr(self.policy, "reset", lambda: None)()


@dataclasses.dataclass(eq=False, repr=False)
class TemporalEnsemble:
    """Average what all chunks so far predict for this step, as ACT does.

    The policy is asked every `ask_every` steps. A chunk's weight is exp(−decay · i), where i counts
    the chunks that contain this step from the oldest (0). With `decay` > 0 older chunks weigh
    more: the motion is smoother but reacts later. With `decay` < 0 newer ones do.
    """

    policy: Policy
    decay: float = 0.01
    ask_every: int = 1

    def __post_init__(self) -> None:
        if self.ask_every < 1:
            raise ValueError(f"ask_every is a number of steps, 1 or more; found {self.ask_every}.")
        self._plans: list[_Plan] = []  # those that reach this step, the oldest first
        self._step = 0

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        if self._step % self.ask_every == 0:
            before = self._plans[-1] if self._plans else None
            self._plans.append(_Plan(self.policy.infer(observation), None, 1.0, before=before))
        self._plans = [plan for plan in self._plans if len(plan.ahead)]
        if not self._plans:
            raise ValueError(
                f"No chunk reaches step {self._step}: the policy's chunks are shorter than "
                f"ask_every = {self.ask_every}."
            )
        self._step += 1
        steps = [plan.next_step() for plan in self._plans]
        predicted = np.stack([step["actions"] for step in steps])
        weights = np.exp(-self.decay * np.arange(len(predicted)))
        action = (weights / weights.sum()) @ predicted.astype(np.float64)
        return {**steps[-1], "actions": action.astype(predicted.dtype)}

    def reset(self) -> None:
        """Forget all chunks: a new episode begins."""
        self._plans = []
        self._step = 0
        getattr(self.policy, "reset", lambda: None)()


@dataclasses.dataclass(frozen=True)
class _Request:
    """A chunk that is being computed."""

    answer: Future[Mapping[str, Any]]
    step: int  # of the plan, when the chunk was asked for
    call: int  # calls of `infer` until then


@dataclasses.dataclass(eq=False, repr=False)
class AsyncChunkBroker(ActionChunkBroker):
    """Ask for the next chunk once `execute_horizon` steps of this one are executed; do not wait.

    `execute_horizon` is half of a chunk by default; the rest must last until the policy answers.
    Only the first call of an episode waits. If the next chunk is late, the last action is repeated
    with `held` in the result (`when_exhausted="hold"`), or ChunkExhausted is raised.

    An error of the policy is raised by the next call; an error that may pass (connection, timeout,
    busy) only when the chunk is used up, and the policy is asked again meanwhile.
    """

    _: dataclasses.KW_ONLY
    when_exhausted: Literal["hold", "raise"] = "hold"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.when_exhausted not in ("hold", "raise"):
            raise ValueError(f"when_exhausted is 'hold' or 'raise'; found {self.when_exhausted!r}.")
        self._worker = Worker("piston chunks")
        self._request: _Request | None = None
        self._num_calls = 0
        # Calls of `infer` between the last requests and their answers.
        self._delays: collections.deque[int] = collections.deque(maxlen=10)
        # Since construction: steps without an action of their own, and requests that failed.
        self.num_held = 0
        self.num_failures = 0

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        self._num_calls += 1
        self._take_answer()
        plan = self._plan
        if plan is None:
            result = self._worker.submit(self.policy.infer, observation).result()
            plan = self._plan = _Plan(result, self.execute_horizon, 0.5, before=None)
        elif self._request is None and plan.step >= plan.horizon:
            # Copied: a robot may reuse its buffers while this request is still being packed.
            request = self._prepare(copy.deepcopy(dict(observation)), plan)
            answer = self._worker.submit(self.policy.infer, request)
            self._request = _Request(answer, plan.step, self._num_calls)
        is_exhausted = len(plan.ahead) == 0
        self.num_held += is_exhausted
        if is_exhausted and self.when_exhausted == "raise":
            raise ChunkExhausted(
                f"All {len(plan.actions)} actions are executed and the next chunk has not arrived. "
                "Ask earlier (a smaller execute_horizon), or slow down."
            )
        return plan.next_step()

    def reset(self) -> None:
        """Forget the chunk, and the one being computed: a new episode begins."""
        if self._request is not None:
            self._request.answer.cancel()
        self._request = None
        # In the worker, so that the policy never does two things at once.
        self._worker.submit(super().reset).result()

    def _prepare(self, observation: Mapping[str, Any], plan: _Plan) -> Mapping[str, Any]:  # noqa: ARG002
        """Return what to send while a plan is executed."""
        return observation

    def _take_answer(self) -> None:
        """Switch to the next chunk if it has arrived."""
        request, plan = self._request, self._plan
        if request is None or plan is None or not request.answer.done():
            return
        self._request = None
        try:
            result = request.answer.result()
        except TRANSIENT as error:
            self.num_failures += 1
            if not len(plan.ahead):
                raise
            logger.warning("No new chunk (%d actions are left): %s", len(plan.ahead), error)
            return
        step = plan.step - request.step
        self._plan = _Plan(result, self.execute_horizon, 0.5, step, before=plan)
        self._delays.append(self._num_calls - request.call)


@dataclasses.dataclass(eq=False, repr=False)
class RealTimeBroker(AsyncChunkBroker):
    """Real-time chunking: the next chunk continues what is executed while it is computed.

    Each request carries `rtc`: the actions still ahead (`previous_chunk`, beginning with this
    step's), how many of them will be executed before the answer arrives (`delay`), and how many
    steps of the chunk are past (`execute_horizon`). A policy that supports it makes the next chunk
    agree: in its first `delay` actions fully, in the following ones less and less.

    The delay is estimated as the largest of the last `delay_window` measured ones, or their
    `delay_quantile`. Before there are any it is `initial_delay`: by default all that is ahead.
    """

    _: dataclasses.KW_ONLY
    initial_delay: int | None = None
    delay_window: int = 10
    delay_quantile: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay_window < 1 or not 0 <= self.delay_quantile <= 1:
            raise ValueError(
                f"delay_window is 1 or more and delay_quantile within 0 … 1; found "
                f"{self.delay_window} and {self.delay_quantile}."
            )
        self._delays = collections.deque(maxlen=self.delay_window)

    @property
    def delay(self) -> int | None:
        """Control steps that a request is expected to take; None before it is known."""
        if not self._delays:
            return self.initial_delay
        ordered = sorted(self._delays)
        return ordered[max(0, math.ceil(self.delay_quantile * len(ordered)) - 1)]

    def _prepare(self, observation: Mapping[str, Any], plan: _Plan) -> Mapping[str, Any]:
        if (num_ahead := len(plan.ahead)) == 0:
            return observation
        delay = num_ahead if self.delay is None else min(self.delay, num_ahead)
        rtc = {"previous_chunk": plan.ahead, "delay": delay, "execute_horizon": plan.step}
        return {**observation, "rtc": rtc}
