"""Transforms of actions: relative or absolute, thinned out, padded to the model's size.

States are (…, dim), chunks of actions (…, horizon, dim).

Dims: s state, h horizon, a action dim; `*b` any leading batch axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from piston.transforms import Data, require


def make_bool_mask(*dims: int) -> tuple[bool, ...]:
    """Return runs of True (positive) and False (negative): (6, -1) is six True, then one False."""
    return tuple(dim > 0 for dim in dims for _ in range(abs(dim)))


@dataclasses.dataclass(frozen=True)
class DeltaActions:
    """Make actions relative to the state at the start of the chunk where `mask` is True.

    The same state is subtracted from every step. Dimensions beyond the mask stay absolute, as
    grippers should. Not for rotations: Euler angles and axis-angle vectors cannot be subtracted.
    Data without actions do not change.
    """

    # The dimensions that are relative; None for none.
    mask: Sequence[bool] | None
    # The dimension of the state for each dimension of the mask; None: the same one.
    state_dims: Sequence[int] | None = None
    sign: ClassVar[int] = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", _as_mask(self.mask, type(self).__name__))

    def __call__(self, data: Data) -> Data:
        if self.mask is None or "actions" not in data:
            return data
        context = type(self).__name__
        actions, state = _as_float(data["actions"]), _as_float(require(data, "state", context))
        if actions.ndim < 2 or state.shape[:-1] != actions.shape[:-2]:
            raise ValueError(
                f"{context}: 'state' has shape {state.shape} and 'actions' {actions.shape}; their "
                "batch axes must agree: (…, dim) and (…, horizon, dim)."
            )
        if len(self.mask) > actions.shape[-1]:
            raise ValueError(
                f"{context}: the mask has {len(self.mask)} entries, 'actions' only "
                f"{actions.shape[-1]} dimensions (shape {actions.shape})."
            )
        chosen = np.flatnonzero(self.mask)
        source = chosen if self.state_dims is None else np.asarray(self.state_dims)[chosen]
        if source.size and source.max() >= state.shape[-1]:
            raise ValueError(
                f"{context}: the mask makes action dimension {chosen[source.argmax()]} relative to "
                f"dimension {source.max()} of 'state', which has only {state.shape[-1]} (shape "
                f"{state.shape})."
            )
        offset = np.zeros((*state.shape[:-1], 1, actions.shape[-1]), state.dtype)
        offset[..., 0, chosen] = state[..., source]
        return {**data, "actions": (actions + self.sign * offset).astype(actions.dtype)}


class AbsoluteActions(DeltaActions):
    """Invert `DeltaActions`: add the state to every step where `mask` is True."""

    sign = 1


@dataclasses.dataclass(frozen=True)
class PerturbState:
    """Add noise to the state where `mask` is True, but not to the actions. For training only.

    Before `DeltaActions`, the chunk then leads from the perturbed state to the right place, and a
    policy learns to correct an error of the state instead of keeping it. The noise is a function of
    the state, so that a sample is the same whenever it is read.
    """

    std: float
    mask: Sequence[bool]

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"PerturbState: std is {self.std}; expected at least 0.")
        object.__setattr__(self, "mask", _as_mask(self.mask, "PerturbState"))

    def __call__(self, data: Data) -> Data:
        state = _as_float(require(data, "state", "PerturbState"))
        bits = np.ascontiguousarray(state, np.float32).view(np.uint32)
        table = _noise_table(len(self.mask))
        noise = table[bits.sum(-1, dtype=np.int64) % len(table)]
        perturbed = state + self.std * noise * np.array(self.mask)
        return {**data, "state": perturbed.astype(state.dtype)}

    def for_inference(self) -> None:
        return None


@functools.cache
def _noise_table(dim: int) -> Float[np.ndarray, "4099 dim"]:
    return np.random.default_rng(0).normal(size=(4_099, dim))


@dataclasses.dataclass(frozen=True)
class SubsampleActions:
    """Keep every `stride`-th action of the chunk, beginning with the first."""

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"SubsampleActions: stride is {self.stride}; expected at least 1.")

    def __call__(self, data: Data) -> Data:
        thinned = dict(data)
        if "actions" in data:
            thinned["actions"] = np.asarray(data["actions"])[..., :: self.stride, :]
        if "action_is_pad" in data:
            thinned["action_is_pad"] = np.asarray(data["action_is_pad"])[..., :: self.stride]
        return thinned


@dataclasses.dataclass(frozen=True)
class InterpolateActions:
    """Invert `SubsampleActions` for smooth motion, with straight lines between the actions.

    h actions become (h − 1) · stride + 1.
    """

    stride: int

    def __call__(self, data: Data) -> Data:
        actions = _as_float(require(data, "actions", "InterpolateActions"))
        steps = np.arange((actions.shape[-2] - 1) * self.stride + 1)
        before = steps // self.stride
        after = np.minimum(before + 1, actions.shape[-2] - 1)
        share = ((steps % self.stride) / self.stride)[:, np.newaxis].astype(actions.dtype)
        between = (1 - share) * actions[..., before, :] + share * actions[..., after, :]
        return {**data, "actions": between}


@dataclasses.dataclass(frozen=True)
class PadStatesAndActions:
    """Pad state and actions with zeros to the model's action dim."""

    model_action_dim: int

    def __call__(self, data: Data) -> Data:
        padded = dict(data)
        for key in ("state", "actions") if "actions" in data else ("state",):
            values = np.asarray(require(data, key, "PadStatesAndActions"))
            if (dim := values.shape[-1]) > self.model_action_dim:
                raise ValueError(
                    f"PadStatesAndActions: {key!r} has {dim} dimensions; the model takes at most "
                    f"{self.model_action_dim}. Set --model.action-dim {dim}."
                )
            padded[key] = pad_to_dim(values, self.model_action_dim)
        return padded


def pad_to_dim(values: np.ndarray, dim: int, axis: int = -1, value: float = 0.0) -> np.ndarray:
    """Append `value` along `axis` until it is `dim` long."""
    missing = dim - values.shape[axis]
    if missing < 0:
        raise ValueError(f"Cannot pad axis {axis} of shape {values.shape} to {dim}: it is longer.")
    widths = [(0, 0)] * values.ndim
    widths[axis] = (0, missing)
    return np.pad(values, widths, constant_values=value)


def _as_mask(mask: Sequence[bool] | None, context: str) -> tuple[bool, ...] | None:
    if mask is not None and not all(isinstance(value, bool | np.bool_) for value in mask):
        raise TypeError(
            f"{context}: mask must be a list of booleans, found {mask!r}. make_bool_mask(6, -1) "
            "makes one from run lengths."
        )
    return None if mask is None else tuple(map(bool, mask))


def _as_float(values: np.ndarray) -> np.ndarray:
    """Convert integers to float64, so that differences do not wrap or truncate."""
    values = np.asarray(values)
    return values if np.issubdtype(values.dtype, np.floating) else values.astype(np.float64)
