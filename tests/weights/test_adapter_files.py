"""Adapters alone in files, and merged models saved whole."""

import dataclasses
import json

import pytest
import safetensors.torch
import torch

from piston.models.lora import adapter_state_dict, merge_adapters, without_adapters
from piston.weights import (
    CheckpointError,
    build_model,
    load_adapters,
    load_model,
    save_adapters,
    save_model,
)


@pytest.fixture
def trained(tiny, tiny_state):
    model = build_model(tiny["pi0_lora"])
    model.load_state_dict(tiny_state("pi0_lora"))
    return model


def test_adapters_are_saved_and_loaded_alone(tmp_path, trained):
    save_adapters(trained, tmp_path / "adapters")
    files = sorted(path.name for path in (tmp_path / "adapters").iterdir())
    assert files == ["adapters.json", "adapters.safetensors"]
    fresh = build_model(trained.config)
    base = {name: value.clone() for name, value in fresh.state_dict().items()}
    load_adapters(fresh, tmp_path / "adapters")
    for name, value in fresh.state_dict().items():
        expected = trained.state_dict() if ".lora_" in name else base
        assert torch.equal(value, expected[name]), name


def test_other_adapters_are_refused(tmp_path, tiny, trained):
    save_adapters(trained, tmp_path)
    config = trained.config
    other = dataclasses.replace(config.vlm.lora, alpha=7.0)
    changed = dataclasses.replace(config, vlm=dataclasses.replace(config.vlm, lora=other))
    for wrong in (changed, tiny["pi0"]):
        with pytest.raises(CheckpointError, match="Build the model with the adapters"):
            load_adapters(build_model(wrong), tmp_path)
    with pytest.raises(ValueError, match="no adapters to save"):
        save_adapters(build_model(tiny["pi0"]), tmp_path / "none")


def test_a_file_of_other_tensors_is_refused_by_name(tmp_path, trained):
    save_adapters(trained, tmp_path)
    path = tmp_path / "adapters.safetensors"
    adapters = safetensors.torch.load_file(path)
    fresh = build_model(trained.config)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    name = "vlm.layers.0.mlp.up.lora_a"
    renamed = {("vlm.extra.lora_a" if n == name else n): value for n, value in adapters.items()}
    cut = {n: value[:, :1].contiguous() for n, value in adapters.items()}
    for broken, message in (
        (renamed, rf"(?s)1 missing:\s+{name}.*1 unexpected:\s+vlm\.extra\.lora_a"),
        (cut, r"found \(1, .*expected \("),
    ):
        safetensors.torch.save_file(broken, path)
        with pytest.raises(CheckpointError, match=message):
            load_adapters(fresh, tmp_path)
    assert all(torch.equal(value, before[n]) for n, value in fresh.state_dict().items())


def test_damaged_and_missing_files_leave_the_model_alone(tmp_path, trained):
    save_adapters(trained, tmp_path)
    fresh = build_model(trained.config)
    before = {name: value.clone() for name, value in adapter_state_dict(fresh).items()}
    path = tmp_path / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_adapters(fresh, tmp_path)
    text = tmp_path / "adapters.json"
    text.write_text(json.dumps({**json.loads(text.read_text()), "version": 2}))
    with pytest.raises(CheckpointError, match="was not written by `save_adapters`"):
        load_adapters(fresh, tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="adapters.safetensors is missing"):
        load_adapters(fresh, tmp_path)
    assert all(torch.equal(v, before[n]) for n, v in adapter_state_dict(fresh).items())


def test_a_merged_model_is_saved_with_its_own_configuration(tmp_path, trained):
    expected = without_adapters(trained.config)
    merge_adapters(trained)
    assert trained.config == expected
    save_model(trained, trained.config, tmp_path)
    found = load_model(tmp_path)
    assert found.config == expected
    for name, value in trained.state_dict().items():
        assert torch.equal(value, found.state_dict()[name])
