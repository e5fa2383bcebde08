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
import statistics
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from piston_client.client import TRANSIENT
from piston_client.codec import EXECUTED_STEPS
from piston_client.limits import checked_actions, metadata_of
from piston_client.worker import Worker

logger = logging.getLogger(__name__)

# The expected delay of a request is the largest of as many measured ones.
_NUM_DELAYS = 10


class Policy(Protocol):
    """A `Client`, or a policy in this process."""

    def infer(self, observation: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Return a result with `actions` (horizon, dim)."""


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


def _with_executed(observation: Mapping[str, Any], plan: _Plan | None) -> dict[str, Any]:
    """Return a request that says how many steps of the chunk before it are past."""
    return {**observation, EXECUTED_STEPS: 0 if plan is None else plan.step}


class ActionChunkBroker:
    """Execute the first `execute_horizon` steps of a chunk (all of them by default), then ask."""

    # The part of a chunk that is executed if `execute_horizon` is not given.
    default_share: ClassVar[float] = 1.0

    def __init__(self, policy: Policy, execute_horizon: int | None = None) -> None:
        if execute_horizon is not None and execute_horizon < 1:
            raise ValueError(f"execute_horizon is 1 or more; found {execute_horizon}.")
        self.policy = policy
        self.execute_horizon = execute_horizon
        self._plan: _Plan | None = None

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        if self._plan is None or self._plan.step >= self._plan.horizon:
            result = self.policy.infer(_with_executed(observation, self._plan))
            self._plan = _Plan(result, self.execute_horizon, self.default_share, before=self._plan)
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
            result = self.policy.infer(_with_executed(observation, before))
            self._plans.append(_Plan(result, None, 1.0, before=before))
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
    time: int  # control steps until then


class AsyncChunkBroker(ActionChunkBroker):
    """Ask for the next chunk once `execute_horizon` steps of this one are executed; do not wait.

    `execute_horizon` is half of a chunk by default; the rest must last until the policy answers. If
    answers took longer than that lately, the next is asked for earlier. Only the first call of an
    episode waits. If the next chunk is late, the last action is repeated with `held` in the result.

    An error of the policy is raised by the next call; an error that may pass (connection, timeout,
    busy) only when the chunk is used up, and the policy is asked again meanwhile.

    `infer` is `ask` and then `act`. A policy that has `submit(observation) -> Future` computes
    where it likes; any other is called in a thread.
    """

    default_share: ClassVar[float] = 0.5

    def __init__(self, policy: Policy, execute_horizon: int | None = None) -> None:
        super().__init__(policy, execute_horizon)
        self._worker = Worker("piston chunks")
        self._request: _Request | None = None
        self._time = 0
        # Control steps between the last requests and their answers.
        self._delays: collections.deque[int] = collections.deque(maxlen=_NUM_DELAYS)
        # Since construction: steps without an action of their own, and requests that failed.
        self.num_held = 0
        self.num_failures = 0

    @property
    def delay(self) -> int | None:
        """Control steps that the slowest of the last requests took; None before there is any."""
        return max(self._delays, default=None)

    @property
    def median_delay(self) -> int | None:
        """Control steps that half of the last requests took at most; None before there is any."""
        return statistics.median_low(self._delays) if self._delays else None

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        self.ask(observation)
        return self.act()

    @property
    def is_due(self) -> bool:
        """Whether the next call of `ask` or `infer` needs its observation."""
        self._take_answer()
        plan = self._plan
        if plan is None or self._request is not None:
            return plan is None
        # What is ahead must last until the answer comes.
        return plan.step >= plan.horizon or len(plan.ahead) <= (self.delay or 0)

    def ask(self, observation: Mapping[str, Any]) -> None:
        """Ask for the next chunk if it is time to; call this once per control step."""
        if not self.is_due:
            return
        plan = self._plan
        # Copied: a robot may reuse its buffers while this request is still being packed.
        request = self._prepare(copy.deepcopy(dict(observation)), plan)
        submit = getattr(self.policy, "submit", None)
        if submit is not None:
            answer = submit(request)
        else:
            answer = self._worker.submit(self.policy.infer, request)
        self._request = _Request(answer, 0 if plan is None else plan.step, self._time)

    def act(self) -> dict[str, Any]:
        """Return the action of this control step; waits only at the start of an episode."""
        self._take_answer(wait=self._plan is None)
        plan = self._plan
        if plan is None:
            raise ValueError("There is no chunk yet: call ask(observation) first.")
        self._time += 1
        self.num_held += len(plan.ahead) == 0
        return plan.next_step()

    def reset(self) -> None:
        """Forget the chunk, and the one being computed: a new episode begins."""
        if self._request is not None:
            self._request.answer.cancel()
        self._request = None
        # In the worker, so that the policy never does two things at once.
        self._worker.submit(super().reset).result()

    def _prepare(self, observation: dict[str, Any], plan: _Plan | None) -> dict[str, Any]:
        """Return what to send while a plan is executed; None: at the start of an episode."""
        return _with_executed(observation, plan)

    def _take_answer(self, wait: bool = False) -> None:
        """Switch to the next chunk if it has arrived, from the step that is next to execute."""
        request, plan = self._request, self._plan
        if request is None or not (wait or request.answer.done()):
            return
        try:
            result = request.answer.result()
        except TRANSIENT as error:
            self._request = None
            if plan is None:
                raise
            self.num_failures += 1
            if not len(plan.ahead):
                raise
            logger.warning("No new chunk (%d actions are left): %s", len(plan.ahead), error)
            return
        except BaseException:
            self._request = None
            raise
        self._request = None
        step = 0 if plan is None else plan.step - request.step
        new = _Plan(result, self.execute_horizon, self.default_share, step, before=plan)
        if plan is not None:
            self._delays.append(self._time - request.time)
            if not len(new.ahead):
                logger.warning("A chunk came after all its %d steps had passed.", step)
                return
        self._plan = new


class RealTimeBroker(AsyncChunkBroker):
    """Real-time chunking: the next chunk continues what is executed while it is computed.

    Each request carries `rtc`: the actions still ahead (`previous_chunk`, beginning with this
    step's), how many of them will be executed before the answer arrives (`delay`), how many steps
    of the chunk are past (`execute_horizon`), and the `kind`. A `trained` policy continues the
    first `delay` actions as it was trained to (`piston train --max-delay`). Any other flow policy
    is `guided`: its chunk agrees in these actions, and in the following ones less and less.

    The kind is `trained` if the policy's metadata say that it can be, else `guided`. While answers
    take longer than the policy was trained for, requests are guided, with a warning; if the kind is
    given as `trained`, they are an error.

    Before a delay is measured it is `initial_delay`: by default all that is ahead, or the longest
    that the policy was trained for.
    """

    def __init__(
        self,
        policy: Policy,
        execute_horizon: int | None = None,
        *,
        initial_delay: int | None = None,
        kind: Literal["trained", "guided"] | None = None,
    ) -> None:
        super().__init__(policy, execute_horizon)
        if kind not in (None, "trained", "guided"):
            raise ValueError(f"kind is 'trained', 'guided' or None; found {kind!r}.")
        self.initial_delay = initial_delay
        self.kind = kind
        self._has_warned = False

    @property
    def delay(self) -> int | None:
        measured = super().delay
        return self.initial_delay if measured is None else measured

    def _prepare(self, observation: dict[str, Any], plan: _Plan | None) -> dict[str, Any]:
        num_ahead = 0 if plan is None else len(plan.ahead)
        kind, longest = self._kind(num_ahead)  # raises at once if the policy cannot do it
        observation = super()._prepare(observation, plan)
        if plan is None or num_ahead == 0 or kind == "none":
            return observation
        # A chunk that came late may be at its first step: some step of it has to be executed.
        executed = max(1, plan.step)
        delay = longest if self.delay is None else self.delay
        delay = min(delay, num_ahead, len(plan.actions) - executed)
        rtc = {"previous_chunk": plan.ahead, "delay": delay, "execute_horizon": executed}
        if kind is not None:
            rtc["kind"] = kind
        return {**observation, "rtc": rtc}

    def _kind(self, num_ahead: int) -> tuple[str | None, int]:
        """Return the kind of the next request, and the longest delay that it can be for.

        None: the server has to decide; "none": no kind can be asked for.
        """
        about = (metadata_of(self.policy) or {}).get("rtc", {})
        kinds = about.get("kinds")
        if kinds is None:  # a server that does not tell what it can do
            return self.kind, num_ahead
        if not kinds or self.kind not in (None, *kinds):
            can = " or ".join(kinds) if kinds else "none at all"
            raise ValueError(
                f"Real-time chunking of kind {self.kind or 'guided'!r} is not possible with this "
                f"policy: it can do {can}. Use AsyncChunkBroker (--execution async), or train with "
                "--max-delay."
            )
        if "trained" not in kinds or self.kind == "guided":
            return "guided", num_ahead
        longest = int(about["max_delay"])
        if self.delay is None or self.delay <= longest:
            return "trained", longest
        message = (
            f"Answers take {self.delay} control steps, but the policy was trained for delays of at "
            f"most {longest} (--max-delay)."
        )
        if self.kind == "trained":
            raise ValueError(f"{message} Make inference faster, or train for longer delays.")
        instead = "guided" if "guided" in kinds else "none"
        if not self._has_warned:
            self._has_warned = True
            done = "guided instead" if instead == "guided" else "made without real-time chunking"
            logger.warning("%s Such requests are %s.", message, done)
        return instead, num_ahead
