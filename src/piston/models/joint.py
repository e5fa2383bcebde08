"""Experts that share one attention: each reads its own tokens with its own weights, and in every
layer its queries see the keys and values of all that was read before.

    layer   VLM weights                      action expert weights
      0     prefix ──► keys, values ─┬─────► suffix sees both
      1     prefix ──► keys, values ─┼─────► suffix sees both
      …                              │
     last   keys, values only ───────┘       suffix sees both ──► norm ──► output

An expert's tokens never see those of a later expert, so the experts run one after the other and
the result equals one attention over the concatenation. Any number of experts, of any widths, that
agree in depth and heads. Knows nothing of what the tokens mean.

Dims: b batch, t tokens, s tokens remembered including the new, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Bool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from piston.models.gemma import Expert, ExpertLayer, Memory, Modulation, Rope, Tokens


def empty_memories(expert: Expert, batch: int, capacity: int, like: Tensor) -> list[Memory]:
    """One memory per layer with room for `capacity` tokens, in the precision of `like`."""
    return [Memory.empty(expert.size, batch, capacity, like) for _ in expert.layers]


def read(
    expert: Expert,
    tokens: Tokens,
    memories: Sequence[Memory],
    rope: Rope,
    mask: Bool[Tensor, "b t s"] | None = None,
    modulations: Sequence[Modulation] | None = None,
    gradient_checkpointing: bool = False,
) -> tuple[Tokens, list[Memory]]:
    """The expert's output for its tokens after its last norm, and the memories with them added."""
    modulations = modulations or [None] * (2 * len(memories) + 1)
    extended = []
    for index, (layer, memory) in enumerate(zip(expert.layers, memories)):
        inputs = (tokens, memory, rope, mask, *modulations[2 * index : 2 * index + 2])
        tokens, memory = _run(layer, inputs, gradient_checkpointing)
        extended.append(memory)
    return expert.norm(tokens, modulations[-1])[0], extended


def remember(
    expert: Expert,
    tokens: Tokens,
    memories: Sequence[Memory],
    rope: Rope,
    mask: Bool[Tensor, "b t s"] | None = None,
    gradient_checkpointing: bool = False,
) -> list[Memory]:
    """The memories that `read` gives, without the work that only its output needs."""
    extended = []
    for layer, memory in zip(expert.layers[:-1], memories):
        inputs = (tokens, memory, rope, mask, None, None)
        tokens, memory = _run(layer, inputs, gradient_checkpointing)
        extended.append(memory)
    return [*extended, expert.layers[-1].remember(tokens, memories[-1], rope)]


def _run(
    layer: ExpertLayer, inputs: tuple[Any, ...], gradient_checkpointing: bool
) -> tuple[Tokens, Memory]:
    if gradient_checkpointing:
        return checkpoint(layer, *inputs, use_reentrant=False)
    return layer(*inputs)
