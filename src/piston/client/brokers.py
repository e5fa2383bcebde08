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
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import numpy as np

from piston.client.client import TRANSIENT
from piston.client.worker import Worker

logger = logging.getLogger(__name__)


class Policy(Protocol):
    """A `Client`, or a policy in this process."""

    def infer(self, observation: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Return a result with `actions` (horizon, dim)."""


class ChunkExhausted(TimeoutError):
    """The whole chunk is executed and the next has not arrived. It may: call again."""


class ActionChunkBroker:
    """Execute the first `execute_horizon` steps of a chunk (all of them by default), then ask."""

    def __init__(self, policy: Policy, execute_horizon: int | None = None) -> None:
        self._policy = policy
        self._execute_horizon = _checked_horizon(execute_horizon)
        self._result: Mapping[str, Any] = {}
        self._step = 0
        self._num_steps = 0

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        if self._step >= self._num_steps:
            self._result = self._policy.infer(observation)
            chunk = _chunk(self._result)
            self._num_steps = _checked_horizon(self._execute_horizon, chunk) or len(chunk)
            self._step = 0
        self._step += 1
        return _one_step(self._result, self._step - 1)

    def reset(self) -> None:
        """Forget the chunk: a new episode begins."""
        _reset_of(self._policy)()
        self._step = self._num_steps = 0


class TemporalEnsemble:
    """Average what all chunks so far predict for this step, as ACT does.

    The policy is asked every `ask_every` steps. A chunk's weight is exp(−decay · i), where i counts
    the chunks that contain this step from the oldest (0). With `decay` > 0 older chunks weigh
    more: the motion is smoother but reacts later. With `decay` < 0 newer ones do.
    """

    def __init__(self, policy: Policy, decay: float = 0.01, ask_every: int = 1) -> None:
        if ask_every < 1:
            raise ValueError(f"ask_every is a number of steps, 1 or more; found {ask_every}.")
        self._policy = policy
        self._decay = decay
        self._ask_every = ask_every
        self._chunks: list[tuple[int, np.ndarray]] = []  # first step, actions
        self._result: Mapping[str, Any] = {}
        self._step = 0

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        step = self._step
        if step % self._ask_every == 0:
            self._result = self._policy.infer(observation)
            self._chunks.append((step, _chunk(self._result)))
        self._chunks = [
            (start, chunk) for start, chunk in self._chunks if step - start < len(chunk)
        ]
        if not self._chunks:
            raise ValueError(
                f"No chunk reaches step {step}: the policy's chunks are shorter than ask_every = "
                f"{self._ask_every}."
            )
        predicted = np.stack([chunk[step - start] for start, chunk in self._chunks])
        weights = np.exp(-self._decay * np.arange(len(predicted)))
        action = (weights / weights.sum()) @ predicted.astype(np.float64)
        self._step += 1
        newest = step - self._chunks[-1][0]
        return {**self._result, "actions": action.astype(predicted.dtype), "chunk_step": newest}

    def reset(self) -> None:
        """Forget all chunks: a new episode begins."""
        _reset_of(self._policy)()
        self._chunks = []
        self._step = 0


@dataclasses.dataclass
class _Plan:
    """The chunk that is being executed."""

    result: Mapping[str, Any]
    actions: np.ndarray
    step: int  # of the chunk: the one to execute next


@dataclasses.dataclass(frozen=True)
class _Request:
    """A chunk that is being computed."""

    answer: Future[Mapping[str, Any]]
    step: int  # of the plan, when the chunk was asked for
    call: int  # calls of `infer` until then


class AsyncChunkBroker:
    """Ask for the next chunk once `execute_horizon` steps of this one are executed; do not wait.

    `execute_horizon` is half of a chunk by default; the rest must last until the policy answers.
    Only the first call of an episode waits. If the next chunk is late, the last action is repeated
    with `held` in the result (`when_exhausted="hold"`), or ChunkExhausted is raised.

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
        self._execute_horizon = _checked_horizon(execute_horizon)
        self._when_exhausted = when_exhausted
        self._worker = Worker("piston chunks")
        self._plan: _Plan | None = None
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
            result = self._worker.submit(self._policy.infer, observation).result()
            plan = self._plan = _Plan(result, _chunk(result), step=0)
        elif self._request is None:
            half = max(1, len(plan.actions) // 2)
            if plan.step >= (_checked_horizon(self._execute_horizon, plan.actions) or half):
                # Copied: a robot may reuse its buffers while this request is still being packed.
                request = self._prepare(_copied(observation), plan)
                answer = self._worker.submit(self._policy.infer, request)
                self._request = _Request(answer, plan.step, self._num_calls)
        if plan.step < len(plan.actions):
            plan.step += 1
            return _one_step(plan.result, plan.step - 1)
        self.num_held += 1
        if self._when_exhausted == "raise":
            raise ChunkExhausted(
                f"All {len(plan.actions)} actions are executed and the next chunk has not arrived. "
                "Ask earlier (a smaller execute_horizon), or slow down."
            )
        return {**_one_step(plan.result, len(plan.actions) - 1), "held": True}

    def reset(self) -> None:
        """Forget the chunk, and the one being computed: a new episode begins."""
        if self._request is not None:
            self._request.answer.cancel()
        self._plan = self._request = None
        # In the worker, so that the policy never does two things at once.
        self._worker.submit(_reset_of(self._policy)).result()

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
            num_left = len(plan.actions) - plan.step
            if num_left == 0:
                raise
            logger.warning("No new chunk (%d actions are left): %s", num_left, error)
            return
        self._plan = _Plan(result, _chunk(result), step=plan.step - request.step)
        self._delays.append(self._num_calls - request.call)


class RealTimeBroker(AsyncChunkBroker):
    """Real-time chunking: the next chunk continues what is executed while it is computed.

    Each request carries `rtc`: the actions still ahead (`previous_chunk`, beginning with this
    step's), how many of them will be executed before the answer arrives (`delay`), and how many
    steps of the chunk are past (`execute_horizon`). A policy that supports it makes the next chunk
    agree: in its first `delay` actions fully, in the following ones less and less.

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
        self._delays = collections.deque(maxlen=delay_window)

    @property
    def delay(self) -> int | None:
        """Control steps that a request is expected to take; None before it is known."""
        if not self._delays:
            return self._initial_delay
        ordered = sorted(self._delays)
        return ordered[max(0, math.ceil(self._quantile * len(ordered)) - 1)]

    def _prepare(self, observation: Mapping[str, Any], plan: _Plan) -> Mapping[str, Any]:
        ahead = plan.actions[plan.step :]
        if len(ahead) == 0:
            return observation
        delay = len(ahead) if self.delay is None else min(self.delay, len(ahead))
        rtc = {"previous_chunk": ahead, "delay": delay, "execute_horizon": plan.step}
        return {**observation, "rtc": rtc}


def checked_actions(result: Mapping[str, Any], ndim: int, expected: str) -> np.ndarray:
    """Return the actions of a result; raise ValueError if they must not be executed."""
    if "actions" not in result:
        raise ValueError(f"The result has no 'actions'; found {sorted(result)}.")
    actions = np.asarray(result["actions"])
    if actions.ndim != ndim or len(actions) == 0:
        raise ValueError(f"The actions have shape {actions.shape}; expected {expected}.")
    if not np.isfinite(actions).all():
        raise ValueError("The actions are not finite numbers; they are not executed.")
    return actions


_chunk = functools.partial(checked_actions, ndim=2, expected="a chunk (horizon, dim)")


def _checked_horizon(execute_horizon: int | None, chunk: np.ndarray | None = None) -> int | None:
    if execute_horizon is None:
        return None
    if execute_horizon < 1:
        raise ValueError(f"execute_horizon is 1 or more; found {execute_horizon}.")
    if chunk is not None and execute_horizon > len(chunk):
        raise ValueError(
            f"execute_horizon is {execute_horizon}, but the policy's chunks have {len(chunk)} "
            "steps. Choose one no longer."
        )
    return execute_horizon


def _one_step(result: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return one action of a chunk, as a copy, with everything else in the policy's result."""
    return {**result, "actions": np.array(result["actions"][step]), "chunk_step": step}


def _reset_of(policy: Any) -> Callable[[], None]:
    """Return the policy's `reset`; a policy without state between requests needs none."""
    return getattr(policy, "reset", lambda: None)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value
