"""What must hold for an action before it reaches a robot.

Brokers and the runtime use `checked_actions` for each result: floating-point numbers, the expected
shape, the dimension of the episode, finite values. `Limits` bounds the values of one action and
their change from one step to the next; the runtime applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

_NAMES = ("low", "high", "max_step")
# A policy computes in float32: a value at a limit may be past it by this many rounding errors.
_ROUNDING = 4


class LimitExceeded(ValueError):
    """An action is outside the limits, and `on_violation` is "stop"."""


class Limits:
    """Bounds per dimension: `Limits(low=[-3.1, …], high=[3.1, …], max_step=[0.1, …])`.

    `low` and `high` bound the value, `max_step` the change from the action applied before; the
    first action of an episode has none before it. Each is a number for all dimensions, a list of
    one number per dimension (infinite: no limit), or None. An action outside is replaced by the
    nearest one inside ("clamp"), or raises LimitExceeded ("stop").

    A policy's metadata may hold the limits of its actions, each of the three lists optional:
    `{"action_limits": {"low": [...], "high": [...], "max_step": [...]}}`, in the units of the
    actions that the policy returns, per step of its chunks. `piston train` stores those of the
    training data, widened.
    """

    def __init__(
        self,
        low: npt.ArrayLike | None = None,
        high: npt.ArrayLike | None = None,
        max_step: npt.ArrayLike | None = None,
        *,
        on_violation: Literal["clamp", "stop"] = "clamp",
    ) -> None:
        if on_violation not in ("clamp", "stop"):
            raise ValueError(f"on_violation is 'clamp' or 'stop'; found {on_violation!r}.")
        self.low = _bound("low", low, -np.inf)
        self.high = _bound("high", high, np.inf)
        self.max_step = _bound("max_step", max_step, np.inf)
        self.on_violation = on_violation
        sizes = {b.size for b in (self.low, self.high, self.max_step) if b.ndim}
        if len(sizes) > 1:
            raise ValueError(f"The limits have different numbers of dimensions: {sorted(sizes)}.")
        self.dim = sizes.pop() if sizes else None
        # Of the dimensions, for messages, if the policy's metadata hold them.
        self.names: list[str] = []
        if (self.low > self.high).any():
            raise ValueError(f"low is above high: {self.low} and {self.high}.")
        if (self.max_step < 0).any():
            raise ValueError(f"max_step is a distance, 0 or more; found {self.max_step}.")

    @classmethod
    def of_policy(cls, agent: object) -> Limits | None:
        """Return the limits in the metadata of an agent or of the policy it wraps; None if none."""
        return cls.of_metadata(metadata_of(agent))

    @classmethod
    def of_metadata(cls, metadata: object) -> Limits | None:
        """Return the limits in a policy's metadata; None if none. Raise ValueError if wrong."""
        if not isinstance(metadata, Mapping) or metadata.get("action_limits") is None:
            return None
        found = metadata["action_limits"]
        if not isinstance(found, Mapping) or not set(found) <= set(_NAMES):
            raise ValueError(
                f"action_limits in the policy's metadata is {found!r}; expected a dictionary with "
                f"{', '.join(_NAMES)}. Correct it, or give the runtime limits of its own."
            )
        limits, actions = cls(**found), metadata.get("actions")
        names = actions.get("names") if isinstance(actions, Mapping) else None
        if isinstance(names, list) and len(names) == limits.dim:
            limits.names = [str(name) for name in names]
        return limits

    def widened(self, margin: float = 0.1, steps: float = 1.5, at_least: float = 0.01) -> Limits:
        """Return wider limits. The defaults make limits of the ranges found in training data.

        The range grows on each side by `margin` times its width, at least by `at_least` (0.01 rad,
        1 cm), so that a dimension that never moved in the data may move a little. The largest step
        grows by the factor `steps`, at least to half of that margin: some dimensions, such as a
        gripper, keep one value per episode and have no steps in the data, but a policy does not
        repeat a value exactly.
        """
        width = self.high - self.low
        more = np.maximum(np.where(np.isfinite(width), margin * width, 0.0), at_least)
        max_step = np.maximum(steps * self.max_step, more / 2)
        return Limits(self.low - more, self.high + more, max_step, on_violation=self.on_violation)

    def as_metadata(self) -> dict[str, Any]:
        """Return what a policy's metadata holds of these limits as `action_limits`."""
        return {name: getattr(self, name).tolist() for name in _NAMES}

    def clamp(self, action: np.ndarray, last: np.ndarray | None) -> tuple[np.ndarray, str]:
        """Return the nearest action inside the limits, and what was outside ("" if nothing).

        Raise LimitExceeded instead of clamping if `on_violation` is "stop".
        """
        if self.dim not in (None, action.size):
            raise ValueError(
                f"The limits are for {self.dim} dimensions, the action has {action.size}. Give the "
                "runtime limits of the action's dimension, or limits=False."
            )
        # float64: the change between two large float32 values may be larger than float32 can hold.
        wanted = action.astype(np.float64)
        before = wanted if last is None else last.astype(np.float64)
        inside = np.clip(wanted, self.low, self.high)
        if last is not None:
            inside = np.clip(inside, before - self.max_step, before + self.max_step)
        size = np.maximum(np.maximum(np.abs(wanted), np.abs(before)), np.abs(inside))
        rounding = _ROUNDING * float(np.finfo(action.dtype).eps)
        outside = np.flatnonzero(np.abs(wanted - inside) > rounding * size)
        if not outside.size:
            return action, ""
        i = outside[0]
        low, high, max_step = (
            np.broadcast_to(bound, wanted.shape)[i]
            for bound in (self.low, self.high, self.max_step)
        )
        change = "" if last is None else f", changing at most {max_step:g} from {before[i]:g}"
        others = f" (and {outside.size - 1} more dimensions)" if outside.size > 1 else ""
        name = f" ({self.names[i]})" if self.names else ""
        problem = (
            f"The action's dimension {i}{name} is {wanted[i]:g}{others}; the limits allow "
            f"{low:g} … {high:g}{change}"
        )
        if self.on_violation == "stop":
            raise LimitExceeded(f"{problem}. The action is not executed.")
        clamped = action.copy()
        clamped[outside] = inside[outside]
        return clamped, problem

    def __repr__(self) -> str:
        bounds = ", ".join(f"{name}={bound}" for name, bound in self.as_metadata().items())
        return f"Limits({bounds}, on_violation={self.on_violation!r})"


def _bound(name: str, given: npt.ArrayLike | None, default: float) -> np.ndarray:
    try:
        bound = np.asarray(default if given is None else given, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not a list of numbers: {given!r}.") from error
    if bound.ndim > 1 or bound.size == 0 or np.isnan(bound).any():
        raise ValueError(
            f"{name} is a number or a list of one number per dimension, not NaN; found {given!r}."
        )
    return bound


def metadata_of(agent: object) -> Any:
    """Return the metadata of an agent or of the policy that it wraps; None if there are none."""
    while agent is not None and not hasattr(agent, "metadata"):
        agent = getattr(agent, "policy", None)
    return getattr(agent, "metadata", None)


def checked_actions(
    result: Mapping[str, Any], ndim: int, expected: str, dim: int | None = None
) -> np.ndarray:
    """Return the actions of a result; raise ValueError if they must not be executed.

    `dim` is the dimension of the actions before them in the episode, None if there are none.
    """
    if "actions" not in result:
        raise ValueError(f"The result has no 'actions'; found {sorted(result)}.")
    actions = np.asarray(result["actions"])
    if actions.ndim != ndim or actions.size == 0:
        raise ValueError(f"The actions have shape {actions.shape}; expected {expected}.")
    if not np.issubdtype(actions.dtype, np.floating):
        raise ValueError(
            f"The actions are of type {actions.dtype}; expected floating-point numbers such as "
            "float32. They are not executed."
        )
    if dim not in (None, actions.shape[-1]):
        raise ValueError(
            f"The actions have {actions.shape[-1]} dimensions, but those before them in this "
            f"episode had {dim}. They are not executed."
        )
    if not np.isfinite(actions).all():
        raise ValueError("The actions are not finite numbers; they are not executed.")
    return actions
