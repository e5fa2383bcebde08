"""Recording: files as LeRobot writes them, and back again unchanged."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from piston.data import check_dataset, open_dataset
from piston.data.features import FrameError
from piston.data.recorder import Recorder
from piston.data.video_encoding import VideoEncoding, VideoThread

from .recording_cases import (
    FEATURES,
    FPS,
    TINY,
    VIDEO,
    check_set,
    files_of,
    length_of,
    record,
    video,
)

THREADS = Path("/proc/self/task")


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("codec", ["av1", "h264"])
def test_round_trip(tmp_path: Path, version: str, codec: str) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, "arm", version, codec) as recorder:
        for episode in range(3):
            record(recorder, episode)
    assert check_set(root) == 3
    assert check_dataset(root) == []
    dataset = open_dataset(root)
    assert dataset.metadata.robot_type == "arm"
    assert dataset.metadata.features[VIDEO].video["video.codec"] == codec


@pytest.mark.skipif(not THREADS.is_dir(), reason="only Linux lists a program's threads in /proc")
def test_an_encoder_does_not_take_the_processors_from_the_robots_control(tmp_path: Path) -> None:
    camera = VideoThread("top", tmp_path / "a.mp4", FPS, [64, 64, 3], VideoEncoding("av1"))
    for _ in range(3):
        camera.add(np.zeros((64, 64, 3), np.uint8))
    camera.finish()
    threads = [int(thread.name) for thread in THREADS.iterdir()]
    assert len(threads) > 10  # those of the encoder, which live as long as it
    found = {os.sched_getscheduler(thread) for thread in threads}
    assert not found & {os.SCHED_FIFO, os.SCHED_RR}


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_round_trip_is_exact_for_images_and_all_dtypes(tmp_path: Path, version: str) -> None:
    features = {
        "camera": {"dtype": "image", "shape": (7, 9, 3)},
        "matrix": {"dtype": "float64", "shape": (2, 3)},
        "count": {"dtype": "int64", "shape": (1,)},
        "done": {"dtype": "bool", "shape": (1,)},
        "codes": {"dtype": "uint8", "shape": (4,)},
    }
    generator = np.random.default_rng(0)
    frames = [
        {
            "camera": generator.integers(0, 256, (7, 9, 3), dtype=np.uint8),
            "matrix": generator.normal(size=(2, 3)),
            "count": np.array([2**53 + 1 + step]),
            "done": np.array([step == 4]),
            "codes": generator.integers(0, 256, 4, dtype=np.uint8),
        }
        for step in range(5)
    ]
    with Recorder(tmp_path / "set", 20.0, features, version=version) as recorder:
        for frame in frames:
            recorder.add_frame(frame, "look")
        recorder.save_episode()
    assert not (tmp_path / "set/videos").exists()
    dataset = open_dataset(tmp_path / "set")
    for step, frame in enumerate(frames):
        for key, value in frame.items():
            found = np.asarray(dataset[step][key])
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(found.reshape(value.shape), value)


def test_lossy_video_keeps_the_picture(tmp_path: Path) -> None:
    y, x = np.mgrid[:120, :160]
    images = [
        np.stack([x + step, y, 128 + 60 * np.sin(x / 9 + step)], -1).astype(np.uint8)
        for step in range(10)
    ]
    features = {VIDEO: {"dtype": "video", "shape": (120, 160, 3)}}
    quality = {}
    for crf in (10, 40):
        root = tmp_path / str(crf)
        encoding = VideoEncoding("h264", crf=crf, preset="veryfast")
        with Recorder(root, 30, features, codec=encoding) as recorder:
            for image in images:
                recorder.add_frame({VIDEO: image}, "look")
            recorder.save_episode()
        dataset = open_dataset(root)
        errors = [
            np.square(dataset[i][VIDEO] - image.astype(float)) for i, image in enumerate(images)
        ]
        quality[crf] = 10 * np.log10(255**2 / np.mean(errors))
    assert quality[10] > 35  # dB; chroma is stored at half size
    assert quality[40] < quality[10] - 3


def test_joined_videos_show_the_frames_of_the_separate_ones(tmp_path: Path) -> None:
    root = tmp_path / "set"
    recorder = Recorder(root, FPS, FEATURES, codec="av1")
    for episode in range(3):
        record(recorder, episode)
    separate = [video(path)[-1] for path in sorted(root.glob("videos/*/chunk-999/*.mp4"))]
    assert [len(frames) for frames in separate] == [length_of(episode) for episode in range(3)]
    recorder.finalize()
    [joined] = root.glob("videos/*/*/*.mp4")
    np.testing.assert_array_equal(video(joined)[-1], np.concatenate(separate))


def test_files_roll_over(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264", chunks_size=2, **TINY) as recorder:
        for episode in range(12):
            record(recorder, episode)
            # What waits to be joined is bounded by the file size, not by the set.
            assert len(list(root.glob("data/chunk-999/*"))) <= 3
    assert check_set(root) == 12
    data = files_of(root / "data")
    assert data[:3] == [
        "chunk-000/file-000.parquet",
        "chunk-000/file-001.parquet",
        "chunk-001/file-000.parquet",
    ]
    assert len(data) < 12
    limit = TINY["data_files_size_in_mb"] * 2**20
    assert all((root / "data" / name).stat().st_size <= limit for name in data)
    assert check_dataset(root) == []


def test_episode_table_rolls_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piston.data.episode_rows.EPISODES_PER_FILE", 3)
    root = tmp_path / "set"
    for first in (0, 5):
        with Recorder(root, FPS, FEATURES, codec="h264", resume=True) as recorder:
            for episode in range(first, first + 5):
                record(recorder, episode)
    assert check_set(root) == 10
    assert len(list(root.glob("meta/episodes/*/*"))) == 4
    stats = json.loads((root / "meta/stats.json").read_text())
    assert stats["index"]["count"] == [sum(length_of(episode) for episode in range(10))]
    assert stats["index"]["max"] == [stats["index"]["count"][0] - 1]


def test_discarded_frames_leave_nothing(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for codec in ("h264", "av1"):
        with Recorder(root, FPS, FEATURES, codec=codec, resume=True) as recorder:
            saved = recorder.num_episodes
            recorder.discard_episode()
            recorder.add_frame({**frame_of(), "action": np.ones(2, np.float32)}, "wrong")
            recorder.discard_episode()
            assert recorder.num_unsaved_frames == 0
            record(recorder, saved)
    assert check_set(root) == 2
    assert "wrong" not in open_dataset(root).metadata.tasks.values()


def test_unsaved_frames_are_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Recorder(tmp_path / "set", FPS, FEATURES) as recorder:
        record(recorder, 0)
        recorder.add_frame(frame_of(), "never saved")
    assert "1 frames were not saved" in caplog.text
    assert check_set(tmp_path / "set") == 1
    with pytest.raises(RuntimeError, match=r"finalized\. Continue with Recorder\.open"):
        recorder.add_frame(frame_of(), "too late")


def test_an_error_while_recording_keeps_what_was_saved(tmp_path: Path) -> None:
    def fail() -> None:
        with Recorder(tmp_path / "set", FPS, FEATURES) as recorder:
            record(recorder, 0)
            recorder.add_frame(frame_of(), "half")
            raise ConnectionError("the robot is gone")

    with pytest.raises(ConnectionError, match="the robot is gone"):
        fail()
    assert check_set(tmp_path / "set") == 1


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_a_full_disk_costs_only_that_episode(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, version=version, codec="h264") as recorder:
        record(recorder, 0)
        for failing in ("write_table", "publish"):
            with monkeypatch.context() as patches:

                def full(*_: Any) -> None:
                    raise OSError(28, "No space left on device")

                patches.setattr(f"piston.data.store_{version.replace('.', '')}.{failing}", full)
                with pytest.raises(OSError, match="No space"):
                    record(recorder, 1)
            assert recorder.num_episodes == 1
        record(recorder, 1)
    assert check_set(root) == 2


def frame_of() -> dict[str, Any]:
    return {
        VIDEO: np.zeros((64, 96, 3), np.uint8),
        "observation.state": np.zeros(3, np.float32),
        "action": np.zeros(2, np.float32),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": None}, r"missing \['action'\]"),
        ({"actions": np.zeros(2, np.float32)}, r"not declared \['actions'\]"),
        ({"index": np.zeros(1)}, r"not declared \['index'\]"),
        ({"action": np.zeros(3, np.float32)}, r"'action': shape is \(3,\), declared \(2,\)"),
        ({"action": np.zeros(2)}, r"'action': dtype is float64, declared float32"),
        ({"action": np.array([0, np.nan], np.float32)}, r"'action': NaN or infinite at .* \[1\]"),
        ({"action": np.array([np.inf, 0], np.float32)}, r"'action': NaN or infinite at .* \[0\]"),
        ({VIDEO: np.zeros((64, 96, 3))}, r"observation.images.top': image dtype is float64"),
        ({VIDEO: np.zeros((3, 64, 96), np.uint8)}, r"Channels go last: transpose\(1, 2, 0\)"),
        ({VIDEO: np.zeros((64, 95, 3), np.uint8)}, r"image shape is \(64, 95, 3\)"),
    ],
)
def test_a_wrong_frame_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    frame = {key: value for key, value in (frame_of() | change).items() if value is not None}
    with Recorder(tmp_path / "set", FPS, FEATURES) as recorder:
        record(recorder, 0)
        with pytest.raises(FrameError, match=message):
            recorder.add_frame(frame, "task")
        assert recorder.num_unsaved_frames == 0  # nothing of it was taken
        record(recorder, 1)
    assert check_set(tmp_path / "set") == 2


def test_a_frame_may_reuse_its_buffers(tmp_path: Path) -> None:
    frame = frame_of()
    with Recorder(tmp_path / "set", FPS, FEATURES, codec="h264") as recorder:
        for step in range(8):
            frame["action"][:] = step
            frame[VIDEO][:] = 30 * step
            recorder.add_frame(frame, "task")
        recorder.save_episode()
    dataset = open_dataset(tmp_path / "set")
    for step in range(8):
        assert (dataset[step]["action"] == step).all()
        assert abs(dataset[step][VIDEO].mean() - 30 * step) < 3


def test_tasks_can_change_within_an_episode(tmp_path: Path) -> None:
    for version in ("v3.0", "v2.1"):
        root = tmp_path / version
        with Recorder(root, FPS, FEATURES, version=version, codec="h264") as recorder:
            for task in ("reach", "grasp", "reach"):
                recorder.add_frame(frame_of(), task)
            recorder.save_episode()
        dataset = open_dataset(root)
        assert [dataset[i]["task"] for i in range(3)] == ["reach", "grasp", "reach"]
        assert dataset.metadata.episodes[0].tasks == ("reach", "grasp")


def test_what_cannot_be_recorded_is_refused_at_once(tmp_path: Path) -> None:
    def refused(message: str, **change: Any) -> None:
        arguments = {"root": tmp_path / "set", "fps": FPS, "features": FEATURES} | change
        with pytest.raises(ValueError, match=message):
            Recorder(**arguments)

    odd = {VIDEO: {"dtype": "video", "shape": (63, 96, 3)}}
    refused("even height and width, found 63x96", features=odd)
    refused("recording writes v3.0 or v2.1", version="v2.0")
    refused("fps must be positive", fps=0)
    refused("fps must be positive", fps=float("inf"))
    refused("'vp9' is not one of av1, h264", codec="vp9")
    refused("no features", features={})
    refused("'depth': images are", features={"depth": {"dtype": "image", "shape": (4, 4, 1)}})
    refused("'x': dtype 'float33'", features={"x": {"dtype": "float33", "shape": (1,)}})
    refused("'index' is filled in", features={"index": {"dtype": "int32", "shape": (1,)}})
    refused("must not be empty or hold '/'", features={"a/b": {"dtype": "bool", "shape": (1,)}})
    refused("mean nothing", version="v2.1", data_files_size_in_mb=1)
    assert not (tmp_path / "set").exists()  # constructing touches nothing


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES) as recorder:
        record(recorder, 0)
    with pytest.raises(FileExistsError, match="resume=True"):
        Recorder(root, FPS, FEATURES).add_frame(frame_of(), "task")
    with pytest.raises(ValueError, match="fps 10, this recording 20"):
        Recorder(root, 20, FEATURES, resume=True).add_frame(frame_of(), "task")
    with pytest.raises(ValueError, match="chunks_size 1000, this recording 5"):
        Recorder(root, FPS, FEATURES, resume=True, chunks_size=5).add_frame(frame_of(), "task")
    other = {"action": {"dtype": "float32", "shape": (3,)}}
    with pytest.raises(ValueError, match=r"other features .* action float32\[2\]"):
        Recorder(root, FPS, other, resume=True).add_frame(frame_of(), "task")
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="not a data set"):
        Recorder(tmp_path / "documents", FPS, FEATURES).add_frame(frame_of(), "task")
    with pytest.raises(ValueError, match="no frames to save"):
        Recorder(tmp_path / "empty", FPS, FEATURES).save_episode()
    assert check_set(root) == 1


def test_an_encoder_that_fails_says_so(tmp_path: Path) -> None:
    encoding = VideoEncoding("h264", preset="no such preset")
    with Recorder(tmp_path / "set", FPS, FEATURES, codec=encoding) as recorder:
        with pytest.raises(av.FFmpegError):
            record(recorder, 0)
        assert recorder.num_episodes == 0


@pytest.mark.parametrize("fps", [15, 29.97, 30000 / 1001, 50])
def test_video_times_follow_fps(tmp_path: Path, fps: float) -> None:
    root = tmp_path / "set"
    with Recorder(root, fps, FEATURES, codec="h264") as recorder:
        for _ in range(2):
            for step in range(40):
                frame = frame_of()
                frame[VIDEO][:] = 6 * step
                recorder.add_frame(frame, "task")
            recorder.save_episode()
    dataset = open_dataset(root)  # looks frames up by time, within 0.1 ms
    for index in (0, 17, 39, 40, 61, 79):
        assert abs(dataset[index][VIDEO].mean() - 6 * (index % 40)) < 3
