"""What config.json beside foreign tensors adds to what shapes show, and what is assumed without."""

import dataclasses
import json
import logging
import shutil

import pytest

from piston.models.configs import Pi0Config, Pi0FASTConfig
from piston.weights import CheckpointError, build_on_meta, convert, open_checkpoint
from piston.weights.configs import declared_fields, infer_config


@pytest.fixture
def folder(tmp_path, reference):
    shutil.copy(reference / "models" / "pi0" / "model.safetensors", tmp_path)
    return tmp_path


@pytest.fixture
def facts(reference):
    return json.loads((reference / "models" / "pi0" / "config.json").read_text())


def test_unknown_sizes_need_a_configuration(folder):
    message = r"vision \(width 32, .*--preset NAME.*\(--vision so400m\|dummy\)"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            {
                "action_dim": 32,
                "action_horizon": 10,
                "paligemma_variant": "gemma_2b",
                "action_expert_variant": "gemma_300m",
                "precision": "float32",
            },
            {"action_horizon": 10, "dtype": "float32", "max_token_len": None},
        ),
        (
            {
                "type": "pi0",
                "chunk_size": 20,
                "max_action_dim": 32,
                "tokenizer_max_length": 64,
                "dtype": "bfloat16",
                "input_features": {
                    "observation.images.top": {"type": "VISUAL", "shape": [3, 224, 224]},
                    "observation.state": {"type": "STATE", "shape": [14]},
                    "observation.images.empty_camera_0": {"type": "VISUAL"},
                },
            },
            {
                "action_horizon": 20,
                "dtype": "bfloat16",
                "max_token_len": 64,
                "cameras": ("top", "empty_camera_0"),
            },
        ),
        ({"model": "something else"}, {"action_horizon": 50}),
    ],
)
def test_settings_that_leave_no_trace_in_tensors(tmp_path, facts, expected):
    (tmp_path / "config.json").write_text(json.dumps(facts))
    shapes = {n: tuple(t.shape) for n, t in build_on_meta(Pi0Config()).state_dict().items()}
    config, _ = infer_config(shapes, {}, declared_fields(tmp_path / "config.json"))
    assert dataclasses.replace(config, **expected) == config
    assert config.vlm == Pi0Config().vlm


def test_prompts_of_lerobots_fast_are_counted_differently(tmp_path):
    facts = {"type": "pi0_fast", "tokenizer_max_length": 200, "chunk_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    shapes = {n: tuple(t.shape) for n, t in build_on_meta(Pi0FASTConfig()).state_dict().items()}
    config, _ = infer_config(shapes, {}, declared_fields(tmp_path / "config.json"))
    assert config == Pi0FASTConfig(action_horizon=8)


@pytest.mark.parametrize("name", ["pi0", "pi05", "pi0_lora", "pi0_fast"])
def test_listed_sizes_are_taken_whole(reference, reference_config, name):
    """From the case's folder, and from the file or the params folder in it."""
    case = reference / "models" / name
    stated = reference_config(name)
    for place in (case, case / "model.safetensors", case / "params"):
        if place.exists():
            checkpoint = open_checkpoint(place)
            assert dataclasses.replace(checkpoint.config, dtype="float32") == stated
            assert "action_horizon" not in checkpoint.assumed


def test_listed_alpha_of_adapters_is_taken(reference, tmp_path):
    case = reference / "models" / "pi0_lora"
    facts = json.loads((case / "config.json").read_text())
    facts["lora"]["vlm"]["alpha"] = 9.0
    shutil.copytree(case / "params", tmp_path / "params")
    (tmp_path / "config.json").write_text(json.dumps(facts))
    assert open_checkpoint(tmp_path).config.vlm.lora.alpha == 9.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vlm": {"width": 32}}, "vlm is stated as width=32,.*another size"),
        ({"expert": {"num_heads": 4}}, "action_expert is stated as .*another size"),
        ({"vision": {"patch": 14}}, "vision is stated as .*another size"),
        ({"vlm": {"depth": "three"}}, "not as expected: GemmaSize.depth"),
        ({"vlm": {"colour": 1}}, "not as expected"),
        ({"lora": {"vlm": {"rank": 2, "alpha": 2.0}}}, "vlm is stated as .*lora_rank=2"),
    ],
)
def test_a_list_that_contradicts_the_tensors_is_refused(folder, facts, change, message):
    for part, values in change.items():
        facts[part] = {**(facts[part] or {}), **values}
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_converting_says_what_it_assumed(reference, tmp_path, caplog):
    shutil.copytree(reference / "models" / "pi0" / "params", tmp_path / "params")
    with caplog.at_level(logging.WARNING):
        convert(tmp_path, tmp_path / "ours")
    (line,) = caplog.messages
    for words in ("action_horizon = 50", "max_token_len = 48", "base_0_rgb", "dtype = bfloat16"):
        assert words in line
    assert "--preset" in line
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        convert(tmp_path, tmp_path / "again", config=open_checkpoint(tmp_path).config)
        convert(tmp_path / "ours", tmp_path / "copy")
    assert not caplog.messages
