"""Another optimizer: stochastic gradient descent with momentum, for `TrainConfig.optimizer`."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from piston.config import OptimizerConfig
from piston.serialization import register


@register("sgd")
@dataclasses.dataclass(frozen=True)
class SGD(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    momentum: float = 0.9

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.SGD:
        """Return the optimizer of these parameters; every step sets its learning rate."""
        parameters = [parameter for _, parameter in named_parameters]
        return torch.optim.SGD(parameters, lr=0.0, momentum=self.momentum, fused=True)
