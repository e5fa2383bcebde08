"""Files of openpi's PyTorch and LeRobot: single and sharded, and what may be wrong with them."""

import json

import pytest
import safetensors.torch
import torch

from piston.weights import CheckpointError, load_model, open_checkpoint
from piston.weights.pytorch_names import EMBEDDING, OUTPUT_HEAD, TABLE


def pytorch_state(state, prefix=""):
    """Our tensors under openpi's PyTorch names."""
    theirs = {}
    for name, tensor in state.items():
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        template = ".".join("*" if i in numbers else part for i, part in enumerate(parts))
        (foreign,) = [their for their, our in TABLE.items() if our == template]
        theirs[prefix + foreign.replace("*", parts[numbers[0]] if numbers else "")] = tensor
    return theirs


def write_sharded(folder, state, count=3):
    folder.mkdir(exist_ok=True)
    names = sorted(state)
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        part = {name: state[name] for name in names[shard::count]}
        safetensors.torch.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_same_state(model, state):
    found = model.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", ["pi0", "pi05", "pi0_fast"])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("shards", [None, 1, 3])
def test_pytorch_files_single_and_sharded(tmp_path, tiny, tiny_state, family, prefix, shards):
    state = tiny_state(family)
    theirs = pytorch_state(state, prefix)
    theirs[f"{prefix}paligemma_with_expert.gemma_expert.lm_head.weight"] = torch.zeros(2, 2)
    if shards is None:
        safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    else:
        write_sharded(tmp_path, theirs, shards)
    checkpoint = open_checkpoint(tmp_path, tiny[family])
    assert checkpoint.format == ("lerobot" if prefix else "openpi-pytorch")
    assert len(checkpoint.dropped) == 1
    assert_same_state(load_model(tmp_path, tiny[family]), state)


def test_the_tied_embedding_is_one_tensor(tmp_path, tiny, tiny_state):
    state = tiny_state("pi0_fast")
    theirs = pytorch_state(state)
    theirs[OUTPUT_HEAD] = theirs[EMBEDDING].clone()
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, tiny["pi0_fast"])
    assert OUTPUT_HEAD in checkpoint.dropped
    model = load_model(tmp_path, tiny["pi0_fast"])
    assert_same_state(model, state)
    size = state["vlm.embedding.weight"].numel()
    assert sum(p.numel() == size for p in model.parameters()) == 1

    theirs[OUTPUT_HEAD][-1, -1] += 1  # trained apart: another model than ours
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="differs from the embedding table"):
        load_model(tmp_path, tiny["pi0_fast"])

    del theirs[EMBEDDING]
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, tiny["pi0_fast"]).state_dict()["vlm.embedding.weight"]
    assert torch.equal(loaded, theirs[OUTPUT_HEAD])


def test_the_content_decides_the_format_not_the_file_name(tmp_path, tiny, tiny_state):
    safetensors.torch.save_file(pytorch_state(tiny_state("pi0")), tmp_path / "piston.safetensors")
    found = open_checkpoint(tmp_path / "piston.safetensors", tiny["pi0"])
    assert found.format == "openpi-pytorch"


class TestShards:
    @pytest.fixture
    def folder(self, tmp_path, tiny_state):
        write_sharded(tmp_path, pytorch_state(tiny_state("pi0")))
        return tmp_path

    def change_index(self, folder, change):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    def test_a_missing_file_is_named(self, folder, tiny):
        (folder / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(CheckpointError, match="1 missing:\\s+model-00002-of-00003.safetensors"):
            open_checkpoint(folder, tiny["pi0"])

    def test_a_short_file_is_named(self, folder, tiny):
        path = folder / "model-00003-of-00003.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(
            CheckpointError, match="model-00003-of-00003.safetensors is not a whole"
        ):
            open_checkpoint(folder, tiny["pi0"])

    def test_an_absent_tensor_is_named(self, folder, tiny):
        file = "model-00001-of-00003.safetensors"
        self.change_index(folder, lambda index: index["weight_map"].update(ghost=file))
        with pytest.raises(CheckpointError, match=f"1 in the index only:\\s+ghost in {file}"):
            open_checkpoint(folder, tiny["pi0"])

    def test_a_tensor_that_the_index_lacks_is_named(self, folder, tiny):
        self.change_index(folder, lambda index: index["weight_map"].pop("state_proj.bias"))
        with pytest.raises(CheckpointError, match="1 in the files only:\\s+state_proj.bias"):
            open_checkpoint(folder, tiny["pi0"])

    def test_a_file_elsewhere_is_refused(self, folder, tiny):
        self.change_index(folder, lambda i: i["weight_map"].update({"a": "../other.safetensors"}))
        with pytest.raises(CheckpointError, match="files beside it"):
            open_checkpoint(folder, tiny["pi0"])

    def test_an_index_of_another_kind_is_refused(self, folder, tiny):
        self.change_index(folder, lambda index: index.pop("weight_map"))
        with pytest.raises(CheckpointError, match="no weight_map"):
            open_checkpoint(folder, tiny["pi0"])
