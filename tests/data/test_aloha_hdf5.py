"""ALOHA's HDF5 episodes become v3.0."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from piston.data import check_dataset, open_dataset
from piston.data.aloha_hdf5 import convert_aloha_hdf5, episode_files
from piston.robots.aloha import NAMES

h5py = pytest.importorskip("h5py")

CAMERAS = ("cam_high", "cam_left_wrist")


def image_of(episode: int, step: int, camera: str) -> np.ndarray:
    y, x = np.mgrid[:48, :64]
    shift = 20 * episode + 7 * step + 60 * CAMERAS.index(camera)
    return np.stack([200 - 0 * x, (3 * x + shift) % 256 // 4, 0 * y + shift % 256], -1).astype(
        np.uint8
    )


def jpeg(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=95)
    return buffer.getvalue()


def write_episode(
    path: Path,
    episode: int,
    length: int = 6,
    images: str = "raw",
    joints: int = 14,
    extras: bool = True,
) -> None:
    generator = np.random.default_rng(episode)
    with h5py.File(path, "w") as file:
        file.attrs["sim"] = True
        file.attrs["compress"] = images != "raw"
        file["action"] = generator.normal(size=(length, joints))
        file["observations/qpos"] = generator.normal(size=(length, joints))
        if extras:
            file["observations/qvel"] = generator.normal(size=(length, joints))
            file["observations/effort"] = generator.normal(size=(length, joints))
        for camera in CAMERAS:
            name = f"observations/images/{camera}"
            pictures = [image_of(episode, step, camera) for step in range(length)]
            if images == "raw":
                file.create_dataset(name, data=np.stack(pictures), chunks=(1, 48, 64, 3))
                continue
            packed = [np.frombuffer(jpeg(picture), np.uint8) for picture in pictures]
            if images == "padded":
                width = max(map(len, packed)) + 10
                rows = np.stack([np.pad(data, (0, width - len(data))) for data in packed])
                file.create_dataset(name, data=rows, chunks=(1, width))
            else:
                rows = file.create_dataset(name, (length,), dtype=h5py.vlen_dtype(np.uint8))
                for step, data in enumerate(packed):
                    rows[step] = data
        if images == "padded":
            file["compress_len"] = np.zeros((len(CAMERAS), length))


@pytest.mark.parametrize("images", ["raw", "padded", "variable"])
def test_episodes(tmp_path: Path, images: str) -> None:
    folder = tmp_path / "hdf5"
    folder.mkdir()
    for episode in range(3):
        write_episode(folder / f"episode_{episode}.hdf5", episode, 5 + episode, images)
    calls: list[tuple[int, int]] = []
    target = tmp_path / "set"
    done = convert_aloha_hdf5(
        *(folder, target, "transfer the cube"),
        progress=lambda *numbers: calls.append(numbers),
        images="image",
    )
    assert (done.num_episodes, done.num_frames) == (3, 18)
    assert calls == [(5, 18), (11, 18), (18, 18)]
    dataset = open_dataset(target)
    assert (dataset.fps, dataset.metadata.robot_type) == (50, "aloha")
    assert dataset.metadata.features["action"].names == list(NAMES)
    index = 0
    for episode in range(3):
        with h5py.File(folder / f"episode_{episode}.hdf5") as file:
            expected = {
                "action": file["action"][:],
                "observation.state": file["observations/qpos"][:],
                "observation.velocity": file["observations/qvel"][:],
                "observation.effort": file["observations/effort"][:],
            }
        for step in range(5 + episode):
            item = dataset[index]
            for key, values in expected.items():
                np.testing.assert_array_equal(item[key], values[step].astype(np.float32))
            for camera in CAMERAS:
                found = item[f"observation.images.{camera}"].astype(int)
                error = np.abs(found - image_of(episode, step, camera))
                # Red stays red: compressed images are RGB once decoded.
                assert error.max() == 0 if images == "raw" else error.mean() < 3
            assert item["task"] == "transfer the cube"
            index += 1
    assert index == len(dataset)
    assert check_dataset(target) == []


def test_video(tmp_path: Path) -> None:
    write_episode(tmp_path / "episode_0.hdf5", 0, length=8)
    convert_aloha_hdf5(tmp_path / "episode_0.hdf5", tmp_path / "set", "task", codec="h264")
    dataset = open_dataset(tmp_path / "set")
    for step in range(8):
        found = dataset[step]["observation.images.cam_high"].astype(int)
        assert np.abs(found - image_of(0, step, "cam_high")).mean() < 6


def test_choices(tmp_path: Path) -> None:
    paths = [tmp_path / f"episode_{number}.hdf5" for number in (10, 2)]
    for path in paths:
        write_episode(path, int(path.stem[8:]), joints=7, extras=False)
    # A folder goes by number, a list as it is given.
    assert episode_files(tmp_path) == paths[::-1]
    convert_aloha_hdf5(
        *(paths, tmp_path / "set", lambda path: f"task of {path.stem}"),
        fps=25,
        bgr=True,
        images="image",
    )
    dataset = open_dataset(tmp_path / "set")
    assert [dataset[i]["task"] for i in (0, 6)] == ["task of episode_10", "task of episode_2"]
    assert "observation.velocity" not in dataset.metadata.features
    assert dataset.metadata.features["action"].names == [f"motor_{i}" for i in range(7)]
    np.testing.assert_array_equal(
        dataset[0]["observation.images.cam_high"], image_of(10, 0, "cam_high")[:, :, ::-1]
    )


def break_length(file: Any) -> None:
    del file["action"]
    file["action"] = np.zeros((3, 14))


def break_number(file: Any) -> None:
    file["action"][2, 3] = np.nan


def break_shape(file: Any) -> None:
    del file["observations/qvel"]
    file["observations/qvel"] = np.zeros((6, 13))


def break_camera(file: Any) -> None:
    del file["observations/images/cam_high"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_length, r"episode_1.hdf5: lengths differ"),
        (break_shape, r"episode_1.hdf5: /observations/qvel has shape \(13,\), .* \(14,\)"),
        (break_camera, r"episode_1.hdf5 has no /observations/images/cam_high"),
    ],
)
def test_a_broken_episode_is_an_error_or_left_out(
    tmp_path: Path, change: Any, message: str
) -> None:
    folder = tmp_path / "hdf5"
    folder.mkdir()
    for episode in range(3):
        write_episode(folder / f"episode_{episode}.hdf5", episode)
    with h5py.File(folder / "episode_1.hdf5", "a") as file:
        change(file)
    target = tmp_path / "set"
    with pytest.raises(ValueError, match=message):
        convert_aloha_hdf5(folder, target, "task", images="image")
    assert [path.name for path in tmp_path.iterdir()] == ["hdf5"]
    done = convert_aloha_hdf5(folder, target, "task", images="image", skip_broken=True)
    assert list(done.skipped) == ["episode_1.hdf5"]
    dataset = open_dataset(target)
    assert len(dataset) == 12
    np.testing.assert_array_equal(
        dataset[6]["observation.images.cam_high"], image_of(2, 0, "cam_high")
    )


def test_a_bad_number_or_image_names_the_file(tmp_path: Path) -> None:
    write_episode(tmp_path / "episode_0.hdf5", 0)
    write_episode(tmp_path / "episode_1.hdf5", 1)
    with h5py.File(tmp_path / "episode_1.hdf5", "a") as file:
        break_number(file)
    with pytest.raises(ValueError, match=r"episode_1.hdf5, step 2: 'action': NaN"):
        convert_aloha_hdf5(tmp_path, tmp_path / "set", "task", images="image")
    write_episode(tmp_path / "episode_1.hdf5", 1, images="padded")
    with h5py.File(tmp_path / "episode_1.hdf5", "a") as file:
        file["observations/images/cam_high"][3] = 0
    with pytest.raises(ValueError, match=r"episode_1.hdf5: /observations/images/cam_high, step 3"):
        convert_aloha_hdf5(tmp_path, tmp_path / "set", "task", images="image")
    assert not (tmp_path / "set").exists()
    (tmp_path / "episode_2.hdf5").write_bytes((tmp_path / "episode_0.hdf5").read_bytes())
    (tmp_path / "episode_0.hdf5").write_bytes(b"not HDF5")
    done = convert_aloha_hdf5(tmp_path, tmp_path / "set", "task", images="image", skip_broken=True)
    assert sorted(done.skipped) == ["episode_0.hdf5", "episode_1.hdf5"]
    assert (done.num_episodes, done.num_frames, len(open_dataset(tmp_path / "set"))) == (1, 6, 6)


def test_what_is_no_episode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no .hdf5 files"):
        convert_aloha_hdf5(tmp_path, tmp_path / "set", "task")
    with pytest.raises(FileNotFoundError, match="episode_7"):
        convert_aloha_hdf5([tmp_path / "episode_7.hdf5"], tmp_path / "set", "task")
    path = tmp_path / "episode_0.hdf5"
    path.write_bytes(b"not HDF5")
    with pytest.raises(ValueError, match="not a readable HDF5 file"):
        convert_aloha_hdf5(path, tmp_path / "set", "task")
    with h5py.File(path, "w") as file:
        file["action"] = np.zeros((3, 14))
    with pytest.raises(ValueError, match="not an ALOHA episode: it has no /observations/qpos"):
        convert_aloha_hdf5(path, tmp_path / "set", "task")
    write_episode(path, 0)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/precious").write_text("")
    with pytest.raises(FileExistsError, match="exists already"):
        convert_aloha_hdf5(path, tmp_path / "set", "task")
    with pytest.raises(FileExistsError, match="it is not a data set"):
        convert_aloha_hdf5(path, tmp_path / "set", "task", overwrite=True)
    assert (tmp_path / "set/precious").exists()
    with pytest.raises(ValueError, match=r"contains .*episode_0\.hdf5, which is read"):
        convert_aloha_hdf5(path, tmp_path, "task", overwrite=True)
    assert path.exists()
