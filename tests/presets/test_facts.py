"""Every preset of the reference, field by field."""

import json
import re
from pathlib import Path

import pytest
import tyro

from piston import presets
from piston.models.configs import GEMMA, Pi0Config, Pi0FASTConfig
from piston.robots.simple import RLDSDroidDataConfig
from piston.transforms import RepackTransform
from piston.transforms.actions import make_bool_mask

FACTS = json.loads((Path(__file__).parents[1] / "reference" / "presets.json").read_text())
NAMES = [name for name in FACTS if not name.startswith("paligemma_")]

# Tracking and framework switches have no counterpart here. No preset here deletes a run by itself.
ASIDE = {
    "overwrite",
    "__type__", "project_name", "wandb_enabled", "fsdp_devices",
    "pytorch_weight_path", "pytorch_training_precision",
}  # fmt: skip
CLASSES = {"SimpleDataConfig": "DroidDataConfig"}


def _or_missing(value):
    return tyro.MISSING if value == "tyro.MISSING" else value


def _local(path: str) -> str:
    # Our checkpoint is the step's folder itself, without a folder `params` in it.
    return path.removesuffix("/params") if path.startswith("./") else path


@pytest.mark.parametrize("name", NAMES)
def test_every_plain_field_is_equal(name):
    facts, preset = FACTS[name], presets.get(name)
    compared_below = {"model", "data", "weight_loader", "lr_schedule", "optimizer", "freeze_filter"}
    for field in facts.keys() - ASIDE - compared_below:
        assert getattr(preset, field) == _or_missing(facts[field]), field


@pytest.mark.parametrize("name", NAMES)
def test_model(name):
    facts, model = FACTS[name]["model"], presets.get(name).model
    assert (
        type(model) is {"Pi0Config": Pi0Config, "Pi0FASTConfig": Pi0FASTConfig}[facts["__type__"]]
    )
    assert model.prompt_length == facts["max_token_len"]
    assert model.vlm == GEMMA[facts["paligemma_variant"]]
    for field in ("action_dim", "action_horizon", "dtype"):
        assert getattr(model, field) == facts[field], field
    if isinstance(model, Pi0Config):
        assert model.action_expert == GEMMA[facts["action_expert_variant"]]
        assert (model.pi05, model.state_in_prompt) == (facts["pi05"], facts["discrete_state_input"])
    else:
        assert model.fast_tokenizer == facts["fast_model_tokenizer"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_schedule_and_optimizer(name):
    facts, preset = FACTS[name], presets.get(name)
    loader = facts["weight_loader"]
    expected = _local(loader["params_path"]) if "params_path" in loader else None
    assert preset.weights == expected
    for part in ("lr_schedule", "optimizer"):
        assert type(getattr(preset, part)).__name__ == facts[part]["__type__"]
        for field in facts[part].keys() - {"__type__"}:
            assert getattr(getattr(preset, part), field) == facts[part][field], field


@pytest.mark.parametrize("name", NAMES)
def test_what_is_frozen(name):
    facts, preset = FACTS[name]["freeze_filter"], presets.get(name)
    patterns = re.findall(r"re\.compile\('(.*?)'\)", facts)
    if facts == "Nothing()":
        assert preset.freeze == ()
    else:
        # Both language models in the reference's tree, except adapters.
        assert patterns == [".*llm.*", ".*lora.*"]
        experts = ["vlm.*"] + ["action_expert.*"] * isinstance(preset.model, Pi0Config)
        assert preset.freeze == (*experts, "!*lora*")


@pytest.mark.parametrize("name", NAMES)
def test_data(name):
    facts, data = FACTS[name]["data"], presets.get(name).data
    kind = CLASSES.get(facts["__type__"], facts["__type__"])
    assert type(data).__name__ == kind
    assert data.repo_id == _or_missing(facts["repo_id"])
    assert data.assets.assets_dir == facts["assets"]["assets_dir"]
    assert data.assets.asset_id == facts["assets"]["asset_id"]
    base = facts.get("base_config") or {}
    assert data.prompt_from_task == base.get("prompt_from_task", False)
    prompt = facts.get("default_prompt", facts.get("model_transforms", {}).get("default_prompt"))
    assert data.default_prompt == prompt
    for field in ("use_delta_joint_actions", "adapt_to_pi", "extra_delta_transform"):
        if field in facts:
            assert getattr(data, field) == facts[field], field
    if "action_sequence_keys" in facts:
        assert data.action_sequence_keys == tuple(facts["action_sequence_keys"])


# Compared above or below, or written there as code.
DATA_COMPARED = {
    "__type__", "repo_id", "assets", "base_config", "default_prompt", "use_delta_joint_actions",
    "adapt_to_pi", "extra_delta_transform", "action_sequence_keys", "repack_transforms",
    "action_space", "datasets", "data_transforms", "model_transforms",
}  # fmt: skip
# A folder on somebody's machine.
DATA_ASIDE = {"rlds_data_dir"}


@pytest.mark.parametrize("name", NAMES)
def test_no_field_of_the_data_is_passed_over(name):
    assert FACTS[name]["data"].keys() - DATA_COMPARED - DATA_ASIDE == set()
    base = FACTS[name]["data"].get("base_config") or {}
    # Of the base only this is ever set; the rest is empty there.
    empty = {k: v for k, v in base.items() if k not in ("__type__", "prompt_from_task")}
    assert all(
        value in (None, [], False, ["actions"], {"__type__": "Group", "inputs": [], "outputs": []})
        for value in empty.values()
    )


@pytest.mark.parametrize("name", [n for n in NAMES if "repack_transforms" in FACTS[n]["data"]])
def test_key_map(name):
    (facts,) = FACTS[name]["data"]["repack_transforms"]["inputs"]
    assert presets.get(name).data.repack_transforms.inputs == (RepackTransform(facts["structure"]),)


@pytest.mark.parametrize("name", [n for n in NAMES if "datasets" in FACTS[n]["data"]])
def test_rlds_mixture(name):
    facts, data = FACTS[name]["data"], presets.get(name).data
    assert isinstance(data, RLDSDroidDataConfig)
    assert f"DroidActionSpace.{data.action_space.upper()}" == facts["action_space"]
    assert len(data.datasets) == len(facts["datasets"])
    for ours, theirs in zip(data.datasets, facts["datasets"], strict=True):
        for field in theirs.keys() - {"__type__"}:
            assert getattr(ours, field) == theirs[field]


@pytest.mark.parametrize("name", NAMES)
def test_normalisation_follows_the_family(name):
    preset = presets.get(name)
    flow_pi0 = isinstance(preset.model, Pi0Config) and not preset.model.pi05
    assert preset.data_config().fake or preset.data_config().use_quantile_norm != flow_pi0


def test_masks_of_delta_actions():
    def masks(name):
        inputs = presets.get(name).data_config().data_transforms.inputs
        return [tuple(t.mask) for t in inputs if hasattr(t, "mask")]

    assert masks("pi0_aloha") == [tuple(make_bool_mask(6, -1, 6, -1))]
    assert masks("pi0_aloha_sim") == []
    assert masks("pi0_libero") == [tuple(make_bool_mask(6, -1))]
    assert masks("pi05_libero") == []
    assert masks("pi05_full_droid_finetune") == [tuple(make_bool_mask(7, -1))]
