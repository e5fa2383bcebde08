"""Low-rank adapters beside frozen matrices, and the choice of which parameters to freeze.

An adapted linear map of weight W (out × in) holds two more parameters in g groups of equal output:

    lora_a  (g, r, in)         lora_b  (g, out / g, r)
    y[group] = W[group] x + alpha / r · lora_b[group] (lora_a[group] x)

One group is the usual adapter. Query, key and value have one group per head, which holds the
public JAX adapters exactly (their layouts are in `piston.weights.openpi_jax`). For the output
projection these have one B per head, of which only the sum matters: summed, outputs are exact, but
a training step differs from JAX's, where each head's B takes its own.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from piston.models.configs import GemmaSize, LoRA
from piston.models.precision import Linear

Config = TypeVar("Config")


class LoRALinear(Linear):
    """A linear map whose low-rank correction is learned while its weight may stay frozen."""

    def __init__(self, in_features: int, out_features: int, lora: LoRA, groups: int = 1) -> None:
        self.scale = lora.scale
        super().__init__(in_features, out_features, bias=False)
        self.lora_a = nn.Parameter(torch.empty(groups, lora.rank, in_features))
        self.lora_b = nn.Parameter(torch.empty(groups, out_features // groups, lora.rank))
        self._reset_adapters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "lora_b"):  # not yet while nn.Linear's constructor runs
            self._reset_adapters()

    def _reset_adapters(self) -> None:
        nn.init.normal_(self.lora_a, std=self.in_features**-0.5)
        nn.init.zeros_(self.lora_b)  # so that training starts from the base model

    def forward(
        self, x: Float[Tensor, "*b i"], residual: Float[Tensor, "*b o"] | None = None
    ) -> Float[Tensor, "*b o"]:
        a, b = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        narrow = nn.functional.linear(x, a.flatten(0, 1)).unflatten(-1, a.shape[:2])
        base = super().forward(x, residual)
        if len(a) == 1:
            return base + self.scale * nn.functional.linear(narrow[..., 0, :], b[0])
        return base + self.scale * torch.einsum("...gr,gor->...go", narrow, b).flatten(-2)

    @torch.no_grad()
    def merged(self) -> Linear:
        """Return a plain linear map that computes the same, with this (now changed) weight."""
        self.weight.copy_(merged_weight(self.weight, self.lora_a, self.lora_b, self.scale))
        plain = Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight, plain.cpu_product = self.weight, self.cpu_product
        return plain


def merged_weight(
    weight: Float[Tensor, "o i"],
    lora_a: Float[Tensor, "g r i"],
    lora_b: Float[Tensor, "g k r"],
    scale: float,
) -> Float[Tensor, "o i"]:
    """Return the float32 weight of the plain linear map that computes the same."""
    return weight.float() + scale * torch.matmul(lora_b.float(), lora_a.float()).flatten(0, 1)


def make_linear(
    in_features: int, out_features: int, lora: LoRA | None = None, groups: int = 1
) -> Linear:
    """Return a linear map without bias, with an adapter if `lora` is given."""
    if lora is None:
        return Linear(in_features, out_features, bias=False)
    return LoRALinear(in_features, out_features, lora, groups)


def merge_adapters(model: nn.Module) -> None:
    """Fold every adapter into its base weight; the model and its config then have none."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRALinear):
                setattr(parent, name, child.merged())
        config = getattr(parent, "config", None)
        if dataclasses.is_dataclass(config):
            setattr(parent, "config", without_adapters(config))  # noqa: B010


def without_adapters(config: Config) -> Config:
    """Return the configuration with plain experts."""
    changes = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if isinstance(value, GemmaSize) and value.lora is not None:
            changes[field.name] = dataclasses.replace(value, lora=None)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def matching_parameters(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return names that a pattern matches and no `!pattern` excepts: `("vlm.*", "!*lora*")`.

    Raise ValueError for a pattern that matches no name: it would silently do nothing.
    """
    names = list(names)
    matched: set[str] = set()
    excepted: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern.removeprefix("!"))
        if not found:
            raise ValueError(
                f"Pattern {pattern!r} matches no parameter. Names look like: "
                f"{', '.join(names[:: max(1, len(names) // 5)][:6])}."
            )
        (excepted if pattern.startswith("!") else matched).update(found)
    return [name for name in names if name in matched - excepted]


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop training the parameters that the patterns match; returns their names."""
    parameters = dict(model.named_parameters())
    frozen = matching_parameters(parameters, patterns)
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen
