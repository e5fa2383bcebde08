"""Writing: whole or not at all, also when the writer is killed; converting from every format."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import safetensors.torch
import torch

from piston.models.lora import merge_adapters, without_adapters
from piston.weights import (
    MismatchError,
    build_model,
    build_on_meta,
    convert,
    load_model,
    open_checkpoint,
    save_model,
)

FAMILIES = ["pi0", "pi05", "pi0_lora", "pi0_fast"]


def assert_holds(folder, state):
    found = load_model(folder).state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_the_folder_holds_two_readable_files(tmp_path, tiny, tiny_state):
    state = tiny_state("pi0")
    save_model(state, tiny["pi0"], tmp_path / "a" / "b", sections={"step": 7})
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]  # nothing left behind
    written = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert (written["format"], written["version"], written["step"]) == ("piston", 1, 7)
    theirs = safetensors.torch.load_file(tmp_path / "a" / "b" / "model.safetensors")
    assert all(torch.equal(theirs[name], tensor) for name, tensor in state.items())


def test_saving_again_replaces_the_model_and_leaves_other_files(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "norm_stats.json").write_text("{}")
    save_model(tiny_state("pi05"), tiny["pi05"], tmp_path)
    assert_holds(tmp_path, tiny_state("pi05"))
    assert (tmp_path / "assets" / "norm_stats.json").read_text() == "{}"


def test_a_model_and_its_tensors_are_saved_alike(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "a")
    model = load_model(tmp_path / "a")
    save_model(model, model.config, tmp_path / "b")
    first, second = ((tmp_path / x / "model.safetensors").read_bytes() for x in "ab")
    assert first == second


def test_views_are_written_as_what_they_show(tmp_path, tiny, tiny_state):
    state = tiny_state("pi0")
    name = "vlm.layers.0.mlp.up.weight"
    turned = {**state, name: state[name].T.contiguous().T}
    assert not turned[name].is_contiguous()
    save_model(turned, tiny["pi0"], tmp_path)
    assert_holds(tmp_path, state)


def test_what_could_not_be_loaded_is_not_written(tmp_path, tiny, tiny_state):
    with pytest.raises(MismatchError, match="are not the configuration's"):
        save_model(tiny_state("pi0"), tiny["pi05"], tmp_path / "a")
    with pytest.raises(ValueError, match="meta device"):
        save_model(build_on_meta(tiny["pi0"]), tiny["pi0"], tmp_path / "a")
    with pytest.raises(ValueError, match="may not be named model"):
        save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "a", sections={"model": {}})
    assert not list(tmp_path.iterdir())


def test_an_error_while_writing_leaves_the_old_model(tmp_path, tiny, tiny_state, monkeypatch):
    from piston import files

    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "model")
    monkeypatch.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        save_model(tiny_state("pi05"), tiny["pi05"], tmp_path / "model")
    assert_holds(tmp_path / "model", tiny_state("pi0"))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


KILLED = """
import sys, time
from pathlib import Path
import torch
from piston.weights import load_model, save_model, tensors

folder, stop_after = sys.argv[1], int(sys.argv[2])
model = load_model(folder)
for parameter in model.parameters():
    parameter.data.zero_()
count, bytes_of, replace = 0, tensors._bytes_of, Path.replace

def wait():
    global count
    count += 1
    if count == stop_after:
        print("here", flush=True)
        time.sleep(60)

def bytes_and_wait(*args):
    wait()
    return bytes_of(*args)

def replace_and_wait(*args):
    result = replace(*args)
    wait()
    return result

tensors._bytes_of, Path.replace = bytes_and_wait, replace_and_wait
save_model(model, model.config, folder)
"""


@pytest.mark.parametrize("moment", ["half of the tensors written", "config.json in place"])
def test_killed_while_saving_the_old_model_is_intact(tmp_path, tiny, tiny_state, moment):
    state = tiny_state("pi0")
    folder = tmp_path / "model"
    save_model(state, tiny["pi0"], folder)
    number = len(state) // 2 if "half" in moment else len(state) + 1
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(number)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "here"
        assert_holds(folder, state)  # a reader beside the writer
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert_holds(folder, state)
    save_model(tiny_state("pi05"), tiny["pi05"], folder)  # takes the remains away
    assert_holds(folder, tiny_state("pi05"))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", FAMILIES)
def test_converted_reference_models_are_equal(tmp_path, reference, name):
    source = open_checkpoint(reference / "models" / name / "params")
    heard = []
    converted = convert(
        reference / "models" / name / "params",
        tmp_path / "ours",
        progress=lambda done, total, tensor: heard.append((done, total, tensor)),
    )
    assert converted.format == "piston"
    assert converted.config == source.config
    for tensor in source.names():
        assert torch.equal(converted.tensor(tensor), source.tensor(tensor))
    assert [tensor for _, _, tensor in heard] == source.names()
    assert heard[-1][0] == heard[-1][1] == source.num_bytes


def test_converting_to_another_dtype_equals_loading_in_it(tmp_path, reference, reference_config):
    source = reference / "models" / "pi05" / "model.safetensors"
    config = reference_config("pi05")
    convert(source, tmp_path / "ours", torch.bfloat16, config=config)
    expected = load_model(source, config, dtype=torch.bfloat16).state_dict()
    found = load_model(tmp_path / "ours").state_dict()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.float32}


def test_converting_brings_the_norm_statistics_along(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "step")
    statistics = tmp_path / "step" / "assets" / "trossen" / "norm_stats.json"
    statistics.parent.mkdir(parents=True)
    statistics.write_text('{"a": 1}')
    convert(tmp_path / "step", tmp_path / "ours")
    assert (tmp_path / "ours/assets/trossen/norm_stats.json").read_text() == '{"a": 1}'


def test_converting_never_overwrites(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "a")
    with pytest.raises(FileExistsError, match="Choose another folder"):
        convert(tmp_path / "a", tmp_path / "a")
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "a", tmp_path / "empty")
    assert_holds(tmp_path / "empty", tiny_state("pi0"))


def test_converting_half_a_model_is_refused(tmp_path, tiny, tiny_state):
    state = tiny_state("pi0")
    save_model(state, tiny["pi0"], tmp_path / "a")
    del state["vlm.norm.scale"]
    safetensors.torch.save_file(state, tmp_path / "a" / "model.safetensors")
    with pytest.raises(MismatchError, match=r"1 missing:\s+vlm\.norm\.scale"):
        convert(tmp_path / "a", tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_merged_model_is_saved_with_its_own_configuration(tmp_path, tiny, tiny_state):
    trained = build_model(tiny["pi0_lora"])
    trained.load_state_dict(tiny_state("pi0_lora"))
    expected = without_adapters(trained.config)
    merge_adapters(trained)
    assert trained.config == expected
    save_model(trained, trained.config, tmp_path)
    found = load_model(tmp_path)
    assert found.config == expected
    for name, value in trained.state_dict().items():
        assert torch.equal(value, found.state_dict()[name])
