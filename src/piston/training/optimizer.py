"""What follows the gradients of a step: clipping, the optimizer's step, the EMA of the weights.

The optimizer and the learning rate of a step come from `piston.config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from piston.models.lora import freeze
from piston.training.distributed import local, whole


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop training the parameters that the patterns match; raise ValueError if none is left."""
    freeze(model, patterns)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"Nothing is left to train: --freeze {' '.join(patterns)} matches every parameter. "
            'Make an exception with "!", as in "!*lora*".'
        )


def optimizer_step(
    optimizer: torch.optim.Optimizer, learning_rate: float, is_finite: Bool[Tensor, ""]
) -> None:
    """Move the weights, unless `is_finite` is False: then nothing changes.

    Fused kernels decide on the device, as they do for `torch.amp.GradScaler`; for an optimizer
    without them the host waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif is_finite:
        optimizer.step()


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients to at most this global norm; return the norm that they had before."""
    with_gradient = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in with_gradient if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(gradients))
    torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return norm


class EMA:
    """The moving average of the weights, which is what gets served.

    mean ← decay · mean + (1 − decay) · weights, after every step, from the initial weights on.
    Only for the parameters that train; frozen ones equal their mean.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters)
        self.mean = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, is_finite: Bool[Tensor, ""]) -> None:
        """Follow the weights after a step; do nothing if `is_finite` is False."""
        current = [local(self._parameters[name].detach()) for name in self.mean]
        mean = [local(value) for value in self.mean.values()]
        torch._foreach_lerp_(mean, current, [is_finite * (1.0 - self.decay)] * len(mean))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model compute with the mean within this context."""
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
