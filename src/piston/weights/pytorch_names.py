"""The table of names of openpi's PyTorch models and of LeRobot's.

Both build on Hugging Face's PaliGemma and Gemma, which have our layouts: only names differ.
LeRobot's names start with `model.`; older LeRobot files have the module tree of older libraries.
In the tables `*` stands for the number of the layer. The same table is used to read and to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from piston.weights.tensors import CheckpointError

_PALIGEMMA = "paligemma_with_expert.paligemma.model."
_VISION_TREE = f"{_PALIGEMMA}vision_tower.vision_model."
_VLM_TREE = f"{_PALIGEMMA}language_model."
_EXPERT_TREE = "paligemma_with_expert.gemma_expert.model."

EMBEDDING = f"{_VLM_TREE}embed_tokens.weight"
OUTPUT_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"

_VISION = {
    "embeddings.patch_embedding": "patch_embedding",
    "encoder.layers.*.layer_norm1": "blocks.*.attention_norm",
    "encoder.layers.*.layer_norm2": "blocks.*.mlp_norm",
    "encoder.layers.*.self_attn.q_proj": "blocks.*.attention.query",
    "encoder.layers.*.self_attn.k_proj": "blocks.*.attention.key",
    "encoder.layers.*.self_attn.v_proj": "blocks.*.attention.value",
    "encoder.layers.*.self_attn.out_proj": "blocks.*.attention.output",
    "encoder.layers.*.mlp.fc1": "blocks.*.mlp.up",
    "encoder.layers.*.mlp.fc2": "blocks.*.mlp.down",
    "post_layernorm": "norm",
}
_GEMMA = {
    "layers.*.self_attn.q_proj": "layers.*.attention.query",
    "layers.*.self_attn.k_proj": "layers.*.attention.key",
    "layers.*.self_attn.v_proj": "layers.*.attention.value",
    "layers.*.self_attn.o_proj": "layers.*.attention.output",
    "layers.*.mlp.gate_proj": "layers.*.mlp.gate",
    "layers.*.mlp.up_proj": "layers.*.mlp.up",
    "layers.*.mlp.down_proj": "layers.*.mlp.down",
}
_GEMMA_NORMS = {
    "layers.*.input_layernorm": "layers.*.attention_norm",
    "layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "norm": "norm",
}
# The same modules as in the JAX tree.
SUFFIX = {
    "state_proj": "state",
    "action_in_proj": "action_in",
    "action_out_proj": "action_out",
    "action_time_mlp_in": "time_action_in",
    "action_time_mlp_out": "time_action_out",
    "time_mlp_in": "time_in",
    "time_mlp_out": "time_out",
}
TABLE: dict[str, str] = {
    EMBEDDING: "vlm.embedding.weight",
    f"{_VISION_TREE}embeddings.position_embedding.weight": "vision.position_embedding",
}
_modules = {f"{_PALIGEMMA}multi_modal_projector.linear": "vision.head"}
_modules |= {_VISION_TREE + theirs: f"vision.{ours}" for theirs, ours in _VISION.items()}
_modules |= {theirs: f"suffix.{ours}" for theirs, ours in SUFFIX.items()}
for _tree, _expert in {_VLM_TREE: "vlm.", _EXPERT_TREE: "action_expert."}.items():
    _modules |= {_tree + theirs: _expert + ours for theirs, ours in _GEMMA.items()}
    for _theirs, _ours in _GEMMA_NORMS.items():
        _modules[f"{_tree}{_theirs}.dense"] = f"{_expert}{_ours}.modulation"
        TABLE[f"{_tree}{_theirs}.weight"] = f"{_expert}{_ours}.scale"
for _leaf in (".weight", ".bias"):
    TABLE |= {theirs + _leaf: ours + _leaf for theirs, ours in _modules.items()}

_OURS = {ours: theirs for theirs, ours in TABLE.items()}
_LAYER = re.compile(r"(?<=\.layers\.|\.blocks\.)\d+(?=\.)")

EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
_NO_VOCABULARY = "the action expert has no vocabulary, so this is never used"
_STATISTICS = "statistics of a data set, which belong in norm_stats.json"
TIED = "the output head is tied to the embedding table, which is kept once"
# Beginnings of names that are deliberately not used, with the reason.
_DROPPED = {
    EXPERT_HEAD: _NO_VOCABULARY,
    f"{_EXPERT_TREE}embed_tokens.weight": _NO_VOCABULARY,
    "normalize_inputs.": _STATISTICS,
    "normalize_targets.": _STATISTICS,
    "unnormalize_outputs.": _STATISTICS,
}

# The module tree before `transformers` 4.52, which older LeRobot files have, below `paligemma`.
_OLDER_TREE = {
    "language_model.model.": _VLM_TREE,
    "language_model.lm_head.": OUTPUT_HEAD.removesuffix("weight"),
    "vision_tower.": f"{_PALIGEMMA}vision_tower.",
    "multi_modal_projector.": f"{_PALIGEMMA}multi_modal_projector.",
}


class Translation(NamedTuple):
    """Foreign names that are used, deliberately dropped, or unknown."""

    used: dict[str, str]  # our name → foreign name
    dropped: dict[str, str]  # foreign name → reason
    unknown: list[str]


def translate(names: Iterable[str]) -> Translation:
    """Sort foreign names; every one is in exactly one of the three groups."""
    plain = {name: plain_name(name) for name in sorted(names)}
    found = Translation({}, {}, [])
    # The output head may be stored beside the table that it is tied to, or alone.
    dropped = {**_DROPPED, OUTPUT_HEAD: TIED} if EMBEDDING in plain.values() else _DROPPED
    for name, known in plain.items():
        reason = next((why for start, why in dropped.items() if known.startswith(start)), None)
        ours = _look_up(TABLE, EMBEDDING if known == OUTPUT_HEAD else known)
        if reason is not None:
            found.dropped[name] = reason
        elif ours is None:
            found.unknown.append(name)
        else:
            if ours in found.used:
                both = f"{found.used[ours]} and {name}"
                raise CheckpointError(f"{both} both are {ours}. Remove one of them from the file.")
            found.used[ours] = name
    return found


def foreign_name(name: str) -> str | None:
    """Return openpi's name of one of our tensors; None if openpi's models have no such tensor."""
    return _look_up(_OURS, name)


def _look_up(table: Mapping[str, str], name: str) -> str | None:
    layer = _LAYER.search(name)
    found = table.get(name if layer is None else f"{name[: layer.start()]}*{name[layer.end() :]}")
    return found if found is None or layer is None else found.replace("*", layer[0])


def plain_name(name: str) -> str:
    """Return a name without LeRobot's prefix, in today's module tree."""
    name = name.removeprefix("model.")
    older = name.removeprefix("paligemma_with_expert.paligemma.")
    for old, new in _OLDER_TREE.items():
        if older != name and older.startswith(old):
            return new + older.removeprefix(old)
    return name
