"""The precision of every number: what parameters are held in, what products are computed in.

    held float32 always      norm scales, patch and position embeddings, the suffix's small maps
    held as asked            every other matrix: float32 masters to train, bfloat16 to serve
    computed float32 always  norms, rotary angles, attention logits and softmax, time, word logits,
                             loss
    computed as configured   every product of a `Linear`: it follows the activation that comes in

Where PyTorch multiplies bfloat16 slower than float32 on a CPU, `use_fastest_products` makes a model
use matrix tiles if they can be reached (see `cpu`); otherwise large products run in float32 and are
rounded: never less exact, and activations stay bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from piston.models import cpu

# Below, converting the weight costs more than the faster product saves (measured).
_MIN_ROWS_IN_FLOAT32 = 128
# Weights are converted in pieces that the allocator keeps instead of returning to the system.
_MAX_CONVERTED_NUMBERS = 4_000_000


class Linear(nn.Linear):
    """A linear map computed in its input's dtype, whatever its weight is held in."""

    # How bfloat16 is multiplied on a CPU.
    cpu_product: cpu.Product = "torch"

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Float[Tensor, "*b i"], residual: Float[Tensor, "*b o"] | None = None
    ) -> Float[Tensor, "*b o"]:
        """Return the map of `x`, added to `residual` if there is one."""
        product = self._product_of(x)
        if residual is not None:
            if product != "torch" or self.bias is not None:
                return residual + self.forward(x)
            rows, weight = x.flatten(0, -2), self.weight.to(x.dtype)
            return torch.addmm(residual.flatten(0, -2), rows, weight.t()).view(residual.shape)
        if product == "tiles":
            rows = x.reshape(-1, x.shape[-1])
            found = cpu.tile_product(rows, self.weight.t(), self.bias, x.dtype)
            return found.view(*x.shape[:-1], self.out_features)
        if product == "float32":
            return linear_in_float32(x, self.weight, self.bias, x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)

    def _product_of(self, x: Float[Tensor, "*b i"]) -> cpu.Product:
        """Return how this input is multiplied."""
        if x.device.type != "cpu" or x.dtype != torch.bfloat16:
            return "torch"
        has_few_rows = x.numel() < _MIN_ROWS_IN_FLOAT32 * x.shape[-1]
        return "torch" if self.cpu_product == "float32" and has_few_rows else self.cpu_product

    # What follows a product in an MLP: packed weights (`inference.packing`) do both at once.

    def gelu(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        return nn.functional.gelu(self(x), approximate="tanh")

    def times(
        self, x: Float[Tensor, "*b i"], factor: Float[Tensor, "*b o"]
    ) -> Float[Tensor, "*b o"]:
        return self(x) * factor


def join(parent: nn.Module, names: Sequence[str]) -> Linear | None:
    """Replace maps of one input by a single one, whose output has theirs side by side.

    Its matrix takes the place of theirs: `parent` loses them, and the result has to be kept there.
    Where one of them is no plain `Linear` (adapters, eight bits), nothing changes: None.
    """
    linears = [getattr(parent, name) for name in names]
    if any(type(linear) is not Linear for linear in linears):
        return None
    joined = linears[0]
    for name, _ in list(joined.named_parameters()):
        parts = [getattr(linear, name).detach() for linear in linears]
        setattr(joined, name, nn.Parameter(torch.cat(parts), requires_grad=False))
    joined.out_features = len(joined.weight)
    for name in names:
        delattr(parent, name)
    return joined


def linear_in_float32(
    x: Float[Tensor, "*b i"],
    weight: Float[Tensor, "o i"],
    bias: Float[Tensor, " o"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*b o"]:
    """Return a float32 product, rounded to `dtype`; a weight is converted piece by piece."""
    x = x.float()
    bias = None if bias is None else bias.float()
    if weight.dtype == torch.float32:
        return nn.functional.linear(x, weight, bias).to(dtype)
    size = max(1, _MAX_CONVERTED_NUMBERS // weight.shape[1])
    biases = [None] * len(weight) if bias is None else bias.split(size)
    parts = zip(weight.split(size), biases)
    return torch.cat([nn.functional.linear(x, w.float(), b).to(dtype) for w, b in parts], dim=-1)


def use_fastest_products(model: nn.Module) -> None:
    """Choose how the model multiplies bfloat16 matrices where it runs on this machine's CPU."""
    product = cpu.choose_product()
    for module in model.modules():
        if isinstance(module, Linear):
            module.cpu_product = product


def cast_for_inference(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold the large matrices in `dtype`, in place; other parameters stay float32."""
    for _, parameter in held_as_asked(model):
        parameter.data = parameter.data.to(dtype)


def held_as_asked(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the large matrices by name. Every other parameter is always held in float32."""
    for path, module in model.named_modules():
        if isinstance(module, Linear | nn.Embedding):
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}".removeprefix("."), parameter


def additive_mask(
    mask: Bool[Tensor, "*b t s"] | Float[Tensor, "*b t s"] | None, dtype: torch.dtype
) -> Float[Tensor, "*b t s"] | None:
    """Return what is added to attention logits, so that no layer has to convert a mask."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)


def attention(
    query: Float[Tensor, "b n t d"],
    key: Float[Tensor, "b n s d"],
    value: Float[Tensor, "b n s d"],
    mask: Bool[Tensor, "#b 1 #t s"] | Float[Tensor, "#b 1 #t s"] | None = None,
) -> Float[Tensor, "b n t d"]:
    """Softmax attention; logits and softmax accumulate in float32 for every input precision.

    `mask` says what is attended to, or is added to the logits (see `additive_mask`).
    """
    dtype = query.dtype
    if query.device.type == "cpu" and query.requires_grad:
        # The backward pass of bfloat16 attention on CPUs is several times slower than float32's.
        query, key, value = query.float(), key.float(), value.float()
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    return nn.functional.scaled_dot_product_attention(query, key, value, mask).to(dtype)
