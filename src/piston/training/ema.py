"""A running mean of the weights: what gets served.

Knows parameters by name; knows nothing of models, schedules or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from piston.training.distributed import local


class EMA:
    """mean ← decay · mean + (1 − decay) · weights, after every step, from the initial weights on.

    Follows the parameters that train; frozen ones equal their mean.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters)
        self.mean = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        current = [local(self._parameters[name].detach()) for name in self.mean]
        mean = [local(value) for value in self.mean.values()]
        torch._foreach_lerp_(mean, current, 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model computes with the mean; afterwards with its own weights again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """One tensor at a time, so that no second copy of the weights is needed."""
        for name, parameter in self._parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.mean[name])
            self.mean[name].copy_(kept)
