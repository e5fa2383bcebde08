"""From a recorded data set to a policy: statistics, cache, validation, a folder that is enough."""

import dataclasses
import logging
import shlex
import shutil
from collections import Counter

import numpy as np
import pytest
import tyro
from tests.data.opened_files import count_opened

import piston
from piston import presets
from piston.config import AssetsConfig
from piston.models.configs import LoRA
from piston.robots.simple import LIBERO as LIBERO_ROBOT
from piston.robots.simple import LeRobotLiberoDataConfig
from piston.training import loop
from piston.training.loop import train_loop
from piston.transforms.normalize import read_norm_stats, write_norm_stats

from .recording import LIBERO, PIXELS, recorded
from .running import assert_same_run, assert_same_tensors, metrics, note_batches, state, tiny
from .tiny_presets import GEMMA


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("data"), episodes=4, frames=8)


def _example():
    image = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    pictures = dict.fromkeys(("observation/image", "observation/wrist_image"), image)
    return {**LIBERO_ROBOT.example(), **pictures}


@pytest.mark.parametrize("changes", [{}, {"cache_frames": True, "num_workers": 1}])
def test_a_checkpoint_of_recorded_data_is_all_a_policy_needs(tmp_path, data, changes, monkeypatch):
    monkeypatch.setenv("PISTON_HOME", str(tmp_path / "home"))
    last = train_loop(tiny(tmp_path, **data, **changes))
    moved = tmp_path / "elsewhere"
    last.rename(moved)
    policy = piston.load_policy(moved)
    result = policy.infer(_example(), seed=0)
    assert result["actions"].shape == (LIBERO.action_horizon, 7)
    assert np.isfinite(result["actions"]).all()
    assert (moved / "assets" / "libero" / "norm_stats.json").exists()


def test_cached_frames_change_nothing(tmp_path, data, monkeypatch):
    monkeypatch.setenv("PISTON_HOME", str(tmp_path / "home"))
    train_loop(tiny(tmp_path / "plain", **data))
    train_loop(tiny(tmp_path / "cached", **data, cache_frames=True))
    plain, cached = (tmp_path / kind / "tiny" / "run" for kind in ("plain", "cached"))
    assert_same_run(plain, cached, 5)


def test_training_opens_the_files_of_its_data_set_once(tmp_path, monkeypatch):
    """Training, validation and the cache share one open data set."""
    monkeypatch.setenv("PISTON_HOME", str(tmp_path / "home"))
    data = recorded(tmp_path, episodes=4, frames=8, cameras="video")
    with count_opened(tmp_path / "cups") as opened:
        train_loop(tiny(tmp_path, **data, cache_frames=True, validation_episodes=1))
    tables = {path: count for path, count in opened.items() if not path.endswith(".mp4")}
    expected = {"meta/info.json", "meta/tasks.parquet"}
    folder = tmp_path / "cups"
    for pattern in ("meta/episodes/*/*.parquet", "data/*/*.parquet"):
        expected |= {path.relative_to(folder).as_posix() for path in folder.glob(pattern)}
    assert tables == dict.fromkeys(expected, 1)


def test_adapters_are_trained_saved_and_served(tmp_path, data):
    model = dataclasses.replace(
        data["model"], vlm=dataclasses.replace(GEMMA, lora=LoRA(rank=2, alpha=2.0))
    )
    changes = {**data, "model": model, "freeze": ("vision.*", "vlm.*", "!*lora*")}
    last = train_loop(tiny(tmp_path, **changes))
    result = piston.load_policy(last).infer(_example(), seed=0)
    assert np.isfinite(result["actions"]).all()


def test_validation_on_held_out_episodes(tmp_path, data, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="piston")
    seen = note_batches(monkeypatch)
    changes = {"validation_episodes": 1, "validation_interval": 4, "num_train_steps": 10}
    train_loop(tiny(tmp_path, **data, **changes))
    lines = [line for line in metrics(tmp_path / "tiny/run") if "validation/loss" in line]
    assert [line["step"] for line in lines] == [4, 8, 9]
    per_dim = lines[-1]["validation/action_error_per_dim"]
    # The robot's names: the set declares none.
    assert list(per_dim) == ["x", "y", "z", "rx", "ry", "rz", "gripper"]
    assert lines[-1]["validation/action_error"] == pytest.approx(np.mean([*per_dim.values()]))
    assert "validation/action_error" in caplog.text
    trained_on = {index for _, batch in seen for index in batch}
    assert len({index // 8 for index in trained_on}) == 3  # of four episodes of eight frames


def test_starts_of_episodes_are_drawn_more_often(tmp_path, data, monkeypatch):
    seen = note_batches(monkeypatch)
    epoch = 4 * 8 + 3 * 4 * 2  # four episodes of eight frames
    changes = {"start_frames": 2, "start_weight": 4, "num_train_steps": epoch // 4}
    config = tiny(tmp_path, **data, **changes)
    train_loop(config)
    drawn = [index for _, batch in seen for index in batch]
    assert len(drawn) == epoch
    counts = Counter(index % 8 for index in drawn)
    assert counts == {frame: 16 if frame < 2 else 4 for frame in range(8)}
    with pytest.raises(ValueError, match="one does nothing without the other"):
        dataclasses.replace(config, start_weight=1)


def test_validation_is_of_the_weights_that_get_served(tmp_path, data):
    """And leaves those that train as they were."""
    changes = {"validation_episodes": 1, "validation_interval": 1}
    train_loop(tiny(tmp_path / "often", **data, **changes))
    changes = {"validation_episodes": 1, "validation_interval": 100}
    train_loop(tiny(tmp_path / "seldom", **data, **changes))
    often, seldom = (state(tmp_path / kind / "tiny/run/5") for kind in ("often", "seldom"))
    assert_same_tensors(often, seldom)


def test_missing_statistics_are_told_of_before_anything_else(tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("something slow happened")

    for slow in ("open_run", "open_training_data", "_initial_model"):
        monkeypatch.setattr(loop, slow, never)
    factory = LeRobotLiberoDataConfig(repo_id="you/cups", assets=AssetsConfig(asset_id="cups"))
    config = tiny(tmp_path, data=factory, assets_base_dir=str(tmp_path / "assets"))
    with pytest.raises(FileNotFoundError, match="norm_stats.json missing.*Run: piston stats tiny"):
        train_loop(config)


def test_the_command_for_missing_statistics_is_complete(tmp_path, data):
    """What differs from the preset, and nothing else."""
    factory = dataclasses.replace(
        data["data"],
        repo_id="my cups",
        assets=AssetsConfig(assets_dir=str(tmp_path / "stats"), asset_id="cups"),
    )
    config = tiny(tmp_path, data=factory, assets_base_dir="elsewhere")
    with pytest.raises(FileNotFoundError) as missing:
        train_loop(config)
    command = str(missing.value).partition("Run: piston stats ")[2]
    assert "--data.repo-id 'my cups'" in command
    own = dataclasses.replace(presets.get("tiny"), data=LeRobotLiberoDataConfig(), name="cups")
    preset, *options = shlex.split(command)
    assert preset == "tiny"
    parsed = tyro.extras.overridable_config_cli({"cups": ("", own)}, args=["cups", *options])
    assert parsed.data == factory
    assert parsed.assets_base_dir == "elsewhere"
    with pytest.raises(FileNotFoundError, match="Run: piston stats pi0_aloha_sim$"):
        train_loop(dataclasses.replace(presets.get("pi0_aloha_sim"), exp_name="x"))


def test_resuming_with_other_statistics_is_told(tmp_path, data, caplog):
    assets = tmp_path / "assets"
    shutil.copytree(data["data"].assets.assets_dir, assets)
    where = AssetsConfig(assets_dir=str(assets), asset_id="libero")
    changes = {**data, "data": dataclasses.replace(data["data"], assets=where)}
    train_loop(tiny(tmp_path, **changes, num_train_steps=2))
    train_loop(tiny(tmp_path, **changes, num_train_steps=3, resume=True))
    assert "statistics" not in caplog.text
    stats = read_norm_stats(assets / "libero")
    wider = dataclasses.replace(stats["state"], std=2 * stats["state"].std)
    write_norm_stats(assets / "libero", {**stats, "state": wider})
    train_loop(tiny(tmp_path, **changes, num_train_steps=4, resume=True))
    assert "The statistics of libero are not those that" in caplog.text


def test_an_absolute_folder_gives_its_statistics_its_name(tmp_path, data):
    assets = tmp_path / "assets"
    shutil.copytree(f"{data['data'].assets.assets_dir}/libero", assets / "cups")
    factory = dataclasses.replace(data["data"], assets=AssetsConfig(assets_dir=str(assets)))
    last = train_loop(tiny(tmp_path, **{**data, "data": factory}))
    assert (last / "assets" / "cups" / "norm_stats.json").exists()
    assert piston.load_policy(last).infer(_example())["actions"].shape[-1] == 7
