"""Constructors on the meta device: without their costly fills, or with those written down.

A parameter on the meta device has no memory to fill, and torch's random numbers for it import half
a compiler: `WithoutFills` leaves them out. `initial_values` gives what a constructor would have put
into some parameters, those that a checkpoint does not have and need not (fresh adapters, a new
head): the operations that lead to them are recorded, and only those are then carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_FILLS = {
    *("zero_", "fill_", "normal_", "uniform_", "zeros_", "ones_", "constant_", "trunc_normal_"),
    *("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
}


class WithoutFills(TorchFunctionMode):
    """Within it, filling a tensor on the meta device does nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _without_fill(func, args, kwargs or {})


def _without_fill(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs.get("tensor", args[0] if args else None)
    if getattr(func, "__name__", "") in _FILLS and isinstance(target, Tensor) and target.is_meta:
        return target
    return func(*args, **kwargs)


def initial_values(build: Callable[[], nn.Module], names: Iterable[str]) -> dict[str, Tensor]:
    """What the model that `build` makes would hold under these names."""
    names = list(names)
    if not names:
        return {}
    recording = _Recording()
    with torch.device("meta"), recording:
        model = build()
    state = model.state_dict()
    return {name: recording.value_of(state[name]).reshape(state[name].shape) for name in names}


class _Recording(TorchFunctionMode):
    """Every call that made or changed a tensor, by the storage that holds its result."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, list[Call]] = {}
        self._alive: list[Tensor] = []  # so that no storage's address is used twice
        self._values: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = _without_fill(func, args, kwargs)
        if isinstance(result, Tensor) and result.is_meta:
            self._calls.setdefault(_storage(result), []).append((func, args, kwargs))
            self._alive.append(result)
        return result

    def value_of(self, tensor: Tensor) -> Tensor:
        """Carry out the calls that led to a tensor."""
        key = _storage(tensor)
        if key in self._values:
            return self._values[key]
        calls = self._calls.pop(key, None)
        if calls is None:
            raise RuntimeError("A parameter's initial value was not made by torch operations.")
        value: Tensor | None = None
        for func, args, kwargs in calls:
            if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
                kwargs = {**kwargs, "device": "cpu"}  # a factory: on the meta device no longer

            def real(leaf: Any, own: Tensor | None = value) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                return own if own is not None and _storage(leaf) == key else self.value_of(leaf)

            with torch.no_grad():
                value = func(*tree_map(real, args), **tree_map(real, kwargs))
        assert value is not None  # every key has a call
        self._values[key] = value
        return value


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
