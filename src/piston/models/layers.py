"""How the layers of a stack are run, one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def run_layer(
    layer: nn.Module, *inputs: Any, recompute: bool = False, in_place: bool = False
) -> Any:
    """Return the layer's output; with `recompute`, the backward pass computes it again.

    A compiler that sees a whole stack compiles one layer and uses it for all that have the same
    shapes. This is not possible `in_place`, for layers that write into their inputs, nor in a
    graph that is exported.
    """
    if recompute:
        return checkpoint(layer, *inputs, use_reentrant=False)
    if in_place or torch.compiler.is_exporting():
        return layer(*inputs)
    return _run_as_region(layer, *inputs)


@torch.compiler.nested_compile_region
def _run_as_region(layer: nn.Module, *inputs: Any) -> Any:
    return layer(*inputs)
