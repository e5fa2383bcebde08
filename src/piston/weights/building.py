"""Models from configurations: on the meta device, with the values that a checkpoint lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from piston.models.autoregressive import Pi0FAST
from piston.models.configs import ModelConfig, Pi0Config, Pi0FASTConfig
from piston.models.flow import Pi0
from piston.models.model import Model
from piston.models.precision import held_as_asked, use_fastest_products
from piston.weights.errors import Shape

_MODELS: dict[type[ModelConfig], Callable[[Any], Model]] = {Pi0Config: Pi0, Pi0FASTConfig: Pi0FAST}
_RANDOM_FILLS = {"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_"}


def build_model(config: ModelConfig) -> Model:
    """Return the model of a configuration, on torch's current default device.

    It uses the fastest products that this machine's CPU has, should it run there.
    """
    if type(config) not in _MODELS:
        raise TypeError(f"No model is known for a {type(config).__name__}.")
    model = _MODELS[type(config)](config)
    use_fastest_products(model)
    return model


def build_on_meta(config: ModelConfig) -> Model:
    """Return the model without memory: for its names and shapes, or to be filled later."""
    with torch.device("meta"), _WithoutRandomFills():
        return build_model(config)


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the tensors that a checkpoint of this configuration has to hold."""
    return shapes_of(build_on_meta(config))


def held_dtypes(
    model: nn.Module, stored: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Return the dtype in which each tensor is held if `dtype` is asked for; None is as stored.

    Some are always float32, even where a file stores less: openpi's files hold the norms of the
    vision tower in bfloat16.
    """
    free = {name for name, _ in held_as_asked(model)}
    return {
        name: dtype or stored.get(name, torch.float32) if name in free else torch.float32
        for name in model.state_dict()
    }


def initial_values(config: ModelConfig, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the values with which a new model would start, for these parameters only."""
    model = build_on_meta(config)
    values: dict[str, Tensor] = {}
    modules: dict[str, nn.Module] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        modules[path] = model.get_submodule(path)
        values[name] = torch.empty(modules[path].get_parameter(leaf).shape)
        setattr(modules[path], leaf, nn.Parameter(values[name]))
    with _WithoutRandomFills():  # the parameters that stay on the meta device
        for module in modules.values():
            module.reset_parameters()  # type: ignore[operator]
    return values


class _WithoutRandomFills(TorchFunctionMode):
    """Random fills of tensors on the meta device do nothing.

    They have no effect there, but the first one imports parts of torch that take a second.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("tensor", args[0] if args else None)
        random = getattr(func, "__name__", "") in _RANDOM_FILLS
        if random and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **kwargs)
