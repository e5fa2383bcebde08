"""The table of names of openpi's PyTorch models and of LeRobot's.

Both build on Hugging Face's PaliGemma and Gemma, which have our layouts: only names differ.
LeRobot's names start with `model.`; older LeRobot files have the module tree of older libraries.
In the tables `*` stands for the number of the layer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from piston.weights.expected import CheckpointError

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
    "layers.*.self_attn.q_proj.weight": "layers.*.attention.query.weight",
    "layers.*.self_attn.k_proj.weight": "layers.*.attention.key.weight",
    "layers.*.self_attn.v_proj.weight": "layers.*.attention.value.weight",
    "layers.*.self_attn.o_proj.weight": "layers.*.attention.output.weight",
    "layers.*.mlp.gate_proj.weight": "layers.*.mlp.gate.weight",
    "layers.*.mlp.up_proj.weight": "layers.*.mlp.up.weight",
    "layers.*.mlp.down_proj.weight": "layers.*.mlp.down.weight",
    "layers.*.input_layernorm.weight": "layers.*.attention_norm.scale",
    "layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm.scale",
    "norm.weight": "norm.scale",
}
_ADAPTIVE = {
    "layers.*.input_layernorm.dense": "layers.*.attention_norm.modulation",
    "layers.*.post_attention_layernorm.dense": "layers.*.mlp_norm.modulation",
    "norm.dense": "norm.modulation",
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


def _with_leaves(table: Mapping[str, str], theirs: str, ours: str) -> dict[str, str]:
    """Return rows for the weight and the bias of each module."""
    return {
        f"{theirs}{their}.{leaf}": f"{ours}{our}.{leaf}"
        for their, our in table.items()
        for leaf in ("weight", "bias")
    }


TABLE: dict[str, str] = {
    **_with_leaves(_VISION, _VISION_TREE, "vision."),
    f"{_VISION_TREE}embeddings.position_embedding.weight": "vision.position_embedding",
    **_with_leaves({"multi_modal_projector.linear": "head"}, _PALIGEMMA, "vision."),
    EMBEDDING: "vlm.embedding.weight",
    **{f"{_VLM_TREE}{theirs}": f"vlm.{ours}" for theirs, ours in _GEMMA.items()},
    **{f"{_EXPERT_TREE}{theirs}": f"action_expert.{ours}" for theirs, ours in _GEMMA.items()},
    **_with_leaves(_ADAPTIVE, _EXPERT_TREE, "action_expert."),
    **_with_leaves(SUFFIX, "", "suffix."),
}

_NO_VOCABULARY = "the action expert has no vocabulary, so this is never used"
_STATISTICS = "statistics of a data set, which belong in norm_stats.json"
_TIED = "the output head is tied to the embedding table, which is kept once"
_DROPPED = {
    "paligemma_with_expert.gemma_expert.lm_head.weight": _NO_VOCABULARY,
    f"{_EXPERT_TREE}embed_tokens.weight": _NO_VOCABULARY,
}
_STATISTICS_TREES = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")

# The module tree before `transformers` 4.52, which older LeRobot files have, below `paligemma`.
_OLDER_TREE = {
    "language_model.model.": _VLM_TREE,
    "language_model.lm_head.": OUTPUT_HEAD.removesuffix("weight"),
    "vision_tower.": f"{_PALIGEMMA}vision_tower.",
    "multi_modal_projector.": f"{_PALIGEMMA}multi_modal_projector.",
}


@dataclasses.dataclass(frozen=True)
class Translation:
    """Foreign names that are used, deliberately dropped, or unknown."""

    format: str
    used: dict[str, str]  # our name → foreign name
    dropped: dict[str, str]  # foreign name → reason
    unknown: list[str]
    # The foreign name of a stored output head, which must equal the embedding table.
    output_head: str | None


def translate(names: Iterable[str]) -> Translation:
    """Sort foreign names; every one is in exactly one of the three groups."""
    names = sorted(names)
    plain = {name: _plain(name) for name in names}
    has_embedding = EMBEDDING in plain.values()
    used: dict[str, str] = {}
    dropped: dict[str, str] = {}
    unknown: list[str] = []
    output_head = None
    for name in names:
        if plain[name] == OUTPUT_HEAD and has_embedding:
            dropped[name], output_head = _TIED, name
        elif plain[name] in _DROPPED:
            dropped[name] = _DROPPED[plain[name]]
        elif plain[name].startswith(_STATISTICS_TREES):
            dropped[name] = _STATISTICS
        elif ours := _our_name(plain[name]):
            if ours in used:
                raise CheckpointError(
                    f"{used[ours]} and {name} both are {ours}. Remove one of them from the file."
                )
            used[ours] = name
        else:
            unknown.append(name)
    prefixed = any(name.startswith("model.") for name in names)
    format_ = "lerobot" if prefixed else "openpi-pytorch"
    return Translation(format_, used, dropped, unknown, output_head)


def is_pytorch_name(name: str) -> bool:
    return _plain(name).startswith("paligemma_with_expert.")


def _plain(name: str) -> str:
    """Return a name without LeRobot's prefix, in today's module tree."""
    name = name.removeprefix("model.")
    older = name.removeprefix("paligemma_with_expert.paligemma.")
    for old, new in _OLDER_TREE.items():
        if older != name and older.startswith(old):
            return new + older.removeprefix(old)
    return name


def _our_name(name: str) -> str | None:
    if name == OUTPUT_HEAD:  # the tied table is stored under this name only
        name = EMBEDDING
    numbered = re.fullmatch(r"(.*\.layers\.)(\d+)(\..*)", name)
    if numbered is None:
        return TABLE.get(name)
    before, number, after = numbered.groups()
    template = TABLE.get(f"{before}*{after}")
    return None if template is None else template.replace("*", number)
