"""Public checkpoints in a flow model that also writes text and FAST tokens."""

import dataclasses

import pytest
import safetensors.torch
import torch
from tests.models.cases import Case
from torch.testing import assert_close

from piston.models.flow import Pi0
from piston.weights import (
    CheckpointError,
    MismatchError,
    build_on_meta,
    load_model,
    open_checkpoint,
    save_model,
)
from piston.weights.pytorch_names import EMBEDDING, OUTPUT_HEAD

from .test_pytorch_files import assert_same_state, pytorch_state

TARGETS = {"targets": ("text", "fast"), "insulate": True, "max_text_len": 5, "max_fast_len": 7}


@pytest.mark.parametrize("name", ["pi0", "pi05"])
@pytest.mark.parametrize("file", ["params", "model.safetensors"])
def test_reference_checkpoints(reference, name, file):
    """Without text, a model with targets computes what the one of the checkpoint does."""
    if file == "params":
        pytest.importorskip("tensorstore", reason="needs piston[jax-weights]")
    case = Case.read(reference / "models" / name)
    config = dataclasses.replace(case.config, **TARGETS)
    model = load_model(case.folder / file, config)
    assert isinstance(model, Pi0)
    assert_same_state(model, load_model(case.folder / file, case.config).state_dict())
    observation, time = case.observation(), case.input("time")
    t = time[:, None, None]
    noisy = t * case.input("noise") + (1 - t) * case.input("actions")
    with torch.no_grad():
        velocity = model.velocity(noisy, time, model.prefill(observation))
    assert_close(velocity, case.output("velocity"), atol=1e-4, rtol=0)
    # Nobody has to write a text.
    quiet = dataclasses.replace(
        observation, writes_text=torch.zeros(observation.batch_size, dtype=torch.bool)
    )
    sampled = model.act(quiet, case.input("noise"), num_steps=case.facts["num_steps"])
    assert_close(sampled, case.output("sampled_actions"), atol=1e-4, rtol=0)


def test_the_last_layer_may_not_lack_its_tail(tmp_path, tiny, tiny_state):
    """An ordinary flow model does not use it, but a model that writes does."""
    config = dataclasses.replace(tiny["pi05"], **TARGETS)
    tail = build_on_meta(tiny["pi05"]).unused_parameters()
    assert tail
    assert not build_on_meta(config).unused_parameters()
    state = {name: tensor for name, tensor in tiny_state("pi05").items() if name not in tail}
    safetensors.torch.save_file(pytorch_state(state), tmp_path / "model.safetensors")
    with pytest.raises(MismatchError) as found:
        load_model(tmp_path, config)
    assert set(found.value.missing) == set(tail)
    assert "vlm.layers.1.mlp.down.weight" in str(found.value)
    # What a model cannot do without may be new, if that is asked for.
    model = load_model(tmp_path, config, allow_missing=tail)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_the_output_head_must_be_the_embedding_table(tmp_path, tiny, tiny_state):
    state = tiny_state("pi05")
    config = dataclasses.replace(tiny["pi05"], **TARGETS)
    theirs = pytorch_state(state, prefix="model.")
    theirs[f"model.{OUTPUT_HEAD}"] = theirs[f"model.{EMBEDDING}"].clone()
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    assert_same_state(load_model(tmp_path, config), state)

    theirs[f"model.{OUTPUT_HEAD}"][3, 2] += 1
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the embedding table"):
        load_model(tmp_path, config)
    assert_same_state(load_model(tmp_path, tiny["pi05"]), state)  # which has no use for it

    del theirs[f"model.{EMBEDDING}"]  # the head alone, as openpi stores it
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, config).state_dict()["vlm.embedding.weight"]
    assert torch.equal(loaded, theirs[f"model.{OUTPUT_HEAD}"])


def test_targets_are_kept_in_our_own_checkpoints(tmp_path, tiny, tiny_state):
    config = dataclasses.replace(tiny["pi05"], **TARGETS, fast_tokenizer="bytes")
    save_model(tiny_state("pi05"), config, tmp_path)
    assert open_checkpoint(tmp_path).config == config
