"""What every reader of a foreign or own format hands over: tensors under our names.

Knows nothing of any particular format, nor of the models that will hold the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from piston.weights.errors import Shape


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of ours: what it is, and how to fill memory with it."""

    shape: Shape
    dtype: torch.dtype
    # Fills a tensor of this shape, on any device and of any dtype.
    read_into: Callable[[Tensor], None]
    # The tensor itself without a copy, where the format allows it; the result may still be None.
    map: Callable[[], Tensor | None] = lambda: None

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(self.shape, dtype=dtype or self.dtype)
        self.read_into(tensor)
        return tensor


@dataclasses.dataclass(frozen=True)
class Heads:
    """How projections divide into heads: only the JAX layout still shows it."""

    vision: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint as its reader sees it."""

    format: str
    # Under our names, in the order in which reading them is cheapest.
    entries: Mapping[str, Entry]
    # Foreign name → why it is deliberately not used.
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Foreign names that mean nothing to us, with their shapes.
    unknown: Mapping[str, Shape] = dataclasses.field(default_factory=dict)
    heads: Heads | None = None
    # What files beside the tensors say: fields of our configurations.
    declared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Whether several threads may read at once, and gain by it.
    parallel: bool = False
