"""Small LeRobot folders made from scratch, so that every kind of disorder can be tried."""

import io
import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.record.encoding import priority_kept

FPS = 10
HEIGHT, WIDTH = 64, 64
ENCODERS = {
    "h264": ("libx264", {"g": "8"}),
    "av1": ("libsvtav1", {"g": "2", "crf": "30", "preset": "12"}),
    "mpeg4": ("mpeg4", {"g": "6"}),
    "hevc": ("libx265", {"g": "8", "x265-params": "log-level=none"}),
    "hevc hash": ("libx265", {"g": "8", "x265-params": "log-level=none:hash=1"}),
}
OPEN_GOP = "open-gop=1:bframes=3:keyint=8:min-keyint=8:scenecut=0:b-pyramid=normal"
ENCODERS["h264 open gop"] = ("libx264", {"x264-params": OPEN_GOP})


def picture(number: int, black: bool = False) -> np.ndarray:
    """Each number looks different, also after lossy compression: a bar moves and gets brighter."""
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    if not black:
        image[:] = (np.arange(WIDTH) * 2 + 40)[None, :, None]
        column = (number * 5) % (WIDTH - 8)
        image[:, column : column + 8] = (40 + number * 7) % 256
    return image


def write_video(
    path: Path,
    pictures,
    codec: str = "h264",
    fps: int = FPS,
    start: int = 0,
    gap: int | None = None,
) -> None:
    """`start` shifts all frames by so many frame times, `gap` those from this one on by one."""
    name, options = ENCODERS[codec]
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container, priority_kept():
        stream = container.add_stream(name, fps, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = Fraction(1, fps)
        for number, image in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(image, "rgb24")
            late = start + (gap is not None and number >= gap)
            frame.pts, frame.time_base = number + late, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def decode_in_order(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def png(image: np.ndarray) -> dict:
    data = io.BytesIO()
    PIL.Image.fromarray(image).save(data, "PNG")
    return {"bytes": data.getvalue(), "path": "frame.png"}


class Folder:
    """A data set in one of the three versions; `cameras` maps a name to "video" or "image"."""

    def __init__(self, root, version="v2.1", lengths=(12, 9, 15), cameras=None, codec="h264"):
        self.root, self.version, self.lengths, self.codec = Path(root), version, lengths, codec
        self.cameras = {"observation.images.top": "video"} if cameras is None else cameras
        self.tasks = ["pick up the cube", "open the drawer"]
        self.starts = np.cumsum([0, *lengths])[:-1]
        self._write_info()
        (self._write_v3 if version == "v3.0" else self._write_v2)()

    def number(self, episode: int, frame: int) -> int:
        """Which picture: told apart over the whole set."""
        return int(self.starts[episode]) + frame

    def pictures(self, episode: int) -> list[np.ndarray]:
        return [picture(self.number(episode, k)) for k in range(self.lengths[episode])]

    def columns(self, episode: int) -> dict:
        length, start = self.lengths[episode], int(self.starts[episode])
        steps = np.arange(length)
        state = (start + steps)[:, None] + np.arange(3)[None] / 10
        columns = {
            "observation.state": pa.array(
                state.astype(np.float32).tolist(), pa.list_(pa.float32())
            ),
            "action": pa.array((state + 100).astype(np.float32).tolist(), pa.list_(pa.float32())),
            "timestamp": pa.array((steps / FPS).astype(np.float32)),
            "frame_index": pa.array(steps),
            "episode_index": pa.array(np.full(length, episode)),
            "index": pa.array(start + steps),
            "task_index": pa.array(np.full(length, episode % 2)),
        }
        for camera, kind in self.cameras.items():
            if kind == "image":
                columns[camera] = pa.array([png(image) for image in self.pictures(episode)])
        return columns

    def data_path(self, episode: int) -> Path:
        if self.version == "v3.0":
            return self.root / "data/chunk-000/file-000.parquet"
        return self.root / f"data/chunk-000/episode_{episode:06d}.parquet"

    def video_path(self, episode: int, camera: str = "observation.images.top") -> Path:
        if self.version == "v3.0":
            return self.root / f"videos/{camera}/chunk-000/file-000.mp4"
        return self.root / f"videos/chunk-000/{camera}/episode_{episode:06d}.mp4"

    def rewrite(self, episode: int, **changes) -> None:
        """Change columns of a v2.x episode; None removes one."""
        columns = {**self.columns(episode), **{k.replace("__", "."): v for k, v in changes.items()}}
        columns = {key: value for key, value in columns.items() if value is not None}
        pq.write_table(pa.table(columns), self.data_path(episode))

    def edit_info(self, **changes) -> None:
        path = self.root / "meta/info.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def _write_info(self) -> None:
        camera = {"shape": [HEIGHT, WIDTH, 3], "names": ["height", "width", "channels"]}
        features = {
            name: {"dtype": kind, **camera, "info": {"video.codec": self.codec.split()[0]}}
            for name, kind in self.cameras.items()
        }
        features |= {
            key: {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]}
            for key in ("observation.state", "action")
        }
        features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
        for key in ("frame_index", "episode_index", "index", "task_index"):
            features[key] = {"dtype": "int64", "shape": [1], "names": None}
        info = {
            "codebase_version": self.version,
            "robot_type": "made up",
            "total_episodes": len(self.lengths),
            "total_frames": sum(self.lengths),
            "total_tasks": len(self.tasks),
            "chunks_size": 1000,
            "fps": FPS,
            "features": features,
        }
        (self.root / "meta").mkdir(parents=True)
        (self.root / "meta/info.json").write_text(json.dumps(info))

    def _video_cameras(self) -> list[str]:
        return [name for name, kind in self.cameras.items() if kind == "video"]

    def _write_v2(self) -> None:
        for episode, length in enumerate(self.lengths):
            row = {"episode_index": episode, "tasks": [self.tasks[episode % 2]], "length": length}
            self._append("episodes.jsonl", row)
            self.data_path(episode).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(self.columns(episode)), self.data_path(episode))
            for camera in self._video_cameras():
                path = self.video_path(episode, camera)
                write_video(path, self.pictures(episode), self.codec)
        for number, task in enumerate(self.tasks):
            self._append("tasks.jsonl", {"task_index": number, "task": task})

    def _append(self, name: str, row: dict) -> None:
        with (self.root / "meta" / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _write_v3(self) -> None:
        numbers = range(len(self.lengths))
        tables = [pa.table(self.columns(episode)) for episode in numbers]
        self.data_path(0).parent.mkdir(parents=True)
        with pq.ParquetWriter(self.data_path(0), tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
        pictures = [image for episode in numbers for image in self.pictures(episode)]
        for camera in self._video_cameras():
            write_video(self.video_path(0, camera), pictures, self.codec)
        self.write_episodes([self.episode_row(episode) for episode in numbers])
        tasks = pa.table({"task_index": [0, 1], "task": self.tasks})
        pq.write_table(tasks, self.root / "meta/tasks.parquet")

    def episode_row(self, episode: int) -> dict:
        start, length = int(self.starts[episode]), self.lengths[episode]
        row = {
            "episode_index": episode,
            "tasks": [self.tasks[episode % 2]],
            "length": length,
            "data/chunk_index": 0,
            "data/file_index": 0,
            "dataset_from_index": start,
            "dataset_to_index": start + length,
        }
        for camera in self._video_cameras():
            row |= {
                f"videos/{camera}/chunk_index": 0,
                f"videos/{camera}/file_index": 0,
                f"videos/{camera}/from_timestamp": start / FPS,
                f"videos/{camera}/to_timestamp": (start + length) / FPS,
            }
        return row

    def write_episodes(self, rows: list[dict]) -> None:
        path = self.root / "meta/episodes/chunk-000/file-000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
