"""Equal layers of a stack: a compiler compiles one of them, and uses it for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a compiler that sees many calls of a function compile it once for all of them.

    This is for functions that take a module and tensors, return tensors and do not write into their
    inputs. The tensors of different calls must have the same shapes. Without a compiler it changes
    nothing, and a graph that `piston export` writes holds every call.
    """
    region = torch.compiler.nested_compile_region(function)

    def run(*inputs: Any) -> Any:
        return (region if torch.compiler.is_dynamo_compiling() else function)(*inputs)

    return run
