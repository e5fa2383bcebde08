"""Matrices of a model in the form in which they are multiplied fastest: joined, packed, or in int8.

Matrices of one input are joined into one on every device: fewer and larger products.

oneDNN, which multiplies for PyTorch, rearranges the weight of every product before it begins. A
packed weight is rearranged once, when a policy is loaded, into memory of its own, so that it makes
no difference whether it came from a file. The gelu and the product of an MLP become part of the
matrix product, and results are rounded less often than those of the model as it was.

In int8 each row of a weight and each token's activation have a scale of their own, so that one
large number costs precision only in its own row. Products are exact in integers; where the CPU adds
pairs of products in 16 bits, tokens have seven bits, so that this holds there too. The embedding
table is held in int8 as well, unless the model also writes words with it. Norms, attention and the
small maps of the suffix stay as they are.

Packing and int8 are for inference on CPUs. Derivatives with respect to inputs exist, because guided
real-time chunking needs them; those with respect to weights do not. Packed weights are no
parameters: a packed model cannot be copied, saved or moved to another device. Load it again
instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int, Int8, UInt8
from torch import Tensor, nn

from piston.models import cpu
from piston.models.configs import ModelConfig
from piston.models.gemma import MLP, Attention, RMSNorm
from piston.models.lora import LoRALinear, merge_adapters
from piston.models.model import Model
from piston.models.precision import Linear
from piston.models.siglip import Attention as VisionAttention

# Numbers of a weight that are quantized at once.
_PART = 2**20


def pack_for_inference(model: Model) -> None:
    """Pack every bfloat16 matrix that PyTorch multiplies, in place, where the CPU gains from it."""
    if _gains_from_packing(model):
        _replace(model, _packed)


def _gains_from_packing(model: Model) -> bool:
    has_products = torch.backends.mkldnn.is_available() and (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return has_products and model.compute_dtype == torch.bfloat16


def prepare_for_inference(model: Model) -> None:
    """Join matrices that multiply the same input, and pack those that the CPU gains from packed.

    Joined parameters have no names of their own any more: to save or train a model, load it again.
    """
    if _gains_from_packing(model):
        # Packed, `up` multiplies by the gate at once, which a joined matrix could not.
        for module in model.modules():
            if isinstance(module, MLP):
                _replace(module, _packed)
    join_for_inference(model)
    pack_for_inference(model)


def join_for_inference(model: Model) -> None:
    """Join queries, keys and values, and gate and up, in place: fewer and larger matmuls."""
    for module in list(model.modules()):
        if isinstance(module, RMSNorm | Attention | MLP | VisionAttention):
            module.join()


def _packed(module: nn.Module) -> nn.Module:
    if not isinstance(module, Linear):
        return module
    weight = module.weight
    is_plain = type(module).forward is Linear.forward  # and has no adapter
    held = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    can_be_packed = is_plain and held and module.cpu_product == "torch"
    return PackedLinear(module) if can_be_packed else module


def quantize_for_inference(model: Model) -> None:
    """Hold every large matrix of the vision tower and the experts in eight bits, in place."""
    _replace(model, quantizer(model.config))
    merge_adapters(model)  # those of the configuration: the modules have none any more


def quantizer(config: ModelConfig) -> Callable[[nn.Module], nn.Module]:
    """Return what `quantize_for_inference` does to one module of a model of this configuration.

    `weights.load_model` applies it to each module when it is read: the model as it is stored is
    never in memory as a whole.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError(
            "int8 needs a PyTorch with oneDNN, which this one does not have. Use bfloat16."
        )
    writes_words = not config.denoises or bool(config.targets)

    def quantize(module: nn.Module) -> nn.Module:
        if isinstance(module, Linear):
            return Int8Linear(module.merged() if isinstance(module, LoRALinear) else module)
        if isinstance(module, nn.Embedding) and not writes_words:
            return Int8Embedding(module)
        return module

    return quantize


def _replace(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            setattr(module, name, make(child))


class PackedLinear(nn.Module):
    """A linear map of bfloat16 numbers with a packed weight."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        bias = linear.bias
        self.bias = None if bias is None else bias.detach().to(torch.bfloat16)

    def forward(
        self, x: Float[Tensor, "*b i"], residual: Float[Tensor, "*b o"] | None = None
    ) -> Float[Tensor, "*b o"]:
        if residual is None:
            return self._product(x, "none")
        if x.requires_grad or residual.requires_grad:
            return residual + self._product(x, "none")
        return self._product_and(x, residual, "add")

    def gelu(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        if x.requires_grad:
            return nn.functional.gelu(self(x), approximate="tanh")
        return self._product(x, "gelu")

    def times(
        self, x: Float[Tensor, "*b i"], factor: Float[Tensor, "*b o"]
    ) -> Float[Tensor, "*b o"]:
        if x.requires_grad or factor.requires_grad:
            return self(x) * factor
        return self._product_and(x, factor, "mul")

    def _product_and(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, other, self.weight, self.bias, operation
        )
        return found

    def _product(self, x: Tensor, activation: str) -> Tensor:
        def multiply(rows: Tensor) -> Tensor:
            return torch.ops.mkldnn._linear_pointwise(
                rows, self.weight, self.bias, activation, [], "tanh"
            )

        return _Product.apply(x, multiply, self.dense) if x.requires_grad else multiply(x)

    def dense(self) -> Float[Tensor, "o i"]:
        """Return the weight as an ordinary matrix."""
        return self.weight.to_dense()


class Int8Linear(nn.Module):
    """A linear map whose weight is held, and multiplied, in eight bits."""

    scale: Float[Tensor, " o"]
    zeros: Tensor

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        whole, scale = _quantize(linear.weight.detach())
        self.weight = torch.ops.onednn.qlinear_prepack(whole, None)
        self.register_buffer("scale", scale[:, 0])
        self.register_buffer("zeros", torch.zeros(len(whole), dtype=torch.int32))
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(
        self, x: Float[Tensor, "*b i"], residual: Float[Tensor, "*b o"] | None = None
    ) -> Float[Tensor, "*b o"]:
        multiply = self._multiply
        found = _Product.apply(x, multiply, self.dense) if x.requires_grad else multiply(x)
        return found if residual is None else residual + found

    def gelu(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        return nn.functional.gelu(self(x), approximate="tanh")

    def times(
        self, x: Float[Tensor, "*b i"], factor: Float[Tensor, "*b o"]
    ) -> Float[Tensor, "*b o"]:
        return self(x) * factor

    def _multiply(self, x: Tensor) -> Tensor:
        largest = largest_token_number()
        whole, scale = _quantize_tokens(x.reshape(-1, x.shape[-1]), largest)
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(whole, 1.0, largest + 1, self.weight, self.scale, self.zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        result = result.mul_(scale) if self.bias is None else self.bias.addcmul(result, scale)
        return result.to(x.dtype).view(*x.shape[:-1], len(self.zeros))

    def dense(self) -> Float[Tensor, "o i"]:
        """Return the weight as an ordinary matrix."""
        return self.weight.to_dense().t().float() * self.scale[:, None]


class Int8Embedding(nn.Module):
    """An embedding table that is held in eight bits."""

    weight: Int8[Tensor, "v d"]
    scale: Float[Tensor, "v 1"]

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        whole, scale = _quantize(embedding.weight.detach())
        self.register_buffer("weight", whole)
        self.register_buffer("scale", scale)

    def forward(self, token_ids: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
        return self.weight[token_ids].float() * self.scale[token_ids]


class _Product(torch.autograd.Function):
    """A product whose derivative is that of the linear map, without the rounding."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, multiply: Callable[[Tensor], Tensor], dense: Callable[[], Tensor]
    ) -> Tensor:
        ctx.dense = dense
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ ctx.dense().to(gradient.dtype), None, None


def _quantize(x: Float[Tensor, "r i"]) -> tuple[Int8[Tensor, "r i"], Float[Tensor, "r 1"]]:
    """Return whole numbers and the scale of each row: x ≈ whole · scale."""
    whole, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), 1)
    size = max(1, _PART // x.shape[1])  # in parts that stay in the cache
    for part, its_whole, its_scale in zip(x.split(size), whole.split(size), scale.split(size)):
        its_scale.copy_(_scale(part))
        its_whole.copy_((part.float() / its_scale).round_())
    return whole, scale


def _quantize_tokens(
    x: Float[Tensor, "r i"], largest: int
) -> tuple[UInt8[Tensor, "r i"], Float[Tensor, "r 1"]]:
    """Return whole numbers and the scale of each row: x ≈ (whole − largest − 1) · scale."""
    scale = _scale(x, largest)
    # Rounds to the nearest, because all numbers are positive.
    return torch.add(largest + 1.5, x / scale).to(torch.uint8), scale


@functools.cache
def largest_token_number() -> int:
    """Return the largest whole number that a token may have on this CPU.

    Products of unsigned and signed bytes are fastest. CPUs without VNNI add two of them in 16 bits,
    which overflow unless one factor has seven bits.
    """
    flags = cpu.read_cpuinfo().get("flags", "").split()
    is_x86 = "sse2" in flags
    has_vnni = not {"avx512_vnni", "avx_vnni", "amx_int8"}.isdisjoint(flags)
    return 127 if has_vnni or not is_x86 else 63


def _scale(x: Float[Tensor, "r i"], largest: int = 127) -> Float[Tensor, "r 1"]:
    found = torch.maximum(x.amax(dim=1, keepdim=True), -x.amin(dim=1, keepdim=True)).float()
    return found.clamp_(min=torch.finfo(torch.float32).tiny) / largest
