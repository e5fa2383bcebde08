"""`piston verify` on sets of other sizes than the reference's, against a plain reader."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.data.recording_cases import as_v21
from tests.data.synthetic import decode_in_order

from piston.cli import models
from piston.data.record import Recorder

HEIGHT, WIDTH = 34, 98
CAMERAS = ("observation.images.left", "observation.images.right", "observation.images.third")


def record(root: Path, version: str, codec: str, lengths, fps: float, dim: int) -> None:
    features = {camera: {"dtype": "video", "shape": (HEIGHT, WIDTH, 3)} for camera in CAMERAS}
    for key in ("observation.state", "action"):
        features[key] = {"dtype": "float32", "shape": (dim,)}
    random = np.random.default_rng(0)
    recorded = root if version == "v3.0" else root.with_name("recorded")
    with Recorder(recorded, fps, features, codec=codec) as recorder:
        for episode, length in enumerate(lengths):
            for step in range(length):
                frame = {
                    camera: np.full((HEIGHT, WIDTH, 3), 40 * number + 30 + 3 * step, np.uint8)
                    for number, camera in enumerate(CAMERAS)
                }
                for key in ("observation.state", "action"):
                    frame[key] = random.normal(size=dim).astype(np.float32)
                recorder.add_frame(frame, f"task {episode % 2}")
            recorder.save_episode()
    if version == "v2.1":
        as_v21(recorded, root)


def expect(root: Path, horizon: int) -> dict[str, np.ndarray]:
    """Whole files into lists, then rows by number."""
    info = json.loads((root / "meta/info.json").read_text())
    is_v3 = info["codebase_version"] == "v3.0"
    tables = [pq.read_table(path).to_pylist() for path in sorted(root.glob("data/*/*.parquet"))]
    rows = [row for table in tables for row in table]
    if is_v3:
        spans = pq.read_table(next(root.glob("meta/episodes/*/*.parquet"))).to_pylist()
        tasks = pq.read_table(root / "meta/tasks.parquet").to_pylist()
    else:
        tasks = [json.loads(x) for x in (root / "meta/tasks.jsonl").read_text().splitlines()]
    texts = {task["task_index"]: task["task"] for task in tasks}
    expected = {}
    for index in {0, 1, len(rows) // 2, len(rows) - 2, len(rows) - 1}:
        row = rows[index]
        own = [other for other in rows if other["episode_index"] == row["episode_index"]]
        step, episode = row["frame_index"], row["episode_index"]
        last = len(own) - 1
        chunk = [own[min(step + ahead, last)]["action"] for ahead in range(horizon)]
        item = {
            "observation.state": np.array(row["observation.state"], np.float32),
            "action": np.array(chunk, np.float32),
            "action_is_pad": np.arange(horizon) + step > last,
            "task": np.array(texts[row["task_index"]]),
            "index": np.array(index),
        }
        for camera in CAMERAS:
            if is_v3:
                span = {
                    name: spans[episode][f"videos/{camera}/{name}"]
                    for name in ("file_index", "from_timestamp")
                }
                path = root / f"videos/{camera}/chunk-000/file-{span['file_index']:03d}.mp4"
                number = step + round(span["from_timestamp"] * info["fps"])
            else:
                path = root / f"videos/chunk-000/{camera}/episode_{episode:06d}.mp4"
                number = step
            item[camera.split(".")[-1]] = np.moveaxis(decode_in_order(path)[number], -1, 0)
        expected |= {f"{index}/{field}": value for field, value in item.items()}
    return expected


@pytest.mark.parametrize(
    ("version", "codec", "lengths", "fps", "dim"),
    [
        ("v3.0", "av1", (5, 17, 1, 8), 15, 7),
        ("v3.0", "h264", (20, 20, 9), 50, 3),
        ("v2.1", "h264", (3, 1, 22), 29.97, 9),
    ],
)
def test_items_of_other_sizes(tmp_path, capsys, version, codec, lengths, fps, dim):
    root = tmp_path / "a_set"
    record(root, version, codec, lengths, fps, dim)
    expected = expect(root, horizon=23)
    beside = tmp_path / "a_set_expected_items.npz"
    np.savez(beside, **expected)
    assert models.run_verify([str(root)]) == 0
    assert "all ok" in capsys.readouterr().out

    wrong = expected["1/right"].copy()
    wrong[0, 0, 0] ^= 1  # one value of one pixel
    np.savez(beside, **(expected | {"1/right": wrong}))
    assert models.run_verify([str(root)]) == 1
    assert "right (5 items)" in capsys.readouterr().out
