"""What the recorder writes is what LeRobot's own writers wrote, field by field."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from piston.data import check_dataset, open_dataset
from piston.data.record import Recorder

from .recording_cases import files_of, video

TASKS = ("Transfer cube", "Open the drawer")
JOINTS = [f"j{i}" for i in range(14)]
CAMERAS = ("observation.images.top", "observation.images.wrist")
REFERENCE_FEATURES = {
    "observation.images.top": {"dtype": "video", "shape": (48, 64, 3)},
    "observation.images.wrist": {"dtype": "video", "shape": (48, 64, 3)},
    "observation.state": {"dtype": "float32", "shape": (14,), "names": JOINTS},
    "action": {"dtype": "float32", "shape": (14,), "names": JOINTS},
}


def reference_image(episode: int, step: int, camera: str) -> np.ndarray:
    """The frames that LeRobot's writers were given (found from the statistics they wrote)."""
    wrist = camera == "observation.images.wrist"
    y, x = np.mgrid[:48, :64]
    red = 3 * x + 6 * step + 40 * episode
    green = 4 * y + 3 * step + 90 * wrist
    blue = np.full_like(x, 8 * step + 30 * episode + 60 * wrist)
    return (np.stack([red, green, blue], axis=-1) % 256).astype(np.uint8)


def record_reference(source: Path, target: Path) -> None:
    tables = [pq.read_table(path) for path in sorted((source / "data").glob("*/*.parquet"))]
    with Recorder(target, 25, REFERENCE_FEATURES) as recorder:
        for row in pa.concat_tables(tables).to_pylist():
            if row["frame_index"] == 0 and recorder.num_unsaved_frames:
                recorder.save_episode()
            episode, step = row["episode_index"], row["frame_index"]
            frame = {key: np.float32(row[key]) for key in ("observation.state", "action")}
            for camera in CAMERAS:
                frame[camera] = reference_image(episode, step, camera)
            recorder.add_frame(frame, TASKS[row["task_index"]])
        recorder.save_episode()


@pytest.fixture(scope="module")
def both(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What we wrote and what LeRobot wrote from the same frames."""
    source, target = reference / "datasets/lerobot_v30", tmp_path_factory.mktemp("sets") / "set"
    record_reference(source, target)
    return target, source


def test_same_files_and_info_as_lerobot(both: tuple[Path, Path]) -> None:
    ours, theirs = both
    assert set(files_of(ours / "meta")) - {"piston.json"} == set(files_of(theirs / "meta"))
    # As text: also the order of the fields and whether numbers are whole.
    assert (ours / "meta/info.json").read_text() == (theirs / "meta/info.json").read_text()
    # LeRobot puts several episodes into a file, we give each its own.
    for folder in ("data", *(f"videos/{camera}" for camera in CAMERAS)):
        [path] = (theirs / folder).glob("*/*")
        names = [f"chunk-000/file-{episode:03d}{path.suffix}" for episode in range(3)]
        assert files_of(ours / folder) == names


def test_same_data_tables_as_lerobot(both: tuple[Path, Path]) -> None:
    ours, theirs = both
    found = [pq.ParquetFile(path) for path in sorted(ours.glob("data/*/*.parquet"))]
    [expected] = [pq.ParquetFile(path) for path in theirs.glob("data/*/*.parquet")]
    assert pa.concat_tables([file.read() for file in found]).equals(expected.read())
    assert [n for file in found for n in row_groups(file)] == row_groups(expected)
    for file in found:
        assert file.schema_arrow.equals(expected.schema_arrow)
        described = [
            json.loads(one.schema_arrow.metadata[b"huggingface"])["info"]
            for one in (file, expected)
        ]
        assert described[0] == described[1]
        assert list(described[0]["features"]) == list(described[1]["features"])


def test_same_episodes_and_tasks_as_lerobot(both: tuple[Path, Path]) -> None:
    ours, theirs = both
    name = "meta/episodes/chunk-000/file-000.parquet"
    found, expected = pq.read_table(ours / name), pq.read_table(theirs / name)
    assert found.schema.equals(expected.schema)
    lengths = expected["length"].to_pylist()
    places = {"file_index": [0, 1, 2], "from_timestamp": [0, 0, 0]}
    places["to_timestamp"] = [length / 25 for length in lengths]
    for column in expected.column_names:
        top, name = column.split("/")[0], column.rsplit("/", 1)[-1]
        if top == "stats":
            close(found[column].to_pylist(), expected[column].to_pylist(), name)
        elif top in ("data", "videos") and name in places:
            assert found[column].to_pylist() == places[name], column
        else:
            assert found[column].to_pylist() == expected[column].to_pylist(), column
    found, expected = (pq.read_table(root / "meta/tasks.parquet") for root in (ours, theirs))
    assert found.equals(expected)
    pandas = [json.loads(table.schema.metadata[b"pandas"]) for table in (found, expected)]
    for description in pandas:
        del description["creator"], description["pandas_version"]
    assert pandas[0] == pandas[1]


def test_same_statistics_as_lerobot(both: tuple[Path, Path]) -> None:
    ours, theirs = (json.loads((root / "meta/stats.json").read_text()) for root in both)
    assert set(ours) == set(theirs)
    for key, stats in theirs.items():
        assert list(ours[key]) == list(stats)
        for stat, value in stats.items():
            close(ours[key][stat], value, stat)


def test_same_videos_as_lerobot(both: tuple[Path, Path]) -> None:
    ours, theirs = both
    for camera in CAMERAS:
        found = [video(path) for path in sorted(ours.glob(f"videos/{camera}/*/*.mp4"))]
        [joined] = [video(path) for path in theirs.glob(f"videos/{camera}/*/*.mp4")]
        assert {one[:4] for one in found} == {joined[:4]}
        assert sum(one[4] for one in found) == joined[4]
        assert all(one[5] == joined[5][: one[4]] for one in found)
        # Two versions of the encoder need not agree to the bit, only on the picture.
        pixels = np.concatenate([one[-1] for one in found]).astype(int)
        assert np.abs(pixels - joined[-1]).mean() < 3


def test_same_statistics_and_videos_as_lerobot_v21(reference: Path, tmp_path: Path) -> None:
    """v2.1 has one file per episode as well."""
    theirs, ours = reference / "datasets/lerobot_v21", tmp_path / "set"
    record_reference(theirs, ours)
    rows = pq.read_table(ours / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    lines = (theirs / "meta/episodes_stats.jsonl").read_text().splitlines()
    for row, line in zip(rows, map(json.loads, lines), strict=True):
        assert row["episode_index"] == line["episode_index"]
        for key, stats in line["stats"].items():
            for stat, value in stats.items():
                close(row[f"stats/{key}/{stat}"], value, stat)
        for camera in CAMERAS:
            index = row["episode_index"]
            found = video(ours / f"videos/{camera}/chunk-000/file-{index:03d}.mp4")
            expected = video(theirs / f"videos/chunk-000/{camera}/episode_{index:06d}.mp4")
            assert found[:-1] == expected[:-1]
            assert np.abs(found[-1].astype(int) - expected[-1]).mean() < 3


def close(found: Any, expected: Any, stat: str) -> None:
    # LeRobot sums squares in float32, so its own std is good to three digits; its quantiles are
    # interpolated in one of 5,000 bins, and float32 may put a value on the other side of an edge.
    tolerances = {"std": (1e-3, 1e-3), "count": (0, 0), "min": (1e-7, 1e-7), "max": (1e-7, 1e-7)}
    relative, absolute = tolerances.get(stat, (1e-5, 3e-4) if stat[0] == "q" else (1e-5, 1e-6))
    np.testing.assert_allclose(found, expected, rtol=relative, atol=absolute, err_msg=stat)
    assert np.shape(found) == np.shape(expected)


def row_groups(file: pq.ParquetFile) -> list[int]:
    return [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]


def test_continuing_a_set_of_lerobot(reference: Path, tmp_path: Path) -> None:
    root = tmp_path / "set"
    shutil.copytree(reference / "datasets/lerobot_v30", root)
    joined = files_of(root)
    before = open_dataset(root)
    old = [before[i] for i in range(len(before))]
    with Recorder.open(root) as recorder:
        assert (recorder.num_episodes, recorder.num_frames) == (3, len(old))
        for step in range(6):
            frame = {key: np.full(14, step, np.float32) for key in ("observation.state", "action")}
            for camera in CAMERAS:
                frame[camera] = reference_image(3, step, camera)
            recorder.add_frame(frame, "a new task")
        recorder.save_episode()
    after = open_dataset(root)
    assert len(after) == len(old) + 6
    for i, item in enumerate(old):
        for key, value in item.items():
            np.testing.assert_array_equal(after[i][key], value)
    assert after[len(old) + 5]["task"] == "a new task"
    assert after[len(old) + 5]["action"][0] == 5
    assert list(after.metadata.tasks.values()) == [*TASKS, "a new task"]
    # The files of several episodes stay as they are; the new episode has its own.
    new = [f"videos/{camera}/chunk-000/file-001.mp4" for camera in CAMERAS]
    assert files_of(root) == sorted([*joined, "data/chunk-000/file-001.parquet", *new])
    assert check_dataset(root) == []
