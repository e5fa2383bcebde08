"""The configuration that a checkpoint's tensors imply.

Shapes show widths, depths, vocabulary, image size and action dimension. They do not show what
leaves no trace in the tensors (horizon, prompt length, camera names): those come from files beside
the tensors where they say so, else are the family's usual ones. Numbers of heads show in the JAX
layout only; elsewhere the sizes have to be known ones or stated beside the tensors.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from piston.models.configs import ModelConfig, Pi0Config, Pi0FASTConfig
from piston.models.variants import GEMMA, VISION, GemmaSize, LoRA, VisionSize, size_name
from piston.weights.errors import CheckpointError, Shape
from piston.weights.source import Heads

# What leaves no trace in the tensors, by family; adapters' alpha is the other such number.
_UNSEEN = ("action_horizon", "max_token_len", "cameras", "dtype")
_UNSEEN_BY_FAMILY = {
    "π0.5": ("discrete_state_input",),
    "π0-FAST": ("action_dim", "max_decoding_steps"),
}
_KNOWN_VISION_HEADS = {1152: 16}  # by width: every public tower of this width is So400m


Size = TypeVar("Size", VisionSize, GemmaSize)


class _Shapes:
    """Look-up with an error that says what cannot be told without the tensor."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def of(self, name: str, rank: int) -> Shape:
        shape = self._shapes.get(name)
        if shape is None or len(shape) != rank:
            found = "is missing" if shape is None else f"has shape {shape}"
            raise CheckpointError(
                f"{name} {found}, so the model's sizes cannot be told from the checkpoint. Fetch "
                "or write it again, or give the configuration to see all that is wrong."
            )
        return shape

    def count(self, prefix: str) -> int:
        """One more than the highest layer number under the prefix."""
        pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
        numbers = {int(m[1]) for name in self._shapes if (m := pattern.match(name))}
        return max(numbers, default=-1) + 1


def infer_config(
    shapes: Mapping[str, Shape], heads: Heads | None, declared: Mapping[str, Any]
) -> ModelConfig:
    """A configuration whose model has tensors of these shapes, under our names."""
    look = _Shapes(shapes)
    vocab_size, _ = look.of("vlm.embedding.weight", 2)
    tokens, _ = look.of("vision.position_embedding", 2)
    vision = _vision_size(look, heads, declared)
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise CheckpointError(f"vision.position_embedding has {tokens} rows, which are no square.")
    fast = "suffix.action_in.weight" not in look and not look.count("action_expert.layers")
    family = Pi0FASTConfig if fast else Pi0Config
    known = {field.name for field in dataclasses.fields(family)}
    common: dict[str, Any] = {
        **{name: value for name, value in declared.items() if name in known},
        "vision": vision,
        "vlm": _gemma_size(look, "vlm", heads, declared),
        "vocab_size": vocab_size,
        "image_size": side * vision.patch,
    }
    if fast:
        return Pi0FASTConfig(**common)
    common["action_dim"] = look.of("suffix.action_in.weight", 2)[1]
    common["action_expert"] = _gemma_size(look, "action_expert", heads, declared)
    return Pi0Config(**common, pi05="suffix.time_in.weight" in look)


def assumed_fields(config: ModelConfig, declared: Mapping[str, Any]) -> dict[str, Any]:
    """What `infer_config` took as usual for the family, since no file says it, with the values."""
    unseen = (*_UNSEEN, *_UNSEEN_BY_FAMILY.get(config.family, ()))
    read = {"max_token_len": "prompt_length", "discrete_state_input": "state_in_prompt"}
    found = {n: getattr(config, read.get(n, n)) for n in unseen if n not in declared}
    for expert in ("vlm", "action_expert"):
        size = getattr(config, expert, None)
        if size is not None and size.lora is not None and declared.get(expert) != size:
            found[f"{expert}.lora.alpha"] = size.lora.alpha
    return found


def _vision_size(look: _Shapes, heads: Heads | None, declared: Mapping[str, Any]) -> VisionSize:
    width, _, patch, _ = look.of("vision.patch_embedding.weight", 4)
    depth = look.count("vision.blocks")
    mlp_dim, _ = look.of("vision.blocks.0.mlp.up.weight", 2)
    found = (width, depth, mlp_dim, patch)
    stated = declared.get("vision")
    if isinstance(stated, VisionSize):
        agrees = heads is None or heads.vision == stated.num_heads
        return _agreeing("vision", stated, agrees and _vision_numbers(stated) == found)
    if heads is not None:
        return VisionSize(width, depth, mlp_dim, heads.vision, patch)
    for known in VISION.values():
        if _vision_numbers(known) == found:
            return known
    if width not in _KNOWN_VISION_HEADS:
        raise CheckpointError(
            f"A vision tower of width {width} is none of the known ones, and files of this format "
            "do not show its number of heads. Give the model's configuration."
        )
    return VisionSize(width, depth, mlp_dim, _KNOWN_VISION_HEADS[width], patch)


def _gemma_size(
    look: _Shapes, expert: str, heads: Heads | None, declared: Mapping[str, Any]
) -> GemmaSize:
    first = f"{expert}.layers.0"
    queries, width = look.of(f"{first}.attention.query.weight", 2)
    keys, _ = look.of(f"{first}.attention.key.weight", 2)
    mlp_dim, _ = look.of(f"{first}.mlp.gate.weight", 2)
    depth = look.count(f"{expert}.layers")
    lora = _adapters(look, first)
    found = (width, depth, mlp_dim, queries, keys)
    counts = () if heads is None else (heads.num_heads, heads.num_kv_heads, heads.head_dim)
    stated = declared.get(expert)
    if isinstance(stated, GemmaSize):
        agrees = not counts or counts == (stated.num_heads, stated.num_kv_heads, stated.head_dim)
        agrees &= _gemma_numbers(stated) == found and _same_adapters(stated.lora, lora)
        return _agreeing(expert, stated, agrees)
    if counts:
        return GemmaSize(width, depth, mlp_dim, *counts, lora)
    candidates = [GEMMA[stated]] if stated in GEMMA else []
    for known in [*candidates, *GEMMA.values()]:
        if _gemma_numbers(known) == found:
            return dataclasses.replace(known, lora=lora)
    raise CheckpointError(
        f"{expert} (width {width}, depth {depth}, mlp {mlp_dim}, queries of {queries}, keys of "
        f"{keys}) is none of the known sizes, and files of this format do not show its number of "
        "heads. Give the model's configuration."
    )


def _vision_numbers(size: VisionSize) -> tuple[int, ...]:
    return size.width, size.depth, size.mlp_dim, size.patch


def _gemma_numbers(size: GemmaSize) -> tuple[int, ...]:
    queries, keys = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    return size.width, size.depth, size.mlp_dim, queries, keys


def _same_adapters(stated: LoRA | None, found: LoRA | None) -> bool:
    if stated is None or found is None:
        return stated is found
    return stated == dataclasses.replace(found, alpha=stated.alpha)


def _agreeing(part: str, stated: Size, agrees: bool) -> Size:
    if agrees:
        return stated
    raise CheckpointError(
        f"config.json beside the tensors states {part} as {size_name(stated)}, but the tensors are "
        "of another size. Correct or remove it, or give the model's configuration."
    )


def _adapters(look: _Shapes, layer: str) -> LoRA | None:
    adapted = {kind: f"{layer}.{kind}.lora_a" for kind in ("attention.query", "mlp.gate")}
    ranks = [look.of(name, 3)[1] for name in adapted.values() if name in look]
    if not ranks:
        return None
    return LoRA(
        ranks[0],
        alpha=float(ranks[0]),  # is not stored; it equals the rank in every release
        attention=adapted["attention.query"] in look,
        mlp=adapted["mlp.gate"] in look,
    )
