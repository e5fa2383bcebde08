"""Recording: files as LeRobot writes them, and back again unchanged."""

import contextlib
import functools
import json
import logging
import os
import random
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from piston.data import check_dataset, open_dataset
from piston.data.record import Recorder
from piston.data.record.declare import FrameError
from piston.data.record.encoding import CameraThread, VideoEncoding, encode_video

from .recording_cases import (
    FEATURES,
    FPS,
    VIDEO,
    as_v21,
    check_set,
    files_of,
    length_of,
    numbers_of,
    record,
    seen_in,
)

THREADS = Path("/proc/self/task")


@pytest.mark.parametrize("codec", ["av1", "h264"])
def test_round_trip(tmp_path: Path, codec: str) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, "arm", codec) as recorder:
        for episode in range(3):
            record(recorder, episode)
    assert check_set(root) == 3
    assert check_dataset(root) == []
    dataset = open_dataset(root)
    assert dataset.metadata.robot_type == "arm"
    assert dataset.metadata.features[VIDEO].video["video.codec"] == codec


@pytest.mark.skipif(not THREADS.is_dir(), reason="only Linux lists a program's threads in /proc")
def test_an_encoder_does_not_take_the_processors_from_the_robots_control(tmp_path: Path) -> None:
    encoding = VideoEncoding("av1")
    encode = functools.partial(encode_video, path=tmp_path / "a.mp4", fps=FPS, encoding=encoding)
    camera = CameraThread("top", encode)
    for _ in range(3):
        camera.add(np.zeros((64, 64, 3), np.uint8))
    while len(camera.histograms) < 3:  # the encoder has taken all frames and is still open
        assert camera._thread.is_alive()
        time.sleep(0.01)
    found = []
    for thread in THREADS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # one of an earlier test has ended
            found.append(os.sched_getscheduler(int(thread.name)))
    camera.finish()
    assert len(found) > 10  # those of the encoder, which live as long as it
    assert not set(found) & {os.SCHED_FIFO, os.SCHED_RR}


def test_round_trip_is_exact_for_images_and_all_dtypes(tmp_path: Path) -> None:
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
    with Recorder(tmp_path / "set", 20.0, features) as recorder:
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


def test_each_episode_has_files_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        record(recorder, 0)
    change_info(root, chunks_size=2)  # files per folder
    with Recorder.open(root, codec="h264") as recorder:
        for episode in range(1, 5):
            record(recorder, episode)
            assert check_set(root) == episode + 1  # valid after every episode
    names = [f"chunk-{number // 2:03d}/file-{number % 2:03d}" for number in range(5)]
    assert files_of(root / "data") == [f"{name}.parquet" for name in names]
    assert files_of(root / "videos" / VIDEO) == [f"{name}.mp4" for name in names]
    assert check_dataset(root) == []


def change_info(root: Path, **fields: Any) -> None:
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_set_with_gaps_is_continued_after_its_last_episode(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        for episode in range(4):
            record(recorder, episode)
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path)
    pq.write_table(rows.take([0, 2, 3]), path)  # episode 1 is gone, its files are not
    with Recorder.open(root, codec="h264") as recorder:
        assert recorder.num_episodes == 3
        assert recorder.num_frames == sum(length_of(episode) for episode in (0, 2, 3))
        record(recorder, 4)
    rows = pq.read_table(path).to_pylist()
    assert [row["episode_index"] for row in rows] == [0, 2, 3, 4]
    assert rows[-1]["dataset_from_index"] == rows[-2]["dataset_to_index"]
    assert [row["data/file_index"] for row in rows] == [0, 2, 3, 4]
    dataset = open_dataset(root)
    start, stop = dataset.episode_bounds[-1]
    assert stop - start == length_of(4)
    for step in range(length_of(4)):
        np.testing.assert_array_equal(
            dataset[start + step]["action"], numbers_of(4, step)["action"]
        )
        assert seen_in(dataset[start + step][VIDEO]) == (4, step)


@pytest.mark.parametrize("pattern", [None, "data/{file_index:03d}/{chunk_index:03d}.parquet"])
def test_opening_a_set_with_a_gap_deletes_nothing(tmp_path: Path, pattern: str | None) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        for episode in range(3):
            record(recorder, episode)
    if pattern:
        for number in range(3):
            moved = root / pattern.format(file_index=number, chunk_index=0)
            moved.parent.mkdir()
            (root / f"data/chunk-000/file-{number:03d}.parquet").rename(moved)
        change_info(root, data_path=pattern)
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).take([0, 2]), path)
    for witness in ("witness", ".witness.tmp", "notes/.witness.tmp", "data/witness.parquet"):
        (root / witness).parent.mkdir(exist_ok=True)
        (root / witness).write_text("precious")
    before = {name: (root / name).read_bytes() for name in files_of(root)}
    with Recorder.open(root, codec="h264") as recorder:
        assert {name: (root / name).read_bytes() for name in before if "meta/" not in name} == {
            name: content for name, content in before.items() if "meta/" not in name
        }
        record(recorder, 3)
    assert pq.read_table(path)["episode_index"].to_pylist() == [0, 2, 3]
    assert set(files_of(root)) > before.keys()
    for name, content in before.items():
        if "meta/" not in name:
            assert (root / name).read_bytes() == content
    actions = open_dataset(root).column("action")
    expected = [numbers_of(e, s)["action"] for e in (0, 2, 3) for s in range(length_of(e))]
    np.testing.assert_array_equal(actions, expected)


def test_unfinished_files_behind_a_link_are_not_deleted(tmp_path: Path) -> None:
    root, other = tmp_path / "set", tmp_path / "other"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        record(recorder, 0)
    other.mkdir()
    (other / "witness").write_text("precious")
    (root / ".recording").symlink_to(other)
    with pytest.raises(ValueError, match="is a link"):
        Recorder.open(root, codec="h264")
    assert files_of(other) == ["witness"]


def test_files_that_a_link_in_the_set_leads_to_are_not_deleted(tmp_path: Path) -> None:
    root, other = tmp_path / "set", tmp_path / "other"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        record(recorder, 0)
    (root / "data").rename(other)
    (root / "data").symlink_to(other)
    witnesses = [other / ".notes.tmp", other / "chunk-000/file-001.parquet"]
    for witness in witnesses:
        witness.write_text("precious")
    (root / ".recording").mkdir()
    (root / ".recording/joining.json").write_text(json.dumps([["data", 0, 1], [VIDEO, 0, 1]]))
    with pytest.raises(FileExistsError, match=r"file-001.parquet exists, .* Move it elsewhere"):
        Recorder.open(root, codec="h264")
    assert [witness.read_text() for witness in witnesses] == ["precious"] * 2
    witnesses[1].unlink()
    with Recorder.open(root, codec="h264") as recorder:
        record(recorder, 1)
    assert check_set(root) == 2


@pytest.mark.parametrize(
    "listed",
    ["[1]", "{}", '[["data", 0]]', '[["data", "0", 1]]', '[["x", 0, 1]]', '[["data", -1, 0]]'],
)
def test_a_list_of_unfinished_files_that_no_recorder_wrote(tmp_path: Path, listed: str) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        record(recorder, 0)
    (root / ".recording").mkdir()
    (root / ".recording/joining.json").write_text(listed)
    with pytest.raises(ValueError, match=r"joining\.json"):
        Recorder.open(root, codec="h264")
    assert check_set(root) == 1


def test_a_set_without_free_file_names_is_refused(tmp_path: Path) -> None:
    """LeRobot reads data files in the order of their names: 1000 would come before 999."""
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        record(recorder, 0)
    for folder in ("data", f"videos/{VIDEO}"):
        (root / folder / "chunk-000").rename(root / folder / "chunk-999")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path)
    changed = rows.to_pylist()[0] | {"data/chunk_index": 999, f"videos/{VIDEO}/chunk_index": 999}
    pq.write_table(pa.Table.from_pylist([changed], schema=rows.schema), path)
    with Recorder.open(root, codec="h264") as recorder:
        record(recorder, 1)
    assert check_set(root) == 2
    change_info(root, chunks_size=2)
    with pytest.raises(ValueError, match="is full: all 1000 chunks"):
        Recorder.open(root, codec="h264")
    assert not (root / ".recording").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"data_path": "../elsewhere/{chunk_index}-{file_index}.parquet"},
        {"data_path": "/tmp/{chunk_index}-{file_index}.parquet"},
        {"data_path": "data/all.parquet"},
        {"data_path": "data/{episode_index}.parquet"},
        {"video_path": "videos/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"},
        {"video_path": "videos/../../{video_key}/{chunk_index}/{file_index}.mp4"},
        {"data_path": "data/{chunk_index:0999999999d}/{file_index}.parquet"},
        {"data_path": "data/{chunk_index:{file_index}}/{file_index}.parquet"},
        {"data_path": "data/{chunk_index!r}/{file_index}.parquet"},
        {"data_path": 5},
    ],
)
def test_paths_that_leave_the_set_or_meet_again_are_refused(
    tmp_path: Path, fields: dict[str, str]
) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        record(recorder, 0)
    change_info(root, **fields)
    witness = tmp_path / "elsewhere/0-1.parquet"  # what the next episode would be written to
    witness.parent.mkdir()
    witness.write_text("precious")
    # A recorder that was killed says that it had begun these files.
    (root / ".recording").mkdir()
    (root / ".recording/joining.json").write_text(json.dumps([["data", 0, 1], [VIDEO, 0, 1]]))
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"(data|video)_path is .* expected is a path inside"):
        Recorder.open(root, codec="h264")
    assert files_of(tmp_path) == before
    assert witness.read_text() == "precious"


def test_episode_table_rolls_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piston.data.record.writer.EPISODES_PER_FILE", 3)
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


def test_a_full_disk_costs_only_that_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        record(recorder, 0)
        for failing in ("write_table", "publish"):
            with monkeypatch.context() as patches:

                def full(*_: Any) -> None:
                    raise OSError(28, "No space left on device")

                patches.setattr(f"piston.data.record.writer.{failing}", full)
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
        (
            {"action": np.zeros(3, np.float32)},
            r"'action': found float32\[3\], declared float32\[2\]",
        ),
        (
            {"action": np.zeros(2)},
            r"'action': found float64\[2\], declared float32\[2\]\. Convert it",
        ),
        ({"action": np.array([0, np.nan], np.float32)}, r"'action': NaN or infinite at .* \[1\]"),
        ({"action": np.array([np.inf, 0], np.float32)}, r"'action': NaN or infinite at .* \[0\]"),
        (
            {VIDEO: np.zeros((64, 96, 3))},
            r"images.top': found float64\[64, 96, 3\], .*hold 0\.\.255",
        ),
        (
            {VIDEO: np.zeros((3, 64, 96), np.uint8)},
            r"uint8\[3, 64, 96\], .*channels last: transpose\(1, 2, 0\)",
        ),
        ({VIDEO: np.zeros((64, 95, 3), np.uint8)}, r"found uint8\[64, 95, 3\]"),
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
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
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
    refused("fps must be positive", fps=0)
    refused("fps must be positive", fps=float("inf"))
    refused("'vp9' is not one of av1, h264", codec="vp9")
    refused("no features", features={})
    refused("'depth': images are", features={"depth": {"dtype": "image", "shape": (4, 4, 1)}})
    refused("'x': dtype 'float33'", features={"x": {"dtype": "float33", "shape": (1,)}})
    refused("'index' is filled in", features={"index": {"dtype": "int32", "shape": (1,)}})
    refused("must not be empty or contain '/'", features={"a/b": {"dtype": "bool", "shape": (1,)}})
    assert not (tmp_path / "set").exists()  # constructing touches nothing


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES) as recorder:
        record(recorder, 0)
    with pytest.raises(FileExistsError, match="resume=True"):
        Recorder(root, FPS, FEATURES).add_frame(frame_of(), "task")
    with pytest.raises(ValueError, match="fps is 10 there, 20 here"):
        Recorder(root, 20, FEATURES, resume=True).add_frame(frame_of(), "task")
    other = {"action": {"dtype": "float32", "shape": (3,)}}
    with pytest.raises(ValueError, match=r"action is float32\[2\] there, float32\[3\] here"):
        Recorder(root, FPS, other, resume=True).add_frame(frame_of(), "task")
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="not a data set"):
        Recorder(tmp_path / "documents", FPS, FEATURES).add_frame(frame_of(), "task")
    with pytest.raises(ValueError, match="no frames to save"):
        Recorder(tmp_path / "empty", FPS, FEATURES).save_episode()
    assert check_set(root) == 1
    with pytest.raises(ValueError, match=r"v2.1 set, only v3.0 .* piston data convert"):
        Recorder.open(as_v21(root, tmp_path / "v21"))


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


def test_the_checksums_of_data_files_are_compared(tmp_path: Path) -> None:
    """A changed byte in the values costs the episode; it is never read as other numbers."""
    root = tmp_path / "set"
    with Recorder(root, FPS, FEATURES, codec="h264") as recorder:
        for episode in range(2):
            record(recorder, episode)
    [path, _] = sorted(root.glob("data/*/*.parquet"))
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    generator = random.Random(0)
    for _ in range(30):
        changed = bytearray(data)
        changed[generator.randrange(4, footer)] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        dataset = open_dataset(root)
        episodes = [episode.index for episode in dataset.episodes]
        if 0 in episodes:  # a byte that says nothing about the values
            for step in range(length_of(0)):
                for key, value in numbers_of(0, step).items():
                    np.testing.assert_array_equal(dataset[step][key], value)
        assert 1 in episodes
        dataset.close()


def test_an_encoder_that_fails_at_the_end_of_a_video_is_not_waited_for():
    def fails(images):
        assert len(list(images)) == 2
        raise OSError("no space")

    thread = CameraThread("top", fails)
    for _ in range(2):
        thread.add(np.zeros((2, 2, 3), np.uint8))
    with pytest.raises(OSError, match="no space"):
        thread.finish()
