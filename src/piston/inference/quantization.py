"""Weights and activations in eight bits, for CPUs.

Each row of a weight matrix and each token's activation have a scale of their own, so that one large
number costs precision only in its own row. Products are exact in integers. Norms, embeddings,
attention and the small maps of the suffix stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from piston.models.lora import merge_adapters
from piston.models.precision import Linear

_LARGEST = 127


class Int8Linear(nn.Module):
    """A linear map whose weight is held, and multiplied, in eight bits."""

    weight: Int8[Tensor, "o i"]
    scale: Float[Tensor, " o"]

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        weight, scale = _quantize(linear.weight.detach().float())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale[:, 0])
        self.bias = linear.bias

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        result: Float[Tensor, "*b o"] = _Product.apply(x, self)
        return result

    def product(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        rows = x.reshape(-1, x.shape[-1])
        whole, scale = _quantize(rows.float())
        product = torch._int_mm(whole, self.weight.t()).float()
        result = product.mul_(scale).mul_(self.scale)
        if self.bias is not None:
            result += self.bias
        return result.to(x.dtype).view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """The gradient is that of the linear map without rounding, which has none itself.

    Real-time chunking differentiates through the network.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Int8Linear) -> Tensor:
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        weight = ctx.layer.weight.to(gradient.dtype) * ctx.layer.scale[:, None].to(gradient.dtype)
        return gradient @ weight, None


def quantize_for_inference(model: nn.Module) -> None:
    """Replace every large matrix of the vision tower and the experts, in place."""
    merge_adapters(model)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, Int8Linear(child))


def _quantize(x: Float[Tensor, "r i"]) -> tuple[Int8[Tensor, "r i"], Float[Tensor, "r 1"]]:
    """Return whole numbers and the scale of each row: x ≈ whole · scale."""
    scale = x.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny) / _LARGEST
    return (x / scale).round_().to(torch.int8), scale
