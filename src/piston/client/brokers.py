"""From chunks to single actions: what to execute at this control step.

A broker wraps anything with `infer(observation) -> {"actions": (horizon, dim), …}` and has the same
method, which gives one action (dim,): call it once per control step. `chunk_step` in the result
says which step of its chunk the action is. The brokers here ask and wait; those in `asynchronous`
ask while the robot moves. None of them knows of sockets or of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class Policy(Protocol):
    """A `Client`, or a policy in this process."""

    def infer(self, observation: Mapping[str, Any], /) -> Mapping[str, Any]:
        """A result with `actions` (horizon, dim)."""
        ...


class ActionChunkBroker:
    """Execute the first `execute_horizon` steps of a chunk (all of them by default), then ask."""

    def __init__(self, policy: Policy, execute_horizon: int | None = None) -> None:
        self._policy = policy
        self._execute_horizon = checked_horizon(execute_horizon)
        self._result: Mapping[str, Any] = {}
        self._step = 0
        self._num_steps = 0

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        if self._step >= self._num_steps:
            self._result = self._policy.infer(observation)
            self._num_steps = executed_steps(chunk_of(self._result), self._execute_horizon)
            self._step = 0
        self._step += 1
        return one_step(self._result, self._step - 1)

    def reset(self) -> None:
        """Forget the chunk: a new episode begins."""
        reset_policy(self._policy)
        self._step = self._num_steps = 0


class TemporalEnsemble:
    """Average what all chunks so far say of this step, as ACT does.

    The policy is asked every `ask_every` steps. A chunk's weight is exp(−decay · i), where i counts
    the chunks that speak of this step from the oldest (0). With `decay` > 0 older chunks weigh
    more: the motion is smoother but reacts later. With `decay` < 0 newer ones do.
    """

    def __init__(self, policy: Policy, decay: float = 0.01, ask_every: int = 1) -> None:
        if ask_every < 1:
            raise ValueError(f"ask_every is a number of steps, 1 or more; found {ask_every}.")
        self._policy = policy
        self._decay = decay
        self._ask_every = ask_every
        self._chunks: list[tuple[int, np.ndarray]] = []  # the step it begins at, its actions
        self._result: Mapping[str, Any] = {}
        self._step = 0

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        if self._step % self._ask_every == 0:
            self._result = self._policy.infer(observation)
            self._chunks.append((self._step, chunk_of(self._result)))
        step = self._step
        self._chunks = [
            (start, chunk) for start, chunk in self._chunks if step - start < len(chunk)
        ]
        if not self._chunks:
            raise ValueError(
                f"No chunk reaches step {step}: the policy's are shorter than ask_every = "
                f"{self._ask_every}."
            )
        said = np.stack([chunk[step - start] for start, chunk in self._chunks])
        weights = np.exp(-self._decay * np.arange(len(said)))
        action = (weights / weights.sum()) @ said.astype(np.float64)
        self._step += 1
        newest = step - self._chunks[-1][0]
        return {**self._result, "actions": action.astype(said.dtype), "chunk_step": newest}

    def reset(self) -> None:
        """Forget all chunks: a new episode begins."""
        reset_policy(self._policy)
        self._chunks = []
        self._step = 0


def chunk_of(result: Mapping[str, Any]) -> np.ndarray:
    """The chunk (horizon, dim) in a policy's result; refuses what must not reach a robot."""
    if "actions" not in result:
        raise ValueError(f"The policy's result has no 'actions'; found {sorted(result)}.")
    actions = np.asarray(result["actions"])
    if actions.ndim != 2 or len(actions) == 0:
        raise ValueError(
            f"The policy's actions have shape {actions.shape}; expected a chunk (horizon, dim)."
        )
    if not np.isfinite(actions).all():
        raise ValueError("The policy's actions are not all finite numbers; they are not executed.")
    return actions


def checked_horizon(execute_horizon: int | None) -> int | None:
    if execute_horizon is not None and execute_horizon < 1:
        raise ValueError(f"execute_horizon is 1 or more; found {execute_horizon}.")
    return execute_horizon


def executed_steps(chunk: np.ndarray, execute_horizon: int | None) -> int:
    """How many of a chunk's steps to execute before asking again."""
    if execute_horizon is None:
        return len(chunk)
    if execute_horizon > len(chunk):
        raise ValueError(
            f"execute_horizon is {execute_horizon}, but the policy's chunks have {len(chunk)} "
            "steps. Choose one no longer."
        )
    return execute_horizon


def one_step(result: Mapping[str, Any], step: int) -> dict[str, Any]:
    """A chunk's step, and whatever else the policy said; the action is the caller's own."""
    action = np.array(result["actions"][step])
    return {**result, "actions": action, "chunk_step": step}


def reset_policy(policy: Any) -> None:
    reset = getattr(policy, "reset", None)
    if reset is not None:
        reset()
