"""`piston data convert`, from the reference set and from HDF5 episodes."""

import h5py
import numpy as np

from piston.cli import main
from piston.data import open_dataset


def test_v21_becomes_v30_and_reads_the_same(small_reference, tmp_path, capsys):
    source, target = small_reference / "datasets" / "lerobot_v21", tmp_path / "new"
    assert main(["data", "convert", str(source), str(target)]) == 0
    assert "3 episodes" in capsys.readouterr().out
    old, new = open_dataset(source), open_dataset(target)
    assert new.metadata.version == "v3.0"
    assert len(new) == len(old)
    for key in ("action", "observation.state"):
        assert np.array_equal(new.column(key), old.column(key))
    camera = old.cameras[0]
    assert np.array_equal(new[len(new) - 1][camera], old[len(old) - 1][camera])
    assert main(["data", "convert", str(source), str(target)]) == 1
    assert "exists" in capsys.readouterr().err


def test_aloha_episodes_need_a_sentence(tmp_path, capsys):
    folder = tmp_path / "episodes"
    folder.mkdir()
    with h5py.File(folder / "episode_0.hdf5", "w") as file:
        file["observations/qpos"] = np.random.default_rng(0).normal(size=(4, 14))
        file["observations/images/top"] = np.zeros((4, 48, 64, 3), np.uint8)
        file["action"] = np.zeros((4, 14))
    command = ["data", "convert", str(folder), str(tmp_path / "new"), "--codec", "h264"]
    assert main(command) == 1
    assert "--task" in capsys.readouterr().err
    assert main([*command, "--task", "transfer the cube"]) == 0
    dataset = open_dataset(tmp_path / "new")
    assert len(dataset) == 4
    assert dataset[0]["task"] == "transfer the cube"


def test_options_of_another_format_are_refused(small_reference, tmp_path, capsys):
    source = small_reference / "datasets" / "lerobot_v21"
    assert main(["data", "convert", str(source), str(tmp_path / "x"), "--bgr"]) == 1
    assert "HDF5" in capsys.readouterr().err
