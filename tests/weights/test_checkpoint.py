"""Opening, loading and the errors on the way: all of a model or none of it."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from piston.models.configs import Pi0Config
from piston.weights import (
    CheckpointError,
    MismatchError,
    build_model,
    load_model,
    models,
    open_checkpoint,
    save_model,
)

FAMILIES = ["pi0", "pi05", "pi0_lora", "pi0_fast"]


def assert_same_state(model, state):
    found = model.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_loaded(tmp_path, tiny, tiny_state, family):
    state = tiny_state(family)
    save_model(state, tiny[family], tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.format == "piston"
    assert checkpoint.config == tiny[family]
    assert not checkpoint.dropped
    for place in ("model", "model/model.safetensors"):
        model = load_model(str(tmp_path / place))
        assert model.config == tiny[family]
        assert_same_state(model, state)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_stored_dtypes_are_kept_and_asked_ones_are_given(tmp_path, tiny, tiny_state):
    mixed = {
        name: tensor.bfloat16() if "layers" in name and "norm.scale" not in name else tensor
        for name, tensor in tiny_state("pi05").items()
    }
    save_model(mixed, tiny["pi05"], tmp_path / "model")
    assert_same_state(load_model(tmp_path / "model"), mixed)

    wide = load_model(tmp_path / "model", dtype=torch.float32)
    assert_same_state(wide, {name: tensor.float() for name, tensor in mixed.items()})

    narrow = load_model(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    assert narrow["vlm.layers.0.mlp.up.weight"].dtype == torch.bfloat16
    assert narrow["vlm.embedding.weight"].dtype == torch.bfloat16
    for name in ("vision.position_embedding", "vision.patch_embedding.weight", "vlm.norm.scale"):
        assert narrow[name].dtype == torch.float32  # as the models' precision policy has it


def test_a_loaded_model_does_not_depend_on_its_file(tmp_path, tiny, tiny_state):
    """Training on it, saving over it and removing its folder touch only one of the two."""
    state = tiny_state("pi0")
    save_model(state, tiny["pi0"], tmp_path / "model")
    model = load_model(tmp_path / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert_same_state(load_model(tmp_path / "model"), state)
    changed = {name: tensor + 1 for name, tensor in state.items()}
    save_model(model, model.config, tmp_path / "model")
    assert_same_state(model, changed)
    assert_same_state(load_model(tmp_path / "model"), changed)
    shutil.rmtree(tmp_path / "model")
    assert_same_state(model, changed)


def test_one_error_lists_everything(tmp_path, tiny, tiny_state):
    state = tiny_state("pi0")
    save_model(state, tiny["pi0"], tmp_path)
    damaged = dict(state)
    for layer in range(2):
        name = f"vlm.layers.{layer}.attention.query.weight"
        damaged[name.replace("query", "quer")] = damaged.pop(name)
    del damaged["suffix.state.bias"]
    damaged["suffix.action_in.weight"] = torch.zeros(12, 6)
    damaged["extra.thing"] = torch.zeros(3)
    safetensors.torch.save_file(damaged, tmp_path / "model.safetensors")
    with pytest.raises(MismatchError) as caught:
        load_model(tmp_path)
    text = str(caught.value)
    assert caught.value.missing == (
        "suffix.state.bias",
        "vlm.layers.0.attention.query.weight",
        "vlm.layers.1.attention.query.weight",
    )
    assert caught.value.unexpected == (
        "extra.thing",
        "vlm.layers.0.attention.quer.weight",
        "vlm.layers.1.attention.quer.weight",
    )
    assert caught.value.misshaped == ("suffix.action_in.weight",)
    assert "3 missing" in text
    assert "vlm.layers.[0-1].attention.query.weight (24, 20)" in text
    assert "Did you mean 'vlm.layers.[0-1].attention.query.weight'?" in text
    assert "suffix.action_in.weight: found (12, 6), expected (12, 5)" in text
    assert "extra.thing (3,)" in text


def test_missing_alone_is_an_error(tmp_path, tiny, tiny_state):
    state = tiny_state("pi0")
    del state["vision.norm.bias"]
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match=r"1 missing:\s+vision\.norm\.bias \(24,\)"):
        load_model(tmp_path)


def test_long_lists_are_cut_with_their_count(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path)
    with pytest.raises(MismatchError, match="more lines") as caught:
        load_model(tmp_path, Pi0Config())
    assert len(str(caught.value).splitlines()) < 80
    assert len(caught.value.missing) > 500


def test_a_file_that_is_cut_while_it_is_read_gives_no_model(
    tmp_path, tiny, tiny_state, monkeypatch
):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_model(tmp_path)
    monkeypatch.setattr(models, "open_checkpoint", lambda *_: checkpoint)
    with pytest.raises(CheckpointError, match="became shorter"):
        load_model(tmp_path)


def test_missing_adapters_are_allowed_by_pattern(tmp_path, tiny, tiny_state):
    state = tiny_state("pi0")
    save_model(state, tiny["pi0"], tmp_path)
    config = tiny["pi0_lora"]
    with pytest.raises(MismatchError, match=r"--allow-missing '\*\.lora_\?'"):
        load_model(tmp_path, config)
    torch.manual_seed(1)
    model = load_model(tmp_path, config, allow_missing=("*.lora_?",))
    for name, tensor in model.state_dict().items():
        if name in state:
            assert torch.equal(tensor, state[name])
        elif name.endswith("lora_b"):
            assert not tensor.any()
        else:
            assert 0.3 < tensor.std() * tensor.shape[-1] ** 0.5 < 2.0  # as constructed
    with pytest.raises(MismatchError, match="missing"):
        load_model(tmp_path, config, allow_missing=("vlm.*.lora_?",))


@pytest.mark.parametrize("patterns", [("*.lroa_?",), ("*.lora_?", "vml.*")])
def test_a_pattern_that_matches_no_tensor_is_refused(tmp_path, tiny, tiny_state, patterns):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path)
    with pytest.raises(ValueError, match=r"matches no parameter.*vision\."):
        load_model(tmp_path, tiny["pi0_lora"], allow_missing=patterns)


def test_every_parameter_can_start_fresh_on_meta(tmp_path, tiny, tiny_state):
    """A model filled from nothing looks like one that was constructed in memory."""
    state = tiny_state("pi05")
    save_model(state, tiny["pi05"], tmp_path)
    kept = {"vlm.norm.scale": state["vlm.norm.scale"]}
    safetensors.torch.save_file(kept, tmp_path / "model.safetensors")
    torch.manual_seed(0)
    fresh = load_model(tmp_path, allow_missing=("*",)).state_dict()
    constructed = build_model(tiny["pi05"]).state_dict()
    for name in fresh.keys() - kept.keys():
        assert fresh[name].dtype == constructed[name].dtype
        spread, usual = fresh[name].std(), constructed[name].std()
        assert bool(spread == 0) == bool(usual == 0), name
        assert 0.5 * usual <= spread <= 2 * usual or fresh[name].numel() < 50, name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.touch, "is not a checkpoint: expected .* found nothing"),
        (lambda f: (f / "policy.bin").write_bytes(b"x"), "found policy.bin"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "not a whole safetensors file"),
        (
            lambda f: safetensors.torch.save_file({"a": torch.ones(1)}, f / "model.safetensors"),
            "holds no known model: its tensors are a",
        ),
        (
            lambda f: safetensors.torch.save_file({}, f / "model.safetensors"),
            "none at all",
        ),
        (
            lambda f: safetensors.torch.save_file(
                {"vlm.norm.scale": torch.ones(2, dtype=torch.int32)}, f / "model.safetensors"
            ),
            "not floating-point",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_missing_place_and_a_wrong_file_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "weights.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"neither a \.safetensors"):
        open_checkpoint(tmp_path / "weights.pt")


def test_our_tensors_without_our_config(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path)
    config = tmp_path / "config.json"
    written = json.loads(config.read_text())
    config.unlink()
    with pytest.raises(FileNotFoundError, match="describes the model beside it"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, tiny["pi0"]).config == tiny["pi0"]
    for text, message in [
        ("{", "is not a JSON file"),
        ("[]", "expected a JSON object"),
        ('{"model": "pi0"}', "was not written by Piston"),
        (json.dumps({**written, "version": 2}), "version 2"),
        (json.dumps({**written, "model": 3}), "model is 3; expected ModelConfig"),
    ]:
        config.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)


_VALUES = [None, [], {}, "x", -1, 0, 1.5, True, [[]], {"type": "x"}, {"type": []}, 10**400]
_LEROBOT = {
    "type": "pi0",
    "chunk_size": 4,
    "max_action_dim": 32,
    "tokenizer_max_length": 48,
    "dtype": "float32",
    "paligemma_variant": "gemma_2b",
    "input_features": {"observation.images.a": {"type": "VISUAL", "shape": [3, 4, 4]}},
}
_OPENPI = {
    "paligemma_variant": "gemma_2b",
    "action_horizon": 4,
    "max_token_len": 48,
    "precision": "float32",
    "discrete_state_input": False,
}


def _mutations(data):
    """Every value in JSON data replaced by each of `_VALUES`, and every field removed."""
    yield from _VALUES
    keys = range(len(data)) if isinstance(data, list) else data if isinstance(data, dict) else ()
    for key in keys:
        for value in _mutations(data[key]):
            changed = data.copy()
            changed[key] = value
            yield changed
        if isinstance(data, dict):
            yield {name: value for name, value in data.items() if name != key}


def _open_mutated(folder):
    """Open a checkpoint with every mutation of its config.json; return how many were refused."""
    path = folder / "config.json"
    messages = []
    for data in _mutations(json.loads(path.read_text())):
        path.write_text(json.dumps(data))
        try:
            open_checkpoint(folder)
        except CheckpointError as error:
            messages.append(str(error))
    assert [message for message in messages if str(folder) not in message] == []
    return len(messages)


@pytest.mark.parametrize("family", ["pi0_lora", "pi0_fast"])
def test_any_wrong_value_in_our_config_is_an_error_that_names_the_file(
    tmp_path, tiny, tiny_state, family
):
    save_model(tiny_state(family), tiny[family], tmp_path)
    assert _open_mutated(tmp_path) > 300


@pytest.mark.parametrize("stated", [_LEROBOT, _OPENPI, None])
def test_any_wrong_value_in_a_foreign_config_is_an_error_that_names_the_file(
    reference, tmp_path, stated
):
    shutil.copytree(reference / "models" / "pi0" / "params", tmp_path / "params")
    source = reference / "models" / "pi0" / "config.json"
    (tmp_path / "config.json").write_text(json.dumps(stated) if stated else source.read_text())
    open_checkpoint(tmp_path)
    assert _open_mutated(tmp_path) > 40
