"""Conversion to openpi's and LeRobot's files: names, values, statistics, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.weights.test_pytorch_names import FULL_SIZE, read_keys
from tests.weights.test_weight_numbers import read_case

from piston.models.configs import VISION, Pi0Config
from piston.transforms.normalize import NormStats, read_norm_stats, write_norm_stats
from piston.verification.models import observation_of
from piston.weights import (
    CheckpointError,
    build_model,
    convert,
    load_model,
    open_checkpoint,
    openpi_jax,
    read_statistics,
    save_model,
)
from piston.weights.checkpoint import Checkpoint, expected_shapes
from piston.weights.conversion import _foreign_names, _Tensors
from piston.weights.pytorch_names import EMBEDDING, EXPERT_HEAD, OUTPUT_HEAD
from piston.weights.tensors import Entry

STATS = {
    "state": NormStats(np.arange(3.0), np.full(3, 0.5), np.full(3, -2.0), np.full(3, 2.0)),
    "actions": NormStats(np.arange(4.0), np.full(4, 0.25), np.full(4, -1.0), np.full(4, 1.0)),
}
EXPERTS = ("vlm", "action_expert")
ACTION_MODES = {"pi0": "MEAN_STD", "pi05": "QUANTILES", "pi0_fast": "QUANTILES"}


def tensors_of(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_json(path, value):
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_files_have_the_names_and_shapes_of_the_originals(reference, name):
    """The table that is read with, backwards; of tied tensors openpi's loader wants one."""
    config, format_, _ = FULL_SIZE[name]
    to = "openpi" if format_ == "openpi-pytorch" else "lerobot"
    shapes = expected_shapes(config)
    entries = {n: UnreadableEntry(shape, torch.float32) for n, shape in shapes.items()}
    tensors = _Tensors(Checkpoint("x", config, "piston", entries, {}, {}), None, merge_lora=False)
    written = {
        theirs: tuple(tensors.empty(ours).shape)
        for theirs, ours in _foreign_names(tensors, to).items()
    }
    expected = read_keys(reference, name)
    if to == "openpi":
        assert expected.pop(EMBEDDING) == written[OUTPUT_HEAD]
    assert written == expected


class UnreadableEntry(Entry):
    def read_into(self, destination):
        raise AssertionError(f"not to be read into {destination}")


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_openpi_s_own_file_is_written_again(reference, reference_config, tmp_path, name):
    folder = reference / "models" / name
    convert(folder / "params", tmp_path / "theirs", to="openpi", config=reference_config(name))
    found, expected = (
        tensors_of(path / "model.safetensors") for path in (tmp_path / "theirs", folder)
    )
    assert found.keys() == expected.keys()
    for tensor in expected.keys() - {EXPERT_HEAD}:  # which no model uses
        assert torch.equal(found[tensor], expected[tensor]), tensor
    assert found[EXPERT_HEAD].shape == expected[EXPERT_HEAD].shape


@pytest.mark.parametrize("name", ["pi0", "pi05", "pi0_fast"])
@pytest.mark.parametrize("block", [2**26, 2**10], ids=["small arrays", "large arrays"])
def test_openpi_s_jax_arrays_are_written_again(
    reference, reference_config, tmp_path, monkeypatch, name, block
):
    """From PyTorch's layout and back; large arrays are written layer by layer."""
    monkeypatch.setattr(openpi_jax, "_BLOCK", block)
    folder, config = reference / "models" / name, reference_config(name)
    convert(folder / "params", tmp_path / "ours", config=config)
    heard = []
    convert(
        tmp_path / "ours",
        tmp_path / "theirs",
        to="openpi-jax",
        progress=lambda done, total, _: heard.append((done, total)),
    )
    stores = [openpi_jax._ArrayStore(path / "params") for path in (tmp_path / "theirs", folder)]
    found, expected = stores
    assert found.shapes == expected.shapes
    assert found.dtypes == expected.dtypes
    for path in expected.shapes:
        assert torch.equal(found.read(path, ()), expected.read(path, ())), path
    assert heard[-1][0] == heard[-1][1]
    # The same description of the tree, but without the leaf `value` that only trainers add.
    trees = [
        json.loads((path / "params/_METADATA").read_text())["tree_metadata"]
        for path in (tmp_path / "theirs", folder)
    ]
    plain = {key.replace(", 'value')", ")"): entry for key, entry in trees[1].items()}
    assert trees[0].keys() == plain.keys()
    for key, entry in trees[0].items():
        assert entry["value_metadata"] == plain[key]["value_metadata"]


def test_zeros_are_stored_in_jax_arrays(tmp_path, tiny, tiny_state):
    """A chunk that is left out would be taken for a lost one."""
    state = {name: torch.zeros_like(tensor) for name, tensor in tiny_state("pi0").items()}
    save_model(state, tiny["pi0"], tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to="openpi-jax")
    for tensor in load_model(tmp_path / "theirs").state_dict().values():
        assert not tensor.any()


def test_full_size_jax_arrays_have_openpi_s_layout():
    """Also where every head has keys of its own, which changes the arrays' names."""
    config = Pi0Config(pi05=True)
    arrays = openpi_jax.arrays_of(config, expected_shapes(config))
    shapes = {path: shape for path, (shape, _) in arrays.items()}
    attention = "PaliGemma/llm/layers/attn/"
    assert shapes[f"{attention}q_einsum/w"] == (18, 8, 2048, 256)
    assert shapes[f"{attention}kv_einsum_1/w"] == (18, 2, 1, 1024, 256)
    assert shapes["PaliGemma/llm/layers/mlp/gating_einsum"] == (18, 2, 2048, 16384)
    heads = {name: dataclasses.replace(getattr(config, name), num_kv_heads=8) for name in EXPERTS}
    config = dataclasses.replace(config, **heads)
    arrays = openpi_jax.arrays_of(config, expected_shapes(config))
    shapes = {path: shape for path, (shape, _) in arrays.items()}
    assert shapes[f"{attention}qkv_einsum/w"] == (18, 3, 8, 2048, 256)
    assert not [path for path in shapes if "/q_einsum" in path or "/kv_einsum" in path]


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *((name, to) for name in ("pi0", "pi05", "pi0_lora") for to in ("openpi", "lerobot")),
        *((name, "openpi-jax") for name in ("pi0", "pi05", "pi0_lora", "pi0_fast")),
        ("pi0_fast", "lerobot"),
        ("pi0_lora", "piston"),
    ],
)
def test_what_is_written_gives_the_reference_s_actions(
    reference, reference_config, tmp_path, name, to
):
    folder, config = reference / "models" / name, reference_config(name)
    merge = name == "pi0_lora"
    written = convert(folder / "params", tmp_path / "new", to=to, config=config, merge_lora=merge)
    assert not [tensor for tensor in written.names() if "lora" in tensor]
    assert written.format == {"openpi": "openpi-pytorch", "openpi-jax": "jax"}.get(to, to)
    case, model = read_case(folder), load_model(tmp_path / "new", written.config)
    with torch.no_grad():
        if name == "pi0_fast":
            loss = model.training_losses(observation_of(case), None, {})["tokens"]
            torch.testing.assert_close(loss, case["out/loss"], rtol=1e-4, atol=1e-5)
            return
        observation, noise = observation_of(case), case["in/noise"]
        steps = json.loads((folder / "config.json").read_text())["num_steps"]
        actions = model.act(observation, noise, num_steps=steps)
        unchanged = load_model(folder / "params", config).act(observation, noise, num_steps=steps)
    assert (actions - case["out/sampled_actions"]).abs().max() < 1e-4
    if not merge:
        assert torch.equal(actions, unchanged)


@pytest.mark.parametrize("family", ["pi0", "pi05", "pi0_fast"])
def test_a_lerobot_folder_has_the_policy_s_features_and_statistics(
    tmp_path, tiny, tiny_state, family
):
    source, target = tmp_path / "step", tmp_path / "policy"
    save_model(tiny_state(family), tiny[family], source)
    write_norm_stats(source / "assets" / "robot", STATS)
    convert(source, target, to="lerobot")

    config = json.loads((target / "config.json").read_text())
    mode, cameras = ACTION_MODES[family], tiny[family].cameras
    image = {"type": "VISUAL", "shape": [3, 16, 16]}
    assert config["type"] == family
    assert config["input_features"] == {
        **{f"observation.images.{camera}": image for camera in cameras},
        "observation.state": {"type": "STATE", "shape": [3]},
    }
    assert config["output_features"] == {"action": {"type": "ACTION", "shape": [4]}}
    expected = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    assert config["normalization_mapping"] == expected
    assert (config["chunk_size"], config["max_action_dim"], config["max_state_dim"]) == (4, 5, 5)

    steps = json.loads((target / "policy_preprocessor.json").read_text())["steps"]
    index = [step["registry_name"] for step in steps].index("normalizer_processor")
    # The state is written into the prompt after it is normalised, and without padding.
    if family != "pi0":
        prepare = steps[index + 1]
        assert prepare["registry_name"] == f"{family}_prepare_state_tokenizer_processor_step"
        assert prepare["config"] == {"max_state_dim": 3}
    file = f"policy_preprocessor_step_{index}_normalizer_processor.safetensors"
    assert steps[index]["state_file"] == file
    assert tensors_of(target / file)["action.q99"].tolist() == [1.0] * 4
    output = json.loads((target / "policy_postprocessor.json").read_text())["steps"][0]
    assert tensors_of(target / output["state_file"])["action.std"].tolist() == [0.25] * 4
    assert read_statistics(target) == (STATS, family != "pi0")


def test_the_floor_of_a_normalisation_is_in_lerobot_s_numbers(tmp_path, tiny, tiny_state):
    sections = {"train": {"data": {"norm_floor": 0.4}, "model": {}}}
    save_model(tiny_state("pi05"), tiny["pi05"], tmp_path / "step", sections=sections)
    still = NormStats(*np.ones((4, 2)))
    write_norm_stats(tmp_path / "step/assets/robot", {"state": STATS["state"], "actions": still})
    convert(tmp_path / "step", tmp_path / "policy", to="lerobot")
    found, _ = read_statistics(tmp_path / "policy")
    assert found["state"] == STATS["state"]
    assert np.allclose(found["actions"].q99, 1.8)


def test_statistics_of_several_robots_are_chosen(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "a")
    write_norm_stats(tmp_path / "a/assets/one", STATS)
    write_norm_stats(tmp_path / "a/assets/owner/two", {**STATS, "state": STATS["actions"]})
    with pytest.raises(ValueError, match=r"one, owner/two\. Choose with --asset-id"):
        convert(tmp_path / "a", tmp_path / "b", to="lerobot")
    with pytest.raises(ValueError, match=r"no statistics 'three'\. Found: one, owner/two"):
        convert(tmp_path / "a", tmp_path / "b", to="lerobot", asset_id="three")
    convert(tmp_path / "a", tmp_path / "b", to="lerobot", asset_id="owner/two")
    assert read_statistics(tmp_path / "b")[0]["state"] == STATS["actions"]
    with pytest.raises(ValueError, match="leave it out"):
        convert(tmp_path / "a", tmp_path / "c", to="openpi", asset_id="one")
    convert(tmp_path / "a", tmp_path / "c", to="openpi")
    assert read_norm_stats(tmp_path / "c/assets/owner/two")["state"] == STATS["actions"]


def test_statistics_of_a_lerobot_policy_are_kept(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "step")
    write_norm_stats(tmp_path / "step/assets/robot", STATS)
    policy, options = tmp_path / "policy", {"config": tiny["pi0"]}
    convert(tmp_path / "step", policy, to="lerobot")

    convert(policy, tmp_path / "ours", **options)
    assert read_statistics(tmp_path / "ours") == (STATS, False)
    convert(policy, tmp_path / "half", torch.bfloat16, to="lerobot", **options)
    assert read_statistics(tmp_path / "half") == (STATS, False)
    with pytest.raises(ValueError, match="--asset-id NAME"):
        convert(policy, tmp_path / "openpi", to="openpi", **options)
    assert not (tmp_path / "openpi").exists()
    with pytest.raises(ValueError, match=r"'\.\./robot'; it names a folder"):
        convert(policy, tmp_path / "openpi", to="openpi", asset_id="../robot", **options)
    convert(policy, tmp_path / "openpi", to="openpi", asset_id="robot", **options)
    assert read_norm_stats(tmp_path / "openpi/assets/robot") == STATS


def test_a_base_model_of_lerobot_has_no_statistics(tmp_path, tiny, tiny_state, caplog):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "policy", to="lerobot")
    assert "does not normalise" in caplog.text
    assert read_statistics(tmp_path / "policy") is None
    convert(tmp_path / "policy", tmp_path / "openpi", to="openpi", config=tiny["pi0"])
    assert {path.name for path in (tmp_path / "openpi").iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def test_a_damaged_robot_is_named(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "a", sections={"train": 3})
    with pytest.raises(CheckpointError, match=r"config\.json: train is not a JSON object"):
        convert(tmp_path / "a", tmp_path / "b")


def test_a_lerobot_normalisation_of_another_kind_is_named(tmp_path, tiny, tiny_state):
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "step")
    write_norm_stats(tmp_path / "step/assets/robot", STATS)
    convert(tmp_path / "step", tmp_path / "policy", to="lerobot")
    path = tmp_path / "policy/policy_preprocessor.json"
    processor = json.loads(path.read_text())
    processor["steps"][-1]["config"]["norm_map"]["STATE"] = "MIN_MAX"
    write_json(path, processor)
    with pytest.raises(CheckpointError, match="MEAN_STD and MIN_MAX; known are MEAN_STD, QUANT"):
        read_statistics(tmp_path / "policy")
    processor["steps"][-1]["state_file"] = "../elsewhere.safetensors"
    write_json(path, processor)
    with pytest.raises(CheckpointError, match="not beside it"):
        read_statistics(tmp_path / "policy")


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("pi0", {"to": "lerobto"}, "'lerobto'; expected .* Did you mean 'lerobot'"),
        ("pi0", {"merge_lora": True}, "no adapters to merge"),
        ("pi0_lora", {"to": "openpi"}, "add --merge-lora"),
        ("pi0_lora", {"to": "openpi-jax"}, "add --merge-lora"),
        ("pi0_lora", {"to": "lerobot"}, "add --merge-lora"),
        ("pi0_fast", {"to": "openpi"}, "π0-FAST, which openpi's PyTorch models do not include"),
        ("pi0", {"asset_id": "x"}, "leave it out"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, tiny, tiny_state, family, options, message):
    save_model(tiny_state(family), tiny[family], tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "a", tmp_path / "b", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_robot_that_is_left_out_is_warned_of(tmp_path, tiny, tiny_state, caplog):
    sections = {"train": {"model": {}}}
    save_model(tiny_state("pi0"), tiny["pi0"], tmp_path / "a", sections=sections)
    convert(tmp_path / "a", tmp_path / "b")
    assert "without the robot" not in caplog.text
    convert(tmp_path / "a", tmp_path / "c", to="openpi")
    assert "openpi's PyTorch models are written without the robot" in caplog.text


def test_a_convolutional_stem_exists_here_only(tmp_path, tiny):
    vision = dataclasses.replace(tiny["pi0"].vision, stem=4)
    config = dataclasses.replace(tiny["pi0"], vision=vision)
    save_model(build_model(config), config, tmp_path / "a")
    with pytest.raises(ValueError, match=r"no counterpart of \d+ tensors, such as vision\."):
        convert(tmp_path / "a", tmp_path / "b", to="openpi")


def test_sizes_that_a_file_does_not_show_can_be_given(tmp_path, tiny, tiny_state):
    config = tiny["pi0"]
    save_model(tiny_state("pi0"), config, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "policy", to="lerobot")
    asked = r"width 24, depth 2.*--preset NAME.*--vision so400m\|dummy"
    with pytest.raises(CheckpointError, match=asked):
        open_checkpoint(tmp_path / "policy")
    sizes = {name: getattr(config, name) for name in ("vision", "vlm", "action_expert")}
    assert open_checkpoint(tmp_path / "policy", sizes=sizes).config == config
    with pytest.raises(CheckpointError, match="vision is stated as dummy .* width 24, depth 2"):
        open_checkpoint(tmp_path / "policy", sizes={**sizes, "vision": VISION["dummy"]})
    for source, given in (("policy", config), ("a", None)):
        with pytest.raises(ValueError, match="Give only one of both"):
            open_checkpoint(tmp_path / source, given, sizes=sizes)
