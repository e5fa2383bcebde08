"""Which numbers are held and multiplied in which precision: the whole policy, in one place.

    held float32 always      norm scales, patch and position embeddings, the suffix's small maps
    held as asked            every other matrix: float32 masters to train, bfloat16 to serve
    computed float32 always  norms, rotary angles, attention logits and softmax, time, loss
    computed as configured   every product of a `Linear`: it follows the activation that comes in

Knows dtypes and devices; knows nothing of models.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from piston.models.configs import Dtype

_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: Dtype) -> torch.dtype:
    return _DTYPES[name]


class Linear(nn.Linear):
    """A linear map computed in its input's precision, whatever its weight is held in."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


def cast_for_inference(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold the large matrices in `dtype`, in place; what must stay float32 stays float32."""
    for module in model.modules():
        if isinstance(module, Linear | nn.Embedding):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def attention(
    query: Float[Tensor, "b n t d"],
    key: Float[Tensor, "b n s d"],
    value: Float[Tensor, "b n s d"],
    mask: Bool[Tensor, "b 1 t s"] | None = None,
) -> Float[Tensor, "b n t d"]:
    """Softmax attention; logits and softmax accumulate in float32 for every input precision."""
    dtype = query.dtype
    if query.device.type == "cpu" and query.requires_grad:
        # The backward pass of bfloat16 attention on CPUs is several times slower than float32's.
        query, key, value = query.float(), key.float(), value.float()
    return nn.functional.scaled_dot_product_attention(query, key, value, mask).to(dtype)


def _avoid_unusable_tiles() -> None:
    """Keep oneDNN off matrix tiles where a virtual machine shows them but hides their sizes.

    Such a machine names `amx_tile` but ends its CPUID table before leaf 0x1D (the tile sizes);
    oneDNN then reads zeros and the first bfloat16 product dies with an illegal instruction.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not cpuinfo.is_file():
        return
    facts: dict[str, str] = {}
    for line in cpuinfo.read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    if "amx_tile" in facts.get("flags", "").split() and int(facts.get("cpuid level", 29)) < 0x1D:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"


_avoid_unusable_tiles()
