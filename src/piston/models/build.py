"""The registry of models: which module is built for which type of configuration.

A model of one's own is a configuration type and a module, in one file that registers both (see
docs/extending.md). Training, serving and inspection build models only here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from piston.models.autoregressive import Pi0FAST
from piston.models.configs import ModelConfig, Pi0Config, Pi0FASTConfig
from piston.models.flow import Pi0
from piston.models.model import Model
from piston.models.precision import use_fastest_products

ModelType = TypeVar("ModelType", bound=type[Model])

_MODELS: dict[type[ModelConfig], Callable[[Any], Model]] = {Pi0Config: Pi0, Pi0FASTConfig: Pi0FAST}
_RANDOM_FILLS = {"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_"}


def register_model(config_type: type[ModelConfig]) -> Callable[[ModelType], ModelType]:
    """Build the decorated model for configurations of this type and of its subclasses."""

    def decorate(model_type: ModelType) -> ModelType:
        known = _MODELS.setdefault(config_type, model_type)
        if known is not model_type:
            raise ValueError(
                f"{config_type.__name__} is the configuration of {known.__name__} already. Give "
                f"{model_type.__name__} a configuration type of its own."
            )
        return model_type

    return decorate


def build_model(config: ModelConfig) -> Model:
    """Return the model of a configuration, on torch's current default device.

    It uses the fastest products that this machine's CPU has, should it run there.
    """
    for config_type in type(config).__mro__:
        if config_type in _MODELS:
            model = _MODELS[config_type](config)
            use_fastest_products(model)
            return model
    raise TypeError(
        f"No model is registered for a {type(config).__name__}. Write @register_model("
        f"{type(config).__name__}) (piston.models.build) above its class."
    )


def build_on_meta(config: ModelConfig) -> Model:
    """Return the model without memory: for its names and shapes, or to be filled later."""
    with torch.device("meta"), WithoutRandomFills():
        return build_model(config)


class WithoutRandomFills(TorchFunctionMode):
    """Random fills of tensors on the meta device do nothing.

    They have no effect there, but the first one imports parts of torch that take a second.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target: Any = args[0] if args else (kwargs or {}).get("tensor")
        if getattr(func, "__name__", "") in _RANDOM_FILLS and target.is_meta:
            return target
        return func(*args, **(kwargs or {}))
