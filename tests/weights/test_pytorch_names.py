"""openpi's PyTorch names and LeRobot's: each used exactly once, or dropped for a stated reason."""

import json
from pathlib import Path

import pytest

from piston.models.configs import ModelConfig, Pi0Config, Pi0FASTConfig
from piston.weights import CheckpointError, expected_shapes
from piston.weights.configs import infer_config
from piston.weights.pytorch_names import TIED, translate

FULL_SIZE: dict[str, tuple[ModelConfig, str, set[str]]] = {
    "pi0_openpi_pytorch": (Pi0Config(), "openpi-pytorch", {"paligemma", "gemma_expert"}),
    "pi05_openpi_pytorch": (Pi0Config(pi05=True), "openpi-pytorch", {"paligemma", "gemma_expert"}),
    "pi0_lerobot": (Pi0Config(), "lerobot", {"paligemma", "gemma_expert"}),
    "pi05_lerobot": (Pi0Config(pi05=True), "lerobot", {"paligemma", "gemma_expert"}),
    "pi0_fast_lerobot": (Pi0FASTConfig(), "lerobot", {"paligemma"}),
}


def read_keys(reference: Path, name: str) -> dict[str, tuple[int, ...]]:
    keys = json.loads((reference / "checkpoint_keys" / f"{name}.json").read_text())
    return {key: tuple(shape) for key, (shape, _) in keys.items()}


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_names_map_one_to_one(reference, name):
    config, format_, heads = FULL_SIZE[name]
    keys = read_keys(reference, name)
    translation = translate(keys)
    used = list(translation.used.values())
    assert len(used) == len(set(used))
    assert sorted([*used, *translation.dropped]) == sorted(keys)  # each in exactly one place
    assert not translation.unknown
    assert {ours: keys[theirs] for ours, theirs in translation.used.items()} == expected_shapes(
        config
    )
    prefix = "model." if format_ == "lerobot" else ""
    assert set(translation.dropped) == {
        f"{prefix}paligemma_with_expert.{head}.lm_head.weight" for head in heads
    }


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_sizes_are_inferred_from_shapes_alone(reference, name):
    keys = read_keys(reference, name)
    translation = translate(keys)
    shapes = {ours: keys[theirs] for ours, theirs in translation.used.items()}
    assert infer_config(shapes, {}, {})[0] == FULL_SIZE[name][0]


EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_embedding_may_be_stored_under_either_tied_name(prefix):
    both = translate([prefix + EMBEDDING, prefix + HEAD])
    assert both.used == {"vlm.embedding.weight": prefix + EMBEDDING}
    assert both.dropped == {prefix + HEAD: TIED}
    for name in (EMBEDDING, HEAD):
        one = translate([prefix + name])
        assert one.used == {"vlm.embedding.weight": prefix + name}
        assert not one.dropped


def test_the_older_module_tree_of_lerobot_is_known():
    tree = "model.paligemma_with_expert.paligemma."
    old = {
        f"{tree}language_model.model.layers.3.mlp.up_proj.weight": "vlm.layers.3.mlp.up.weight",
        f"{tree}language_model.lm_head.weight": "vlm.embedding.weight",
        f"{tree}vision_tower.vision_model.post_layernorm.bias": "vision.norm.bias",
        f"{tree}multi_modal_projector.linear.weight": "vision.head.weight",
    }
    statistics = "normalize_inputs.buffer_observation_state.mean"
    translation = translate([*old, statistics])
    assert {theirs: ours for ours, theirs in translation.used.items()} == old
    assert "norm_stats.json" in translation.dropped[statistics]
    assert not translation.unknown


def test_unknown_names_are_listed_separately():
    unknown = ["paligemma_with_expert.paligemma.model.language_model.layers.0.mlp.gate.weight", "x"]
    assert translate([*unknown, HEAD]).unknown == unknown


def test_two_names_for_one_tensor_are_refused():
    with pytest.raises(CheckpointError, match=r"both are vlm\.embedding\.weight"):
        translate([EMBEDDING, f"model.{EMBEDDING}"])
