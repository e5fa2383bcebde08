"""Small recordings for the tests, and what reading them back must give.

Run as a program, it records until it is killed (see test_recorder_killed).
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq

from piston.data import open_dataset
from piston.data.record import Recorder

FPS = 10
HEIGHT, WIDTH = 64, 96
VIDEO = "observation.images.top"
FEATURES = {
    VIDEO: {"dtype": "video", "shape": (HEIGHT, WIDTH, 3)},
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "action": {"dtype": "float32", "shape": (2,)},
}
V21_FILE = "chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}"


def length_of(episode: int) -> int:
    return 4 + episode * 3 % 5


def task_of(episode: int) -> str:
    return ("fold the towel", "open the drawer")[episode % 2]


def image_of(episode: int, step: int) -> np.ndarray:
    """A bright square on grey; where it is says which episode (down) and step (right) it is."""
    image = np.full((HEIGHT, WIDTH, 3), 60, np.uint8)
    image[episode % 8 * 8 :][:8, step * 12 :][:, :12] = 240
    return image


def seen_in(image: np.ndarray) -> tuple[int, int]:
    """The place of the square, by codecs however lossy: (episode % 8, step)."""
    squares = image.mean(axis=2).reshape(8, 8, 8, 12).mean(axis=(1, 3))
    assert squares.max() > 150, "there is no square"
    row, column = np.unravel_index(squares.argmax(), squares.shape)
    return int(row), int(column)


def numbers_of(episode: int, step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng([episode, step])
    return {
        "observation.state": generator.normal(size=3).astype(np.float32),
        "action": generator.normal(size=2).astype(np.float32),
    }


def small_recorder(root: Path) -> Recorder:
    return Recorder(root, FPS, FEATURES, codec="h264", resume=True)


def record(recorder: Recorder, episode: int) -> None:
    for step in range(length_of(episode)):
        frame = {**numbers_of(episode, step), VIDEO: image_of(episode, step)}
        recorder.add_frame(frame, task_of(episode))
    recorder.save_episode()


def check_set(root: Path) -> int:
    """Every number exact, every frame the right one; returns how many episodes there are."""
    dataset = open_dataset(root)
    lengths = [episode.length for episode in dataset.metadata.episodes]
    assert lengths == [length_of(episode) for episode in range(len(lengths))]
    steps = [(e, s) for e in range(len(lengths)) for s in range(length_of(e))]
    assert len(dataset) == len(steps)
    for index, (episode, step) in enumerate(steps):
        item = dataset[index]
        for key, value in numbers_of(episode, step).items():
            np.testing.assert_array_equal(item[key], value)
        assert seen_in(item[VIDEO]) == (episode % 8, step)
        assert item["task"] == task_of(episode)
        assert (item["episode_index"], item["frame_index"]) == (episode, step)
        assert item["index"] == index
        assert abs(item["timestamp"] - step / FPS) < 1e-6
    dataset.close()
    return len(lengths)


def video(path: Path) -> tuple[Any, ...]:
    """Codec, format, rate, frame count, times; the pixels last."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context.codec.canonical_name
        about = (codec, stream.codec_context.pix_fmt, stream.time_base, stream.average_rate)
        frames = list(container.decode(stream))
        pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
        return (*about, stream.frames, [frame.pts for frame in frames], pixels)


def files_of(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def as_v21(source: Path, target: Path) -> Path:
    """Rearrange a recorded set, one file per episode, as LeRobot v2.1 lays it out."""
    info = json.loads((source / "meta/info.json").read_text())
    videos = [key for key, entry in info["features"].items() if entry["dtype"] == "video"]
    for name in ("data_files_size_in_mb", "video_files_size_in_mb"):
        del info[name]
    info |= {
        "codebase_version": "v2.1",
        "data_path": f"data/{V21_FILE}.parquet".replace("{video_key}/", ""),
        "video_path": f"videos/{V21_FILE}.mp4",
    }
    lines: dict[str, list[Any]] = {"info.json": [info]}
    tasks = pq.read_table(source / "meta/tasks.parquet").to_pylist()
    lines["tasks.jsonl"] = [{"task_index": t["task_index"], "task": t["task"]} for t in tasks]
    lines["episodes.jsonl"], lines["episodes_stats.jsonl"] = [], []
    for row in pq.read_table(source / "meta/episodes").to_pylist():
        index = row["episode_index"]
        files = {f"data/chunk-000/file-{index:03d}.parquet": info["data_path"]}
        for key in videos:
            files[f"videos/{key}/chunk-000/file-{index:03d}.mp4"] = info["video_path"].replace(
                "{video_key}", key
            )
        for old, pattern in files.items():
            new = target / pattern.format(episode_chunk=0, episode_index=index)
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / old, new)
        stats: dict[str, Any] = {}
        for column, value in row.items():
            if column.startswith("stats/"):
                _, key, name = column.split("/")
                if name[0] != "q":  # v2.1 has no quantiles
                    stats.setdefault(key, {})[name] = value
        lines["episodes_stats.jsonl"].append({"episode_index": index, "stats": stats})
        listed = {key: row[key] for key in ("episode_index", "tasks", "length")}
        lines["episodes.jsonl"].append(listed)
    (target / "meta").mkdir()
    for name, rows in lines.items():
        (target / "meta" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


def main(root: Path) -> None:
    recorder = small_recorder(root)
    sys.stdout.write(f"{recorder.num_episodes}\n")
    sys.stdout.flush()
    while True:
        record(recorder, recorder.num_episodes)
        sys.stdout.write(f"{recorder.num_episodes}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
