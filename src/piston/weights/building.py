"""From a configuration to a model without memory, and to what its tensors are called and are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from piston.models.autoregressive import Pi0FAST
from piston.models.configs import ModelConfig, Pi0Config, Pi0FASTConfig
from piston.models.flow import Pi0
from piston.models.precision import held_as_asked
from piston.weights.errors import Shape
from piston.weights.initial import WithoutFills


def build_model(config: ModelConfig) -> Pi0 | Pi0FAST:
    """The model of this configuration, on torch's current default device."""
    if isinstance(config, Pi0FASTConfig):
        return Pi0FAST(config)
    if isinstance(config, Pi0Config):
        return Pi0(config)
    raise TypeError(f"No model is known for a {type(config).__name__}.")


def build_on_meta(config: ModelConfig) -> Pi0 | Pi0FAST:
    """The same without memory: for its names and shapes, or to be filled by `load_into`."""
    with torch.device("meta"), WithoutFills():
        return build_model(config)


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this configuration has to hold."""
    return shapes_of(build_on_meta(config))


def held_dtypes(
    model: nn.Module, stored: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """What each tensor is held in when `dtype` is asked for; None is as stored.

    Some are float32 always, and then float32 even where a file stores less: openpi's hold the
    vision tower's norms in bfloat16.
    """
    free = {name for name, _ in held_as_asked(model)}
    return {
        name: dtype or stored.get(name, torch.float32) if name in free else torch.float32
        for name in model.state_dict()
    }
