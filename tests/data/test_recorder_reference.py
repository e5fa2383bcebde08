"""What the recorder writes is what LeRobot's own writers wrote, field by field."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from piston.data import open_dataset
from piston.data.recorder import Recorder

from .recording_cases import files_of, video

TASKS = ("Transfer cube", "Open the drawer")
JOINTS = [f"j{i}" for i in range(14)]
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


def record_reference(source: Path, target: Path, version: str) -> None:
    tables = [pq.read_table(path) for path in sorted((source / "data").glob("*/*.parquet"))]
    with Recorder(target, 25, REFERENCE_FEATURES, version=version) as recorder:
        for row in pa.concat_tables(tables).to_pylist():
            if row["frame_index"] == 0 and recorder.num_unsaved_frames:
                recorder.save_episode()
            episode, step = row["episode_index"], row["frame_index"]
            frame = {key: np.float32(row[key]) for key in ("observation.state", "action")}
            for camera in ("observation.images.top", "observation.images.wrist"):
                frame[camera] = reference_image(episode, step, camera)
            recorder.add_frame(frame, TASKS[row["task_index"]])
        recorder.save_episode()


@pytest.fixture(scope="module")
def both(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Version -> (what we wrote, what LeRobot wrote), from the same frames."""
    sets = {}
    for version, name in (("v3.0", "lerobot_v30"), ("v2.1", "lerobot_v21")):
        source, target = reference / "datasets" / name, tmp_path_factory.mktemp("sets") / name
        record_reference(source, target, version)
        sets[version] = (target, source)
    return sets


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_same_files_and_info_as_lerobot(both: dict[str, tuple[Path, Path]], version: str) -> None:
    ours, theirs = both[version]
    assert files_of(ours) == files_of(theirs)
    # As text: also the order of the fields and whether numbers are whole.
    assert (ours / "meta/info.json").read_text() == (theirs / "meta/info.json").read_text()


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_same_data_tables_as_lerobot(both: dict[str, tuple[Path, Path]], version: str) -> None:
    ours, theirs = both[version]
    for path in sorted(theirs.glob("data/*/*.parquet")):
        found, expected = pq.ParquetFile(ours / path.relative_to(theirs)), pq.ParquetFile(path)
        assert found.schema_arrow.equals(expected.schema_arrow)
        assert found.read().equals(expected.read())
        assert row_groups(found) == row_groups(expected)
        described = [
            json.loads(file.schema_arrow.metadata[b"huggingface"])["info"]
            for file in (found, expected)
        ]
        if version == "v2.1":
            # LeRobot releases for v2.1 use `datasets` before 4, which only knows the older name.
            assert "List" not in json.dumps(described[0])
            described[0] = json.loads(json.dumps(described[0]).replace("Sequence", "List"))
        assert described[0] == described[1]
        assert list(described[0]["features"]) == list(described[1]["features"])


def test_same_episodes_and_tasks_as_lerobot_v30(both: dict[str, tuple[Path, Path]]) -> None:
    ours, theirs = both["v3.0"]
    name = "meta/episodes/chunk-000/file-000.parquet"
    found, expected = pq.read_table(ours / name), pq.read_table(theirs / name)
    assert found.schema.equals(expected.schema)
    for column in expected.column_names:
        if column.startswith("stats/"):
            stat = column.rsplit("/", 1)[1]
            close(found[column].to_pylist(), expected[column].to_pylist(), stat)
        else:
            assert found[column].to_pylist() == expected[column].to_pylist(), column
    found, expected = (pq.read_table(root / "meta/tasks.parquet") for root in (ours, theirs))
    assert found.equals(expected)
    pandas = [json.loads(table.schema.metadata[b"pandas"]) for table in (found, expected)]
    for description in pandas:
        del description["creator"], description["pandas_version"]
    assert pandas[0] == pandas[1]


def test_same_statistics_as_lerobot_v30(both: dict[str, tuple[Path, Path]]) -> None:
    ours, theirs = (json.loads((root / "meta/stats.json").read_text()) for root in both["v3.0"])
    assert set(ours) == set(theirs)
    for key, stats in theirs.items():
        assert list(ours[key]) == list(stats)
        for stat, value in stats.items():
            close(ours[key][stat], value, stat)


def test_same_lines_as_lerobot_v21(both: dict[str, tuple[Path, Path]]) -> None:
    ours, theirs = both["v2.1"]
    for name in ("meta/episodes.jsonl", "meta/tasks.jsonl"):
        assert (ours / name).read_text() == (theirs / name).read_text()
    name = "meta/episodes_stats.jsonl"
    for found, expected in zip(lines(ours / name), lines(theirs / name), strict=True):
        assert found["episode_index"] == expected["episode_index"]
        assert list(found["stats"]) == list(expected["stats"])
        for key, stats in expected["stats"].items():
            assert list(found["stats"][key]) == list(stats)
            for stat, value in stats.items():
                close(found["stats"][key][stat], value, stat)
                assert type(innermost(found["stats"][key][stat])) is type(innermost(value))


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_same_videos_as_lerobot(both: dict[str, tuple[Path, Path]], version: str) -> None:
    ours, theirs = both[version]
    for path in sorted(theirs.glob("videos/**/*.mp4")):
        found, expected = video(ours / path.relative_to(theirs)), video(path)
        assert found[:-1] == expected[:-1]
        # Two versions of the encoder need not agree to the bit, only on the picture.
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


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def innermost(value: Any) -> Any:
    return innermost(value[0]) if isinstance(value, list) else value


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_continuing_a_set_of_lerobot(reference: Path, tmp_path: Path, version: str) -> None:
    name = {"v3.0": "lerobot_v30", "v2.1": "lerobot_v21"}[version]
    root = tmp_path / name
    for path in (reference / "datasets" / name).rglob("*"):
        if path.is_file():
            copy = root / path.relative_to(reference / "datasets" / name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    before = open_dataset(root)
    old = [before[i] for i in range(len(before))]
    with Recorder.open(root) as recorder:
        assert (recorder.num_episodes, recorder.num_frames) == (3, len(old))
        for step in range(6):
            frame = {key: np.full(14, step, np.float32) for key in ("observation.state", "action")}
            for camera in ("observation.images.top", "observation.images.wrist"):
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
