"""The configuration of a checkpoint: read from its config.json, or inferred from its tensors.

The tables of names of the foreign config.json files are used to read and to write them.

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
from typing import Any, TypeVar

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
from piston.weights.tensors import CheckpointError, Shape, read_object

CONFIG = "config.json"
OWN_FORMAT = "piston"
VERSION = 1

# LeRobot's names of the families.
FAMILIES = {"π0": "pi0", "π0.5": "pi05", "π0-FAST": "pi0_fast"}
IMAGES = "observation.images."
# Their names of fields of our configurations: LeRobot's, then openpi's and the reference cases'.
_VARIANTS = {"vlm": "paligemma_variant", "action_expert": "action_expert_variant"}
LEROBOT_NAMES = {
    **_VARIANTS,
    "action_dim": "max_action_dim",
    "action_horizon": "chunk_size",
    "max_token_len": "tokenizer_max_length",
    "max_decoding_steps": "max_decoding_steps",
    "dtype": "dtype",
}
_SAME = ("action_dim", "action_horizon", "max_token_len", "max_decoding_steps")
OPENPI_NAMES = {
    **{name: name for name in (*_SAME, "discrete_state_input")},
    "dtype": "precision",
    **_VARIANTS,
}
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(_SAME, int | None),
    "discrete_state_input": bool | None,
}
_SO400M_WIDTH, _SO400M_HEADS = 1152, 16  # every public vision tower of this width is So400m
# Which property tells the value of a field that may be None.
_RESOLVED = {"max_token_len": "prompt_length", "discrete_state_input": "state_in_prompt"}

Size = TypeVar("Size", VisionSize, GemmaSize)


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
    names = OPENPI_NAMES
    more: dict[str, Any] = {}
    if data.get("type") in FAMILIES.values():
        names = LEROBOT_NAMES
        features = data.get("input_features") or {}
        if not isinstance(features, dict) or not all(
            isinstance(f, dict) for f in features.values()
        ):
            raise CheckpointError(f"{path}: input_features does not describe each feature.")
        images = {name: f for name, f in features.items() if name.startswith(IMAGES)}
        cameras = [name for name, f in images.items() if f.get("type") == "VISUAL"]
        more["cameras"] = tuple(name.removeprefix(IMAGES) for name in cameras) or None
        if data["type"] == "pi0_fast":  # ours includes the action tokens, LeRobot's does not
            more["max_token_len"] = None
    elif data.get("model") in FAMILIES.values() and isinstance(data.get("vision"), dict):
        more = _case_sizes(data, path)
    elif "paligemma_variant" not in data:
        return {}
    stated = {ours: data.get(theirs) for ours, theirs in names.items()}
    for name in stated.keys() & _TYPES:
        try:
            from_json(stated[name], _TYPES[name], f"{path}: {names[name]}")
        except ValueError as error:
            raise CheckpointError(f"{error} Correct it, or remove the file.") from error
    stated |= more
    if stated["dtype"] not in ("float32", "bfloat16"):
        stated["dtype"] = None
    return {name: value for name, value in stated.items() if value is not None}


def foreign_fields(config: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Return what a foreign config.json states of a configuration, by the table of its names."""
    values = {theirs: getattr(config, _RESOLVED.get(n, n), None) for n, theirs in names.items()}
    return {
        theirs: size_name(value) if isinstance(value, GemmaSize) else value
        for theirs, value in values.items()
        if value is not None
    }


def unusual_fields(config: ModelConfig) -> dict[str, str]:
    """Return the sizes and the like in which a model differs from the public one of its family."""
    usual = Pi0Config(pi05=config.pi05) if isinstance(config, Pi0Config) else Pi0FASTConfig()
    sizes = ("vision", "vlm", "action_expert", "vocab_size", "image_size")
    names = [name for name in (*sizes, "tokenizer", "state_in_prompt") if hasattr(usual, name)]
    values = {n: getattr(config, n) for n in names if getattr(config, n) != getattr(usual, n)}
    return {
        name: size_name(value) if isinstance(value, VisionSize | GemmaSize) else str(value)
        for name, value in values.items()
    }


def _case_sizes(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Read all sizes of every part from the config.json of a reference case."""
    adapters = data.get("lora") or {}

    def expert(name: str) -> GemmaSize:
        lora = LoRA(**adapters[name]) if name in adapters else None
        return GemmaSize(**data[name], lora=lora)

    try:
        return {
            "vision": VisionSize(**data["vision"]),
            "vlm": expert("vlm"),
            "action_expert": expert("expert") if "expert" in data else None,
            "cameras": from_json(data.get("image_keys"), tuple[str, ...] | None, "image_keys"),
        }
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} lists the sizes of a {data['model']} model, but not as expected: {error}. "
            "Correct it, or remove it and give the model's configuration."
        ) from error


def infer_config(
    shapes: Mapping[str, Shape],
    heads: Mapping[str, Mapping[str, int]],
    declared: Mapping[str, Any],
) -> tuple[ModelConfig, dict[str, Any]]:
    """Return a configuration whose model has tensors of these shapes, under our names.

    `heads` are the numbers of heads of each part where the format shows them. Also return the
    fields that were assumed: neither the shapes nor config.json state them.
    """
    tokens, _ = _shape(shapes, "vision.position_embedding", 2)
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise CheckpointError(
            f"vision.position_embedding has {tokens} rows, which is not a square number."
        )
    vision = _vision_size(shapes, heads.get("vision", {}), declared.get("vision"))
    found: dict[str, Any] = {
        "vocab_size": _shape(shapes, "vlm.embedding.weight", 2)[0],
        "vision": vision,
        "image_size": side * vision.patch,
    }
    family: type[Pi0Config | Pi0FASTConfig] = Pi0FASTConfig
    experts = ["vlm"]
    if "suffix.action_in.weight" in shapes or _depth(shapes, "action_expert.layers"):
        family, experts = Pi0Config, ["vlm", "action_expert"]
        found["action_dim"] = _shape(shapes, "suffix.action_in.weight", 2)[1]
        found["pi05"] = "suffix.time_in.weight" in shapes
    assumed = {}
    for name in experts:
        stated = declared.get(name)
        size = found[name] = _expert_size(shapes, name, heads.get(name, {}), stated)
        if size.lora is not None and stated != size:
            assumed[f"{name}.lora.alpha"] = size.lora.alpha
    fields = [field.name for field in dataclasses.fields(family)]
    config = family(**{n: v for n, v in declared.items() if n in fields} | found)
    unseen = [name for name in fields if name not in found and name not in declared]
    return config, {n: getattr(config, _RESOLVED.get(n, n)) for n in unseen} | assumed


def _shape(shapes: Mapping[str, Shape], name: str, rank: int) -> Shape:
    shape = shapes.get(name)
    if shape is None or len(shape) != rank:
        found = "is missing" if shape is None else f"has shape {shape}"
        raise CheckpointError(
            f"{name} {found}, so the model's sizes cannot be inferred from the checkpoint. "
            "Fetch or write it again, or give the configuration to see all differences."
        )
    return shape


def _depth(shapes: Mapping[str, Shape], prefix: str) -> int:
    """Return one more than the highest layer number under the prefix."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    return max((int(m[1]) for name in shapes if (m := pattern.match(name))), default=-1) + 1


def _vision_size(shapes: Mapping[str, Shape], heads: Mapping[str, int], stated: Any) -> VisionSize:
    width, _, patch, _ = _shape(shapes, "vision.patch_embedding.weight", 4)
    mlp_dim, _ = _shape(shapes, "vision.blocks.0.mlp.up.weight", 2)
    depth = _depth(shapes, "vision.blocks")
    visible = {"width": width, "depth": depth, "mlp_dim": mlp_dim, "patch": patch, **heads}
    if width == _SO400M_WIDTH and stated is None:
        visible.setdefault("num_heads", _SO400M_HEADS)
    return _choose_size("vision", VisionSize, VISION, visible, stated)


def _expert_size(
    shapes: Mapping[str, Shape], expert: str, heads: Mapping[str, int], stated: Any
) -> GemmaSize:
    first = f"{expert}.layers.0"
    queries, width = _shape(shapes, f"{first}.attention.query.weight", 2)
    keys, _ = _shape(shapes, f"{first}.attention.key.weight", 2)
    mlp_dim, _ = _shape(shapes, f"{first}.mlp.gate.weight", 2)
    depth = _depth(shapes, f"{expert}.layers")
    visible = {"width": width, "depth": depth, "mlp_dim": mlp_dim, "queries": queries, "keys": keys}
    names = {kind: f"{first}.{kind}.lora_a" for kind in ("attention.query", "mlp.gate")}
    ranks = {k: _shape(shapes, name, 3)[1] for k, name in names.items() if name in shapes}
    lora = None
    if ranks:
        rank = next(iter(ranks.values()))
        # Alpha is not stored; it equals the rank in every release.
        alpha = stated.lora.alpha if isinstance(stated, GemmaSize) and stated.lora else float(rank)
        lora = LoRA(rank, alpha, "attention.query" in ranks, "mlp.gate" in ranks)
    known = {name: dataclasses.replace(size, lora=lora) for name, size in GEMMA.items()}
    return _choose_size(expert, GemmaSize, known, {**visible, **heads, "lora": lora}, stated)


def _choose_size(
    part: str, kind: type[Size], known: Mapping[str, Size], visible: Mapping[str, Any], stated: Any
) -> Size:
    """Return the stated size if it has the visible numbers, else a known one, else a new one."""
    is_size = isinstance(stated, kind)
    by_name = [known[name] for name in sorted(known, key=lambda name: name != stated)]
    for size in [stated] if is_size else by_name:
        numbers = dict(vars(size))
        if isinstance(size, GemmaSize):
            numbers["queries"] = size.num_heads * size.head_dim
            numbers["keys"] = size.num_kv_heads * size.head_dim
        if all(numbers[name] == number for name, number in visible.items()):
            return size
    numbers_seen = ", ".join(f"{name} {n}" for name, n in visible.items() if n is not None)
    option = f"--{part.replace('_', '-')}"
    if is_size:
        raise CheckpointError(
            f"{part} is stated as {size_name(stated)} ({option}, or config.json beside the "
            f"tensors), but the tensors have another size: {numbers_seen}. Correct or remove it."
        )
    fields = {*_numbers(kind), *({"lora"} & visible.keys())}
    if not fields <= visible.keys():
        raise CheckpointError(
            f"{part} ({numbers_seen}) has no known size, and files of this format do not show its "
            "number of heads. Name a preset with a model of these sizes (--preset NAME), or give a "
            f"known size to `piston convert` ({option} {'|'.join(known)})."
        )
    return kind(**{name: visible[name] for name in fields})


def _numbers(kind: type[Size]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in ("stem", "lora")]
