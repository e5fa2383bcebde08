"""The tree of openpi's JAX models, and ours: names, axes, and how one becomes the other.

    B layers, stacked on the first axis     D width     F mlp     N heads     K key heads
    H head size     R rank of an adapter     P patch     V vocabulary

A JAX kernel is (in, out), ours are (out, in). The action expert carries `_1` after the module's
name. Pure arithmetic on names and shapes: no file is read here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from piston.weights.errors import CheckpointError, Shape
from piston.weights.source import Heads


def same(x: Tensor) -> Tensor:
    return x


def _turn(x: Tensor) -> Tensor:
    return x.mT


def _conv(x: Tensor) -> Tensor:  # (P, P, 3, D) → (D, 3, P, P)
    return x.permute(3, 2, 0, 1)


def _heads_first(x: Tensor) -> Tensor:  # (N, D, H) → (N·H, D)
    return x.mT.flatten(0, 1)


def _heads_last(x: Tensor) -> Tensor:  # (D, N, H) → (N·H, D)
    return x.flatten(1).mT


def _from_heads(x: Tensor) -> Tensor:  # (N, H, D) → (D, N·H)
    return x.flatten(0, 1).mT


def _one_group(x: Tensor) -> Tensor:  # (in, out) → (1, out, in)
    return x.mT[None]


def _from_heads_in_one_group(x: Tensor) -> Tensor:  # (N, H, R) → (1, R, N·H)
    return x.flatten(0, 1).mT[None]


def _sum_of_heads(x: Tensor) -> Tensor:  # (N, R, D) → (1, D, R): every head adds to every output
    return x.sum(0, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).mT[None]


@dataclasses.dataclass(frozen=True)
class Part:
    """One of our tensors within a JAX array; `at` picks it on the axis after the layers."""

    name: str
    convert: Callable[[Tensor], Tensor] = same
    at: int | None = None


_VISION: dict[str, Part] = {
    "embedding/kernel": Part("patch_embedding.weight", _conv),
    "embedding/bias": Part("patch_embedding.bias"),
    "pos_embedding": Part("position_embedding", at=0),
    "Transformer/encoder_norm/scale": Part("norm.weight"),
    "Transformer/encoder_norm/bias": Part("norm.bias"),
    "head/kernel": Part("head.weight", _turn),
    "head/bias": Part("head.bias"),
}
_ATTENTION = "MultiHeadDotProductAttention_0"
_BLOCK: dict[str, Part] = {
    "LayerNorm_0/scale": Part("attention_norm.weight"),
    "LayerNorm_0/bias": Part("attention_norm.bias"),
    "LayerNorm_1/scale": Part("mlp_norm.weight"),
    "LayerNorm_1/bias": Part("mlp_norm.bias"),
    **{
        f"{_ATTENTION}/{name}/kernel": Part(f"attention.{name}.weight", _heads_last)
        for name in ("query", "key", "value")
    },
    **{
        f"{_ATTENTION}/{name}/bias": Part(f"attention.{name}.bias", torch.flatten)
        for name in ("query", "key", "value")
    },
    f"{_ATTENTION}/out/kernel": Part("attention.output.weight", _from_heads),
    f"{_ATTENTION}/out/bias": Part("attention.output.bias"),
    "MlpBlock_0/Dense_0/kernel": Part("mlp.up.weight", _turn),
    "MlpBlock_0/Dense_0/bias": Part("mlp.up.bias"),
    "MlpBlock_0/Dense_1/kernel": Part("mlp.down.weight", _turn),
    "MlpBlock_0/Dense_1/bias": Part("mlp.down.bias"),
}


def _each(convert: Callable[[Tensor], Tensor], *names: str) -> tuple[Part, ...]:
    return tuple(Part(name, convert, at) for at, name in enumerate(names))


def _projections(leaf: str, *names: str) -> tuple[str, ...]:
    return tuple(f"attention.{name}.{leaf}" for name in names)


# `{}` is where the action expert's `_1` stands.
_LAYER: dict[str, tuple[Part, ...]] = {
    "attn/q_einsum{}/w": (Part("attention.query.weight", _heads_first),),
    "attn/kv_einsum{}/w": _each(_heads_first, *_projections("weight", "key", "value")),
    # Instead of both where every head has keys of its own.
    "attn/qkv_einsum{}/w": _each(_heads_first, *_projections("weight", "query", "key", "value")),
    "attn/attn_vec_einsum{}/w": (Part("attention.output.weight", _from_heads),),
    "mlp{}/gating_einsum": _each(_turn, "mlp.gate.weight", "mlp.up.weight"),
    "mlp{}/linear": (Part("mlp.down.weight", _turn),),
    "pre_attention_norm{}/scale": (Part("attention_norm.scale"),),
    "pre_attention_norm{}/Dense_0/kernel": (Part("attention_norm.modulation.weight", _turn),),
    "pre_attention_norm{}/Dense_0/bias": (Part("attention_norm.modulation.bias"),),
    "pre_ffw_norm{}/scale": (Part("mlp_norm.scale"),),
    "pre_ffw_norm{}/Dense_0/kernel": (Part("mlp_norm.modulation.weight", _turn),),
    "pre_ffw_norm{}/Dense_0/bias": (Part("mlp_norm.modulation.bias"),),
    # Adapters, in the layout that models/lora.py describes.
    "attn/q_einsum{}/lora_a": (Part("attention.query.lora_a", _turn),),
    "attn/q_einsum{}/lora_b": (Part("attention.query.lora_b", _turn),),
    **{
        f"attn/{array}_einsum{{}}/{leaf}": _each(_turn, *_projections(leaf, *names))
        for array, names in {"kv": ("key", "value"), "qkv": ("query", "key", "value")}.items()
        for leaf in ("lora_a", "lora_b")
    },
    "attn/attn_vec_einsum{}/lora_a": (Part("attention.output.lora_a", _from_heads_in_one_group),),
    "attn/attn_vec_einsum{}/lora_b": (Part("attention.output.lora_b", _sum_of_heads),),
    "mlp{}/gating_einsum_lora_a": _each(_one_group, "mlp.gate.lora_a", "mlp.up.lora_a"),
    "mlp{}/gating_einsum_lora_b": _each(_one_group, "mlp.gate.lora_b", "mlp.up.lora_b"),
    "mlp{}/linear_lora_a": (Part("mlp.down.lora_a", _one_group),),
    "mlp{}/linear_lora_b": (Part("mlp.down.lora_b", _one_group),),
}
_FINAL_NORM: dict[str, Part] = {
    "final_norm{}/scale": Part("norm.scale"),
    "final_norm{}/Dense_0/kernel": Part("norm.modulation.weight", _turn),
    "final_norm{}/Dense_0/bias": Part("norm.modulation.bias"),
}
_SUFFIX = {
    "state_proj": "state",
    "action_in_proj": "action_in",
    "action_out_proj": "action_out",
    "action_time_mlp_in": "time_action_in",
    "action_time_mlp_out": "time_action_out",
    "time_mlp_in": "time_in",
    "time_mlp_out": "time_out",
}
_EXPERTS = {"": "vlm", "_1": "action_expert"}


@dataclasses.dataclass(frozen=True)
class Row:
    """What a JAX array holds. `stacked`: one of each part per layer, `*` in the names."""

    parts: tuple[Part, ...]
    stacked: bool = False


def _make_table() -> dict[str, Row]:
    table = {
        f"PaliGemma/img/{path}": Row((dataclasses.replace(part, name=f"vision.{part.name}"),))
        for path, part in _VISION.items()
    }
    for path, part in _BLOCK.items():
        ours = dataclasses.replace(part, name=f"vision.blocks.*.{part.name}")
        table[f"PaliGemma/img/Transformer/encoderblock/{path}"] = Row((ours,), stacked=True)
    table["PaliGemma/llm/embedder/input_embedding"] = Row((Part("vlm.embedding.weight"),))
    for mark, expert in _EXPERTS.items():
        for path, parts in _LAYER.items():
            named = tuple(
                dataclasses.replace(part, name=f"{expert}.layers.*.{part.name}") for part in parts
            )
            table[f"PaliGemma/llm/layers/{path.format(mark)}"] = Row(named, stacked=True)
        for path, part in _FINAL_NORM.items():
            ours = dataclasses.replace(part, name=f"{expert}.{part.name}")
            table[f"PaliGemma/llm/{path.format(mark)}"] = Row((ours,))
    for theirs, layer in _SUFFIX.items():
        table[f"{theirs}/kernel"] = Row((Part(f"suffix.{layer}.weight", _turn),))
        table[f"{theirs}/bias"] = Row((Part(f"suffix.{layer}.bias"),))
    return table


TABLE: dict[str, Row] = _make_table()


@dataclasses.dataclass(frozen=True)
class Slice:
    """One of our tensors: where it lies in its JAX array, and how to turn it."""

    name: str
    index: tuple[int, ...]
    convert: Callable[[Tensor], Tensor]
    shape: Shape


def plain_path(path: str) -> str:
    """Without the tree's own top (`params`) and leaf (`value`), which only some files have."""
    return path.removeprefix("params/").removesuffix("/value")


def slices(path: str, shape: Shape) -> list[Slice] | None:
    """What an array of this shape holds; None for a path that means nothing to us."""
    row = TABLE.get(path)
    if row is None:
        return None
    try:
        return _slices_of(row, torch.empty(shape, device="meta"))
    except (IndexError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has shape {shape}, which is not how the JAX models store "
            f"{', '.join(part.name for part in row.parts)}. Is this a checkpoint of openpi's?"
        ) from error


def _slices_of(row: Row, array: Tensor) -> list[Slice]:
    found = []
    for layer in range(array.shape[0]) if row.stacked else [None]:
        here = array if layer is None else array[layer]
        if row.parts[0].at is not None and here.shape[0] != len(row.parts):
            raise ValueError(f"expected {len(row.parts)} on the axis that is taken apart")
        for part in row.parts:
            one = here if part.at is None else here[part.at]
            index = tuple(i for i in (layer, part.at) if i is not None)
            name = part.name if layer is None else part.name.replace("*", str(layer))
            found.append(Slice(name, index, part.convert, tuple(part.convert(one).shape)))
    return found


def heads_of(shapes: Mapping[str, Shape]) -> Heads | None:
    """Numbers of heads, from the arrays that still keep them apart."""
    layers = "PaliGemma/llm/layers/attn"
    query = shapes.get(f"{layers}/q_einsum/w")  # (B, N, D, H)
    key_value = shapes.get(f"{layers}/kv_einsum/w")  # (B, 2, K, D, H)
    joined = shapes.get(f"{layers}/qkv_einsum/w")  # (B, 3, N, D, H)
    vision = shapes.get(  # (B, D, N, H)
        f"PaliGemma/img/Transformer/encoderblock/{_ATTENTION}/query/kernel"
    )
    if joined is not None and vision is not None:
        return Heads(vision[2], joined[2], joined[2], joined[4])
    if query is None or key_value is None or vision is None:
        return None
    return Heads(vision[2], query[1], key_value[2], query[3])
