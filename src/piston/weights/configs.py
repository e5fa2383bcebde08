"""The configuration of a checkpoint: read from its config.json, or inferred from its tensors.

Shapes show widths, depths, vocabulary, image size and action dimension. They do not show the
horizon, the prompt length or the cameras: those come from the config.json of openpi, LeRobot or a
reference case if there is one, else they are the usual ones of the family. The number of heads is
visible in the JAX layout only; elsewhere a part must have a known size, or config.json states it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from piston.files import read_json_object
from piston.models.configs import (
    GEMMA,
    VISION,
    GemmaSize,
    LoRA,
    ModelConfig,
    Pi0Config,
    Pi0FASTConfig,
    VisionSize,
    size_name,
)
from piston.serialization import from_json
from piston.weights.expected import CheckpointError, Shape

CONFIG = "config.json"
OWN_FORMAT = "piston"
VERSION = 1

_FAMILIES = ("pi0", "pi05", "pi0_fast")
_PRECISIONS = ("float32", "bfloat16")
_IMAGES = "observation.images."
# Fields that tensors do not show; the alpha of adapters is the only other such number.
_UNSEEN = ("action_horizon", "max_token_len", "cameras", "dtype")
_UNSEEN_BY_FAMILY = {
    "π0.5": ("discrete_state_input",),
    "π0-FAST": ("action_dim", "max_decoding_steps"),
}
_VARIANT_KEYS = {"vlm": "paligemma_variant", "action_expert": "action_expert_variant"}
_KNOWN_VISION_HEADS = {1152: 16}  # by width: every public tower of this width is So400m

Size = TypeVar("Size", VisionSize, GemmaSize)


class Heads(NamedTuple):
    """How projections divide into heads."""

    vision: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; anything else is a CheckpointError that names the file."""
    try:
        return read_json_object(path)
    except ValueError as error:
        found = str(error).removesuffix(".")
        raise CheckpointError(f"{found}. It is damaged; fetch or write it again.") from error


def own_config(path: Path) -> ModelConfig:
    """Read the model's part of the config.json that Piston writes beside the tensors."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; it describes the model beside it. Copy it from where the model "
            "was written, or give the model's configuration."
        )
    data = read_object(path)
    if data.get("format") != OWN_FORMAT or "model" not in data:
        raise CheckpointError(
            f"{path} was not written by Piston (it has no format 'piston' with a model), but the "
            "tensors beside it were. Copy config.json from where the model was written."
        )
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {data.get('version')!r}, expected {VERSION}. "
            "Update Piston, or write the checkpoint again with this version."
        )
    try:
        config: ModelConfig = from_json(data["model"], ModelConfig, f"{path}: model")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return config


def declared_fields(path: Path) -> dict[str, Any]:
    """Read the fields of our configurations that a foreign config.json states.

    Return nothing where there is no such file or it is of an unknown kind.
    """
    data = read_object(path) if path.is_file() else {}
    if data.get("type") in _FAMILIES:
        declared = _from_lerobot(data)
    elif data.get("model") in _FAMILIES and isinstance(data.get("vision"), dict):
        declared = _from_sizes(data, path)
    elif "paligemma_variant" in data:
        same = ("action_dim", "action_horizon", "max_token_len", "discrete_state_input")
        declared = {name: data.get(name) for name in same}
        declared["dtype"] = data.get("precision")
    else:
        return {}
    for expert, key in _VARIANT_KEYS.items():
        declared.setdefault(expert, data.get(key))
    if declared.get("dtype") not in _PRECISIONS:
        declared.pop("dtype", None)
    return {name: value for name, value in declared.items() if value is not None}


def _from_lerobot(data: Mapping[str, Any]) -> dict[str, Any]:
    cameras = tuple(
        name.removeprefix(_IMAGES)
        for name, feature in (data.get("input_features") or {}).items()
        if name.startswith(_IMAGES) and feature.get("type") == "VISUAL"
    )
    fast = data["type"] == "pi0_fast"
    return {
        "action_dim": data.get("max_action_dim"),
        "action_horizon": data.get("chunk_size"),
        # For π0-FAST ours includes the action tokens, LeRobot's does not.
        "max_token_len": None if fast else data.get("tokenizer_max_length"),
        "dtype": data.get("dtype"),
        "cameras": cameras or None,
    }


def _from_sizes(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Read the config.json of a reference case, which lists all sizes of every part."""
    adapters = data.get("lora") or {}

    def expert(name: str) -> GemmaSize:
        lora = LoRA(**adapters[name]) if name in adapters else None
        return GemmaSize(**data[name], lora=lora)

    same = ("action_dim", "action_horizon", "max_token_len", "max_decoding_steps")
    try:
        return {
            **{name: data.get(name) for name in same},
            "vision": VisionSize(**data["vision"]),
            "vlm": expert("vlm"),
            "action_expert": expert("expert") if "expert" in data else None,
            "cameras": tuple(data["image_keys"]) if "image_keys" in data else None,
        }
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} lists the sizes of a {data['model']} model, but not as expected: {error}. "
            "Correct it, or remove it and give the model's configuration."
        ) from error


def infer_config(
    shapes: Mapping[str, Shape], heads: Heads | None, declared: Mapping[str, Any]
) -> ModelConfig:
    """Return a configuration whose model has tensors of these shapes, under our names."""
    found = _Shapes(shapes)
    vocab_size, _ = found.shape("vlm.embedding.weight", 2)
    tokens, _ = found.shape("vision.position_embedding", 2)
    vision = _vision_size(found, heads, declared.get("vision"))
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise CheckpointError(
            f"vision.position_embedding has {tokens} rows, which is not a square number."
        )
    fast = "suffix.action_in.weight" not in shapes and not found.depth("action_expert.layers")
    family = Pi0FASTConfig if fast else Pi0Config
    fields = {field.name for field in dataclasses.fields(family)}
    common: dict[str, Any] = {
        **{name: value for name, value in declared.items() if name in fields},
        "vision": vision,
        "vlm": _gemma_size(found, "vlm", heads, declared.get("vlm")),
        "vocab_size": vocab_size,
        "image_size": side * vision.patch,
    }
    if fast:
        return Pi0FASTConfig(**common)
    common["action_dim"] = found.shape("suffix.action_in.weight", 2)[1]
    stated = declared.get("action_expert")
    common["action_expert"] = _gemma_size(found, "action_expert", heads, stated)
    return Pi0Config(**common, pi05="suffix.time_in.weight" in shapes)


def assumed_fields(config: ModelConfig, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for which `infer_config` took the family's usual value."""
    unseen = (*_UNSEEN, *_UNSEEN_BY_FAMILY.get(config.family, ()))
    resolved = {"max_token_len": "prompt_length", "discrete_state_input": "state_in_prompt"}
    assumed = {n: getattr(config, resolved.get(n, n)) for n in unseen if n not in declared}
    for expert in ("vlm", "action_expert"):
        size = getattr(config, expert, None)
        if size is not None and size.lora is not None and declared.get(expert) != size:
            assumed[f"{expert}.lora.alpha"] = size.lora.alpha
    return assumed


class _Shapes:
    """Shapes by name, with an error that says why a tensor is needed."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes

    def shape(self, name: str, rank: int) -> Shape:
        shape = self._shapes.get(name)
        if shape is None or len(shape) != rank:
            found = "is missing" if shape is None else f"has shape {shape}"
            raise CheckpointError(
                f"{name} {found}, so the model's sizes cannot be inferred from the checkpoint. "
                "Fetch or write it again, or give the configuration to see all differences."
            )
        return shape

    def depth(self, prefix: str) -> int:
        """Return one more than the highest layer number under the prefix."""
        pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
        layers = {int(m[1]) for name in self._shapes if (m := pattern.match(name))}
        return max(layers, default=-1) + 1

    def lora(self, layer: str) -> LoRA | None:
        names = {kind: f"{layer}.{kind}.lora_a" for kind in ("attention.query", "mlp.gate")}
        adapted = {kind: name in self._shapes for kind, name in names.items()}
        ranks = [self.shape(names[kind], 3)[1] for kind in names if adapted[kind]]
        if not ranks:
            return None
        alpha = float(ranks[0])  # is not stored; it equals the rank in every release
        return LoRA(ranks[0], alpha, adapted["attention.query"], adapted["mlp.gate"])


def _vision_size(found: _Shapes, heads: Heads | None, stated: Any) -> VisionSize:
    width, _, patch, _ = found.shape("vision.patch_embedding.weight", 4)
    mlp_dim, _ = found.shape("vision.blocks.0.mlp.up.weight", 2)
    sizes = (width, found.depth("vision.blocks"), mlp_dim)

    def fits(size: VisionSize) -> bool:
        same = (size.width, size.depth, size.mlp_dim, size.patch) == (*sizes, patch)
        return same and (heads is None or heads.vision == size.num_heads)

    if isinstance(stated, VisionSize):
        return _agreeing("vision", stated, fits(stated))
    for known in VISION.values():
        if fits(known):
            return known
    num_heads = heads.vision if heads else _KNOWN_VISION_HEADS.get(width)
    if num_heads is None:
        raise CheckpointError(
            f"A vision tower of width {width} has no known size, and files of this format do not "
            "show its number of heads. Give the model's configuration."
        )
    return VisionSize(*sizes, num_heads, patch)


def _gemma_size(found: _Shapes, expert: str, heads: Heads | None, stated: Any) -> GemmaSize:
    first = f"{expert}.layers.0"
    queries, width = found.shape(f"{first}.attention.query.weight", 2)
    keys, _ = found.shape(f"{first}.attention.key.weight", 2)
    mlp_dim, _ = found.shape(f"{first}.mlp.gate.weight", 2)
    depth, lora = found.depth(f"{expert}.layers"), found.lora(first)
    counts = (heads.num_heads, heads.num_kv_heads, heads.head_dim) if heads else None

    def fits(size: GemmaSize) -> bool:
        outputs = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
        found_sizes = (width, depth, mlp_dim, queries, keys)
        same = (size.width, size.depth, size.mlp_dim, *outputs) == found_sizes
        return same and counts in (None, (size.num_heads, size.num_kv_heads, size.head_dim))

    if isinstance(stated, GemmaSize):
        if lora and stated.lora:  # tensors do not show alpha
            lora = dataclasses.replace(lora, alpha=stated.lora.alpha)
        return _agreeing(expert, stated, fits(stated) and lora == stated.lora)
    if counts:
        return GemmaSize(width, depth, mlp_dim, *counts, lora)
    named = [GEMMA[stated]] if stated in GEMMA else []
    for known in [*named, *GEMMA.values()]:
        if fits(known):
            return dataclasses.replace(known, lora=lora)
    raise CheckpointError(
        f"{expert} (width {width}, depth {depth}, mlp {mlp_dim}, queries of {queries}, keys of "
        f"{keys}) has no known size, and files of this format do not show its number of heads. "
        "Give the model's configuration."
    )


def _agreeing(part: str, stated: Size, agrees: bool) -> Size:
    if agrees:
        return stated
    raise CheckpointError(
        f"config.json beside the tensors states {part} as {size_name(stated)}, but the tensors "
        "have another size. Correct or remove it, or give the model's configuration."
    )
