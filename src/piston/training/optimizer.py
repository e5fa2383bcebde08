"""AdamW over what may train, gradients clipped to a global norm.

Knows parameters and gradients; what the learning rate is comes from `piston.config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from piston.config import AdamW
from piston.models.lora import freeze
from piston.training.distributed import whole


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop training what the patterns match; something has to be left."""
    freeze(model, patterns)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"Nothing is left to train: --freeze {' '.join(patterns)} matches every parameter. "
            'Make an exception with "!", as in "!*lora*".'
        )


def make_optimizer(parameters: Iterable[nn.Parameter], config: AdamW) -> torch.optim.AdamW:
    """The learning rate is set before every step, so none is given here."""
    return torch.optim.AdamW(
        parameters,
        lr=0.0,
        betas=(config.b1, config.b2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,  # one pass over memory, and none of its own for temporary numbers
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients down together to the norm; the norm they had before."""
    with_gradient = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in with_gradient if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(gradients))
    torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return norm
