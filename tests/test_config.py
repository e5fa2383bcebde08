"""Contradictions are refused at once, with what to change."""

import dataclasses
import json

import numpy as np
import pytest

from piston import presets
from piston.config import TrainConfig
from piston.data.pipeline import open_source
from piston.models.configs import (
    GEMMA,
    Pi0Config,
    Pi0FASTConfig,
    parse_gemma_size,
    parse_vision_size,
    size_name,
)
from piston.transforms import compose
from piston.transforms.normalize import NormStats, write_norm_stats


def _replace(name, **changes):
    return dataclasses.replace(presets.get(name), **changes)


def test_resume_and_overwrite_contradict():
    with pytest.raises(ValueError, match="--resume .* --overwrite .* contradict"):
        _replace("pi0_aloha", resume=True, overwrite=True)


def test_lora_with_nothing_frozen_says_what_to_freeze():
    model = Pi0Config(vlm=GEMMA["gemma_2b_lora"])
    with pytest.raises(ValueError, match=r"vlm have LoRA .* --freeze 'vlm\.\*' '!\*lora\*'"):
        _replace("pi0_libero", model=model)


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", 0), ("save_interval", 0), ("num_workers", -1), ("ema_decay", 1.0)],
)
def test_numbers_out_of_range_name_their_flag(field, value):
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} must"):
        _replace("pi0_libero", **{field: value})


def test_experts_must_share_their_attention():
    with pytest.raises(ValueError, match="depth must agree: vlm has 18, action_expert has 4"):
        Pi0Config(action_expert=GEMMA["dummy"])


def test_prompt_length_follows_the_family_even_when_it_is_overridden():
    assert dataclasses.replace(Pi0Config(), pi05=True).prompt_length == 200
    assert Pi0Config().prompt_length == 48
    assert Pi0FASTConfig().prompt_length == 250
    assert Pi0Config(pi05=True, max_token_len=64).prompt_length == 64


@pytest.mark.parametrize("name", list(GEMMA))
def test_sizes_are_named_and_read_back(name):
    size = GEMMA[name]
    assert size_name(size) == name
    assert parse_gemma_size(name) == size
    odd = dataclasses.replace(size, width=size.width + 2)
    assert size_name(odd).startswith(f"width={odd.width},depth={odd.depth},")


def test_an_unknown_size_lists_the_known_ones():
    with pytest.raises(ValueError, match="Unknown size 'so800m'. Known: so400m"):
        parse_vision_size("so800m")


@pytest.fixture
def aloha_sim(tmp_path) -> TrainConfig:
    return _replace("pi0_aloha_sim", assets_base_dir=str(tmp_path), exp_name="x")


def _stats(dims=14):
    zeros, ones = np.zeros(dims), np.ones(dims)
    return {name: NormStats(zeros, ones, zeros, ones) for name in ("state", "actions")}


def test_missing_statistics_say_which_command_to_run(aloha_sim):
    with pytest.raises(
        FileNotFoundError, match=r"norm_stats.json missing in .*Run: piston stats pi0"
    ):
        aloha_sim.data_config().with_norm_stats("pi0_aloha_sim")


def test_an_unknown_asset_suggests_the_nearest(aloha_sim):
    write_norm_stats(aloha_sim.assets_dirs / "trossen", _stats())
    data = dataclasses.replace(
        aloha_sim.data, assets=dataclasses.replace(aloha_sim.data.assets, asset_id="trosen")
    )
    config = dataclasses.replace(aloha_sim, data=data)
    with pytest.raises(FileNotFoundError, match="asset-id trosen.*Did you mean 'trossen'"):
        config.data_config().with_norm_stats()


@pytest.mark.parametrize("asset_id", ["../other", "/tmp/x", "a/../../b"])
def test_statistics_do_not_leave_a_checkpoints_folder(aloha_sim, asset_id):
    assets = dataclasses.replace(aloha_sim.data.assets, asset_id=asset_id)
    data = dataclasses.replace(aloha_sim.data, assets=assets)
    with pytest.raises(ValueError, match="asset-id is .* must not lead out"):
        dataclasses.replace(aloha_sim, data=data).data_config()


def test_statistics_are_found_where_the_preset_expects_them(aloha_sim):
    folder = aloha_sim.assets_dirs / aloha_sim.data.repo_id
    write_norm_stats(folder, _stats())
    assert json.loads((folder / "norm_stats.json").read_text())["norm_stats"]["state"]["mean"]
    data = aloha_sim.data_config().with_norm_stats()
    assert data.norm_stats is not None
    assert data.norm_stats.keys() == {"state", "actions"}


def test_a_pipeline_without_statistics_refuses_to_be_built(aloha_sim):
    with pytest.raises(ValueError, match="no normalisation statistics"):
        aloha_sim.data_config().input_transforms(training=True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../other", "/tmp"])
def test_a_run_must_not_be_named_after_another_folder(name):
    with pytest.raises(ValueError, match="one plain name"):
        _replace("debug", exp_name=name)


def test_an_exception_alone_freezes_nothing():
    model = Pi0Config(vlm=GEMMA["gemma_2b_lora"])
    with pytest.raises(ValueError, match="nothing is frozen"):
        _replace("pi0_libero", model=model, freeze=("!*lora*",))


def test_rlds_sets_say_that_they_are_not_read():
    preset = presets.get("pi05_full_droid_finetune")
    with pytest.raises(ValueError, match="RLDS files are not read. Convert"):
        open_source(preset.data_config(), preset.model)


@pytest.mark.parametrize(
    ("repo_id", "asset_id"),
    [("owner/name", "owner/name"), ("/data/my_set", "my_set"), ("../sets/cup", "cup")],
)
def test_statistics_of_a_folder_are_named_after_it(repo_id, asset_id):
    preset = presets.get("pi0_aloha_sim")
    data = dataclasses.replace(preset.data, repo_id=repo_id)
    assert dataclasses.replace(preset, data=data).data_config().asset_id == asset_id


def test_the_state_is_perturbed_in_training_and_not_at_inference():
    pipeline = dataclasses.replace(presets.get("tiny_aloha_sim").data_config(), norm_stats={})
    state = np.linspace(0.1, 0.9, 14, dtype=np.float32)
    image, steps = np.zeros((96, 96, 3), np.uint8), np.zeros((121, 14), np.float32)
    item = {"observation.images.top": image, "observation.state": state, "action": steps}
    seen = compose(pipeline.input_transforms(training=True))({**item, "prompt": "go"})
    moved = np.abs(seen["state"] - state)
    assert moved[[6, 13]].max() == 0  # grippers
    assert 0.005 < moved.mean() < 0.05
    # A real-time request carries the previous chunk as actions.
    request = {"images": {"cam_high": image}, "state": state, "actions": steps, "prompt": "go"}
    seen = compose(pipeline.input_transforms(training=False))(request)
    np.testing.assert_array_equal(seen["state"], state)
    assert seen["actions"].shape == (16, 14)
