"""Writing a LeRobot v3.0 data set, one whole episode at a time.

Each episode has a data file and one video per camera of its own:

    meta/info.json                             features and totals
    meta/tasks.parquet                         the text of every task
    meta/stats.json                            statistics of the whole set
    meta/episodes/chunk-000/file-000.parquet   one row per episode
    data/chunk-000/file-004.parquet            the frames of episode 4
    videos/CAMERA/chunk-000/file-004.mp4
    .recording/                                unfinished files, removed at the end

The files of an episode are complete before its row is written, and a row appears with one rename.
So the set is valid at every moment, and a process that is killed loses at most the episode that it
was writing. Sets whose files hold several episodes can be continued as well.
"""

import contextlib
import dataclasses
import os
import shutil
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from piston.data.encoding import probe_video
from piston.data.episode_stats import EpisodeStats, FeatureStats, column_stats, merge_stats
from piston.data.features import Features, cameras
from piston.data.parquet_tables import (
    data_table,
    episodes_schema,
    plain_stats,
    stat_names,
    stats_of_rows,
    tasks_table,
    write_table,
)
from piston.files import publish, read_json, remove_leftovers, write_json

INFO = Path("meta/info.json")
TASKS = Path("meta/tasks.parquet")
STATS = Path("meta/stats.json")
RECORDING = Path(".recording")
# The files of the episode that is being saved, as [stream, chunk, file]; version 0.1.0 used the
# same file for the same purpose.
UNFINISHED = RECORDING / "joining.json"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
FILE = ("chunk_index", "file_index")
# The newest file of meta/episodes is rewritten with every episode; this limits the cost.
EPISODES_PER_FILE = 500
MAX_CHUNKS = 1000  # LeRobot reads data files in the order of their names, which have three digits


@dataclasses.dataclass(frozen=True)
class NewEpisode:
    """One whole episode, ready to be stored."""

    columns: dict[str, Any]  # feature -> (n, *shape) array, or n encoded images
    frame_tasks: list[str]
    videos: dict[str, Path]  # camera -> mp4 in the set's .recording folder
    image_stats: dict[str, FeatureStats]  # of cameras and image columns
    encoder_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    timestamps: np.ndarray | None = None  # None: frame i at i / fps
    tasks: tuple[str, ...] | None = None  # None: the frames' tasks in order of appearance

    def __len__(self) -> int:
        return len(self.frame_tasks)


def new_info(fps: float, features: Features, robot_type: str | None) -> dict[str, Any]:
    """Return the info.json of a set without episodes, fields in LeRobot's order."""
    if not 0 < fps < float("inf"):
        raise ValueError(f"fps must be positive and finite, found {fps}")
    return {
        "codebase_version": "v3.0",
        "fps": int(fps) if float(fps).is_integer() else float(fps),
        "features": features,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if cameras(features) else None,
        "robot_type": robot_type,
        "splits": {},
    }


def read_info(root: Path) -> dict[str, Any]:
    if not (root / INFO).is_file():
        raise FileNotFoundError(f"{root} is not a data set: it has no {INFO}")
    return read_json(root / INFO)


class DatasetWriter:
    """A data set on disk that grows by whole episodes; call `start` before anything else."""

    def __init__(self, root: Path, info: dict[str, Any]) -> None:
        self.root = root
        self.info = info
        self.features: Features = info["features"]
        self.fps: float = info["fps"]
        self._chunks_size = int(info.get("chunks_size") or 1000)
        # What episodes consist of, with the prefix of the columns that say in which file it is.
        self._streams = {"data": "data"} | {key: f"videos/{key}" for key in cameras(self.features)}
        self._lock = filelock.FileLock(root / RECORDING / "lock")
        self._reset()

    def _reset(self) -> None:
        self.num_episodes = self.num_frames = 0
        self.tasks: dict[str, int] = {}
        self._num_stored_tasks = 0
        self._stats: EpisodeStats = {}
        self._schema: pa.Schema | None = None  # of meta/episodes
        self._rows: pa.Table | None = None  # the newest file of meta/episodes
        # The numbers of the next episode, its first frame, its files, and the file of `_rows`.
        self._next_index = self._next_row = self._next_file = self._rows_file = 0

    def start(self) -> None:
        """Lock the folder, read what it holds and remove what a killed process left."""
        (self.root / RECORDING).mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except filelock.Timeout as error:
            raise RuntimeError(f"another process is recording into {self.root}") from error
        try:
            remove_leftovers(self.root)
            self._load()
            for leftover in (self.root / RECORDING).iterdir():
                if leftover.name != "lock":
                    leftover.unlink()
            self._new_files()  # refuse what cannot be continued before anything is recorded
            self._write_summary()
        except BaseException:
            self._lock.release()
            (self.root / RECORDING / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: what is in it has not been read
                (self.root / RECORDING).rmdir()
            raise

    def close(self) -> None:
        """Free the folder."""
        self._lock.release()
        shutil.rmtree(self.root / RECORDING, ignore_errors=True)

    def add_tasks(self, tasks: Iterable[str]) -> None:
        """Number tasks ahead of the episodes that use them."""
        for task in dict.fromkeys(tasks):
            self.tasks.setdefault(task, max(self.tasks.values(), default=-1) + 1)

    def add_episode(self, episode: NewEpisode) -> None:
        """Store an episode; on return it is part of the set."""
        try:
            self._save(episode)
        except BaseException:
            self._load()  # whether the episode is part of the set is decided on disk
            raise
        self._write_summary()

    def _save(self, episode: NewEpisode) -> None:
        self._check_videos(episode)
        self.add_tasks([*episode.frame_tasks, *(episode.tasks or ())])
        columns = episode.columns | self._bookkeeping(episode)
        stats = {
            key: episode.image_stats.get(key) or column_stats(np.asarray(columns[key]))
            for key, entry in self.features.items()
            if entry["dtype"] != "string"
        }
        table = data_table(columns, self.features)
        files = self._new_files()
        chunk, file = divmod(self._next_file, self._chunks_size)
        write_json(self.root / UNFINISHED, [(stream, chunk, file) for stream in files])
        for camera in cameras(self.features):
            publish(episode.videos[camera], files[camera])
        if len(self.tasks) > self._num_stored_tasks:
            write_table(tasks_table(self.tasks), self.root / TASKS)
            self._num_stored_tasks = len(self.tasks)
        write_table(table, files["data"])
        self._append_row(episode, stats)
        (self.root / UNFINISHED).unlink()
        self.num_episodes += 1
        self.num_frames += len(episode)
        self._next_index += 1
        self._next_row += len(episode)
        self._next_file += 1

    def _check_videos(self, episode: NewEpisode) -> None:
        for camera in cameras(self.features):
            info, times = probe_video(episode.videos[camera], self.fps)
            if len(times) != len(episode):
                raise ValueError(
                    f"{camera!r}: the video has {len(times)} frames, the episode {len(episode)}"
                )
            info |= episode.encoder_info | {"is_depth_map": False}
            self.features[camera].setdefault("info", info)

    def _bookkeeping(self, episode: NewEpisode) -> dict[str, np.ndarray]:
        frame_index = np.arange(len(episode))
        times = frame_index / self.fps if episode.timestamps is None else episode.timestamps
        return {
            "timestamp": times,
            "frame_index": frame_index,
            "episode_index": np.full(len(episode), self._next_index),
            "index": frame_index + self._next_row,
            "task_index": np.array([self.tasks[task] for task in episode.frame_tasks]),
        }

    def _append_row(self, episode: NewEpisode, stats: EpisodeStats) -> None:
        """Add a row to the newest file of meta/episodes, or begin the next file."""
        if self._schema is None:
            self._schema = episodes_schema(self.features, {k: list(v) for k, v in stats.items()})
        # A set that lacks some statistics stays without them.
        stored = stat_names(self._schema, self.features)
        stats = {key: {n: stats[key][n] for n in names} for key, names in stored.items()}
        if self._rows is not None and len(self._rows) >= EPISODES_PER_FILE:
            self._rows, self._rows_file = None, self._rows_file + 1
        row: dict[str, Any] = {
            "episode_index": self._next_index,
            "tasks": list(episode.tasks or dict.fromkeys(episode.frame_tasks)),
            "length": len(episode),
            "dataset_from_index": self._next_row,
            "dataset_to_index": self._next_row + len(episode),
        }
        files = dict.fromkeys(self._streams.values(), self._next_file)
        for prefix, number in {**files, "meta/episodes": self._rows_file}.items():
            chunk, file = divmod(number, self._chunks_size)
            row |= {f"{prefix}/chunk_index": chunk, f"{prefix}/file_index": file}
        for camera in cameras(self.features):
            row[f"videos/{camera}/from_timestamp"] = 0.0
            row[f"videos/{camera}/to_timestamp"] = len(episode) / self.fps
        for key, feature in plain_stats(stats).items():
            row |= {f"stats/{key}/{name}": value for name, value in feature.items()}
        table = pa.Table.from_pylist([row], schema=self._schema)
        if self._rows is not None:
            table = pa.concat_tables([self._rows, table]).combine_chunks()
        write_table(table, self.root / EPISODES_PATH.format(chunk_index=chunk, file_index=file))
        self._rows = table
        self._stats = merge_stats([self._stats, stats])

    def _load(self) -> None:
        """Read the state of the set from disk, and remove files of an unfinished episode."""
        self._reset()
        stored: set[tuple[str, int, int]] = set()
        if paths := sorted((self.root / "meta/episodes").glob("*/*.parquet")):
            tables = [pq.read_table(path) for path in paths]
            self._check_newest(tables[-1], paths[-1])
            rows = pa.concat_tables(tables)
            self.tasks = _read_tasks(self.root / TASKS)
            self._num_stored_tasks = len(self.tasks)
            self._stats = merge_stats(stats_of_rows(rows))
            self.num_episodes, self.num_frames = len(rows), pc.sum(rows["length"]).as_py()
            self._next_index = pc.max(rows["episode_index"]).as_py() + 1
            self._next_row = pc.max(rows["dataset_to_index"]).as_py()
            for stream, prefix in self._streams.items():
                files = [rows[f"{prefix}/{name}"].to_pylist() for name in FILE]
                stored |= {(stream, chunk, file) for chunk, file in zip(*files)}
            numbers = [chunk * self._chunks_size + file for _, chunk, file in stored]
            self._next_file = max(numbers) + 1
        if (self.root / UNFINISHED).exists():
            for stream, chunk, file in read_json(self.root / UNFINISHED):
                if (stream, chunk, file) not in stored:
                    self._path(stream, chunk, file).unlink(missing_ok=True)
            (self.root / UNFINISHED).unlink()

    def _check_newest(self, rows: pa.Table, path: Path) -> None:
        """Take the newest file of meta/episodes; raise ValueError if our rows do not fit it."""
        found = set(rows.column_names)
        stats = stat_names(rows.schema, self.features)
        expected = set(episodes_schema(self.features, stats).names)
        if expected != found:
            raise ValueError(
                f"{self.root}: meta/episodes does not fit the features of info.json; they differ "
                f"in {sorted(expected ^ found)}. This set can be read, but not continued"
            )
        chunk, file = (rows[f"meta/episodes/{name}"][-1].as_py() for name in FILE)
        if path != self.root / EPISODES_PATH.format(chunk_index=chunk, file_index=file):
            raise ValueError(
                f"{path} says that it is chunk {chunk}, file {file} of meta/episodes. This set can "
                "be read, but not continued"
            )
        self._rows, self._schema = rows, rows.schema
        self._rows_file = chunk * self._chunks_size + file

    def _new_files(self) -> dict[str, Path]:
        """Return the files of the next episode; raise an error if they cannot be written."""
        chunk, file = divmod(self._next_file, self._chunks_size)
        if chunk >= MAX_CHUNKS:
            raise ValueError(f"{self.root} is full: all {MAX_CHUNKS} chunks are used")
        files = {stream: self._path(stream, chunk, file) for stream in self._streams}
        for path in files.values():
            if path.exists():
                raise FileExistsError(
                    f"{path} exists, but no episode of the set refers to it. Move it elsewhere to "
                    "continue the set"
                )
        return files

    def _path(self, stream: str, chunk: int, file: int) -> Path:
        names: dict[str, Any] = {"chunk_index": chunk, "file_index": file}
        if stream == "data":
            field, pattern = "data_path", self.info.get("data_path") or DATA_PATH
        else:
            field, pattern = "video_path", self.info.get("video_path") or VIDEO_PATH
            names |= {"video_key": stream}
        if {name for _, name, _, _ in string.Formatter().parse(pattern) if name} == set(names):
            path = Path(os.path.normpath(self.root / pattern.format(**names)))
            if path.is_relative_to(os.path.normpath(self.root)):
                return path
        raise ValueError(
            f"{self.root / INFO}: {field} is {pattern!r}. To continue the set, expected is a path "
            f"inside the set with the fields {', '.join(names)}"
        )

    def _write_summary(self) -> None:
        """Write totals and statistics, which can be computed from the episodes."""
        if self._stats:
            write_json(self.root / STATS, plain_stats(self._stats))
        totals = {
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self.tasks),
            "splits": {"train": f"0:{self.num_episodes}"} if self.num_episodes else {},
        }
        write_json(self.root / INFO, self.info | totals)


def _read_tasks(path: Path) -> dict[str, int]:
    table = pq.read_table(path)
    # pandas keeps the texts as the index, under its own name if that has none.
    [text] = (name for name in table.column_names if name != "task_index")
    numbered = sorted(zip(table["task_index"].to_pylist(), table[text].to_pylist()))
    return {task: index for index, task in numbered}
