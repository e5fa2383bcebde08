"""Files that store less than float32 where models hold float32: they load, convert and run."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.torch
import torch

from piston.verification.models import observation_of
from piston.weights import convert, load_model, open_checkpoint, save_model

ALWAYS_FLOAT32 = (
    "vision.patch_embedding.weight",
    "vision.position_embedding",
    "vision.blocks.0.attention_norm.weight",
    "vision.norm.bias",
    "vlm.layers.0.mlp_norm.scale",
    "suffix.action_out.bias",
)


@pytest.fixture(params=["as openpi stores", "all bfloat16"])
def narrow(request, reference, tmp_path):
    """Writes a reference model in the dtypes of openpi's own files, or all in bfloat16."""

    def write(name):
        listed = json.loads(
            (reference / "checkpoint_keys" / f"{name}_openpi_pytorch.json").read_text()
        )
        tensors = safetensors.torch.load_file(reference / "models" / name / "model.safetensors")
        for key, tensor in tensors.items():
            dtype = listed[key][1] if request.param == "as openpi stores" else "bfloat16"
            tensors[key] = tensor.to(getattr(torch, dtype))
        (tmp_path / "theirs").mkdir()
        safetensors.torch.save_file(tensors, tmp_path / "theirs" / "model.safetensors")
        return tmp_path / "theirs"

    return write


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_they_load_convert_and_run(reference, reference_config, narrow, tmp_path, name, compute):
    config = dataclasses.replace(reference_config(name), dtype=compute)
    source = narrow(name)
    stored = open_checkpoint(source, config)
    loaded = load_model(source, config)
    convert(source, tmp_path / "ours", config=config)
    converted = load_model(tmp_path / "ours")
    for model in (loaded, converted):
        state = model.state_dict()
        assert all(state[tensor].dtype == torch.float32 for tensor in ALWAYS_FLOAT32)
        assert state["vlm.layers.0.mlp.up.weight"].dtype == torch.bfloat16
        for tensor, value in state.items():
            assert torch.equal(value.double(), stored.tensor(tensor).double()), tensor  # exact

    with np.load(reference / "models" / name / "case.npz") as arrays:
        case = dict(arrays)
    noise = torch.from_numpy(case["in/noise"])
    actions = [m.act(observation_of(case), noise) for m in (loaded, converted)]
    assert torch.equal(*actions)
    expected = torch.from_numpy(case["out/sampled_actions"])
    assert (actions[0] - expected).abs().max() < 0.05 * expected.abs().max()


def test_matrices_keep_what_each_is_stored_in(tmp_path, tiny, tiny_state):
    state = {n: t.bfloat16() if "mlp" in n else t for n, t in tiny_state("pi0").items()}
    save_model(state, tiny["pi0"], tmp_path)
    model = load_model(tmp_path)
    assert model.vlm.layers[0].mlp.up.weight.dtype == torch.bfloat16
    assert model.vlm.layers[0].mlp_norm.scale.dtype == torch.float32
    assert model.vlm.embedding.weight.dtype == torch.float32
