"""Writing a LeRobot v3.0 data set, one whole episode at a time.

Each episode has a data file and one video per camera of its own:

    meta/info.json                             features and totals
    meta/tasks.parquet                         the text of every task
    meta/stats.json                            statistics of the whole set
    meta/piston.json                           the mark of a set that Piston has begun
    meta/episodes/chunk-000/file-000.parquet   one row per episode
    data/chunk-000/file-004.parquet            the frames of episode 4
    videos/CAMERA/chunk-000/file-004.mp4
    .recording/                                unfinished files, removed at the end

The files of an episode are complete before its row is written, and a row appears with one rename.
So the set is valid at every moment, and a process that is killed loses at most the episode that it
was writing. Sets whose files hold several episodes can be continued as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.format import (
    INFO,
    MARK,
    PATHS,
    PLACE,
    Feature,
    file_path,
    keys_of,
    read_features,
)
from piston.data.record.columns import (
    STAT_NAMES,
    EpisodeStats,
    column_stats,
    data_table,
    merge_stats,
)
from piston.data.video import probe_video
from piston.files import (
    atomic_file,
    is_really_in,
    publish,
    read_json,
    remove_leftovers,
    write_json,
)

TASKS = Path("meta/tasks.parquet")
STATS = Path("meta/stats.json")
RECORDING = Path(".recording")
# The files of the episode that is being saved, as [stream, chunk, file]; version 0.1.0 used the
# same file for the same purpose.
UNFINISHED = RECORDING / "joining.json"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
# The newest file of meta/episodes is rewritten with every episode; this limits the cost.
EPISODES_PER_FILE = 500
MAX_CHUNKS = 1000  # LeRobot reads data files in the order of their names, which have three digits


@dataclasses.dataclass(frozen=True)
class NewEpisode:
    """One whole episode, ready to be stored."""

    columns: dict[str, Any]  # feature -> (n, *shape) array, or n encoded images or cells of labels
    frame_tasks: list[str]
    videos: dict[str, Path]  # camera -> mp4 in the set's .recording folder
    image_stats: EpisodeStats  # of cameras and image columns
    encoder_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    timestamps: np.ndarray | None = None  # None: frame i at i / fps
    tasks: tuple[str, ...] | None = None  # None: the frames' tasks in order of appearance

    def __len__(self) -> int:
        return len(self.frame_tasks)


def new_info(fps: float, features: Mapping[str, Feature], robot_type: str | None) -> dict[str, Any]:
    """Return the info.json of a set without episodes, fields in LeRobot's order."""
    if not 0 < fps < float("inf"):
        raise ValueError(f"fps must be positive and finite, found {fps}")
    return {
        "codebase_version": "v3.0",
        "fps": int(fps) if float(fps).is_integer() else float(fps),
        "features": {
            key: {"dtype": feature.dtype, "shape": list(feature.shape), "names": feature.names}
            | ({"info": dict(feature.video)} if feature.video else {})
            for key, feature in features.items()
        },
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "data_path": PATHS["v3.0"]["data_path"],
        "video_path": PATHS["v3.0"]["video_path"] if keys_of(features, "video") else None,
        "robot_type": robot_type,
        "splits": {},
    }


class DatasetWriter:
    """A data set on disk that grows by whole episodes; call `start` before anything else."""

    def __init__(self, root: Path, info: dict[str, Any]) -> None:
        self.root, self.info = root, info
        self.features = read_features(info)
        self.fps: float = info["fps"]
        self._cameras = keys_of(self.features, "video")
        # The numbers of the next episode, of its first frame and of its files.
        self._next_index = self._next_row = self._next_file = 0
        # The newest file of meta/episodes, and its number.
        self._rows: pa.Table | None = None
        self._rows_file = 0
        self._lock = filelock.FileLock(root / RECORDING / "lock")

    def start(self) -> None:
        """Lock the folder, read what it holds and remove what a killed process left."""
        folder = self.root / RECORDING
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link, but has to be a folder: remove the link")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except filelock.Timeout as error:
            raise RuntimeError(f"another process is recording into {self.root}") from error
        try:
            for top in ("meta", "data", "videos"):
                if is_really_in(self.root, self.root / top):
                    remove_leftovers(self.root / top)
            self._load()
            for leftover in folder.iterdir():
                if leftover.name != "lock":
                    leftover.unlink()
            self._new_files()  # refuse what cannot be continued before anything is recorded
            if not (self.root / INFO).exists():
                write_json(self.root / MARK, {"begun_by": "piston"})
            self._write_summary()
        except BaseException:
            self._lock.release()
            (folder / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: what is in it has not been read
                folder.rmdir()
            raise

    def close(self) -> None:
        """Free the folder."""
        self._lock.release()
        shutil.rmtree(self.root / RECORDING, ignore_errors=True)

    def _load(self) -> None:
        """Read the state of the set from disk, and remove files of an unfinished episode."""
        paths = sorted((self.root / "meta/episodes").glob("*/*.parquet"))
        tables = [pq.read_table(path, page_checksum_verification=True) for path in paths]
        self.tasks: dict[str, int] = {}
        if paths:
            self._continue_rows(tables[-1], paths[-1])
            tasks = pq.read_table(self.root / TASKS, page_checksum_verification=True)
            # pandas keeps the texts as the index, under its own name if that has none.
            [text] = (name for name in tasks.column_names if name != "task_index")
            numbered = sorted(zip(tasks["task_index"].to_pylist(), tasks[text].to_pylist()))
            self.tasks = {task: index for index, task in numbered}
        self._num_stored_tasks = len(self.tasks)

        def column(name: str) -> list[Any]:
            return [value for table in tables for value in table[name].to_pylist()]

        self.num_episodes, self.num_frames = len(column("length")), sum(column("length"))
        self._next_index = max(column("episode_index"), default=-1) + 1
        self._next_row = max(column("dataset_to_index"), default=0)
        self._stats = merge_stats(one for table in tables for one in _stats_of_rows(table))
        streams = {"data": "data"} | {camera: f"videos/{camera}" for camera in self._cameras}
        used = {
            (stream, chunk * self.info["chunks_size"] + file)
            for stream, prefix in streams.items()
            for chunk, file in zip(*(column(f"{prefix}/{name}") for name in PLACE))
        }
        self._next_file = max((number for _, number in used), default=-1) + 1
        if (self.root / UNFINISHED).exists():
            for stream, number in self._unfinished(streams):
                path = self._path(stream, number)
                # Behind a link that leads elsewhere a file may be anyone's: see `_new_files`.
                if (stream, number) not in used and is_really_in(self.root, path):
                    path.unlink(missing_ok=True)
            (self.root / UNFINISHED).unlink()

    def _unfinished(self, streams: Collection[str]) -> Iterator[tuple[str, int]]:
        """Yield the streams and numbers of the files of the episode that was not finished."""
        path = self.root / UNFINISHED
        listed = read_json(path)
        for entry in listed if isinstance(listed, list) else [listed]:
            match entry:
                case [str(stream), int(chunk), int(file)] if stream in streams:
                    if chunk >= 0 and file >= 0:
                        yield stream, chunk * self.info["chunks_size"] + file
                        continue
            raise ValueError(
                f"{path} lists {entry}, which is no file of this set. Remove {path.parent} if no "
                "recorder wrote it"
            )

    def _continue_rows(self, rows: pa.Table, path: Path) -> None:
        """Take the newest file of meta/episodes; raise ValueError if our rows do not fit it."""
        all_stats = dict.fromkeys(STAT_NAMES, np.zeros(1))
        expected = set(self._row(1, [], dict.fromkeys(self.features, all_stats)))
        found = set(rows.column_names)
        optional = {name for name in expected if name.startswith("stats/")}
        if different := (expected - optional - found) | (found - expected):
            raise ValueError(
                f"{self.root}: meta/episodes does not fit the features of info.json; they differ "
                f"in {sorted(different)}. This set can be read, but not continued"
            )
        chunk, file = (rows[f"meta/episodes/{name}"][-1].as_py() for name in PLACE)
        self._rows, self._rows_file = rows, chunk * self.info["chunks_size"] + file
        if path != self._episodes_path():
            raise ValueError(
                f"{path} says that it is chunk {chunk}, file {file} of meta/episodes. This set can "
                "be read, but not continued"
            )

    def add_tasks(self, tasks: Iterable[str]) -> None:
        """Number tasks ahead of the episodes that use them."""
        for task in tasks:
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
        for camera in self._cameras:
            info, times = probe_video(episode.videos[camera], self.fps)
            if len(times) != len(episode):
                raise ValueError(
                    f"{camera!r}: the video has {len(times)} frames, the episode {len(episode)}"
                )
            info |= episode.encoder_info | {"is_depth_map": False}
            self.info["features"][camera].setdefault("info", info)
        self.add_tasks([*dict.fromkeys(episode.frame_tasks), *(episode.tasks or ())])
        steps = np.arange(len(episode))
        columns = episode.columns | {
            "timestamp": steps / self.fps if episode.timestamps is None else episode.timestamps,
            "frame_index": steps,
            "episode_index": np.full(len(episode), self._next_index),
            "index": steps + self._next_row,
            "task_index": np.array([self.tasks[task] for task in episode.frame_tasks]),
        }
        table = data_table(columns, self.features)
        stats = {
            key: episode.image_stats.get(key) or column_stats(np.asarray(columns[key]))
            for key, feature in self.features.items()
            if feature.dtype not in ("string", "language")
        }
        files = self._new_files()
        place = self._place(self._next_file).values()
        write_json(self.root / UNFINISHED, [(stream, *place) for stream in files])
        for camera in self._cameras:
            publish(episode.videos[camera], files[camera])
        if len(self.tasks) > self._num_stored_tasks:
            write_table(_tasks_table(self.tasks), self.root / TASKS)
            self._num_stored_tasks = len(self.tasks)
        write_table(table, files["data"])
        self._append_row(episode, stats)
        (self.root / UNFINISHED).unlink()
        self.num_episodes += 1
        self.num_frames += len(episode)
        self._next_index += 1
        self._next_row += len(episode)
        self._next_file += 1

    def _append_row(self, episode: NewEpisode, stats: EpisodeStats) -> None:
        """Add a row to the newest file of meta/episodes, or begin the next file."""
        before, schema = self._rows, None
        if before is not None:
            schema = before.schema
            # A set that lacks the statistics of a feature stays without them.
            stats = {key: one for key, one in stats.items() if f"stats/{key}/mean" in schema.names}
            if len(before) >= EPISODES_PER_FILE:
                before, self._rows_file = None, self._rows_file + 1
        row = self._row(len(episode), episode.tasks or dict.fromkeys(episode.frame_tasks), stats)
        table = pa.Table.from_pylist([row], schema=schema)
        if before is not None:
            table = pa.concat_tables([before, table]).combine_chunks()
        write_table(table, self._episodes_path())
        self._rows = table
        self._stats = merge_stats([self._stats, stats])

    def _row(self, length: int, tasks: Iterable[str], stats: EpisodeStats) -> dict[str, Any]:
        """Return the next episode's row of meta/episodes, columns in LeRobot's order."""
        place, rows_place = self._place(self._next_file), self._place(self._rows_file)
        row: dict[str, Any] = {
            "episode_index": self._next_index,
            "tasks": list(tasks),
            "length": length,
            **{f"data/{name}": number for name, number in place.items()},
            "dataset_from_index": self._next_row,
            "dataset_to_index": self._next_row + length,
        }
        for camera in self._cameras:
            times = {"from_timestamp": 0.0, "to_timestamp": length / self.fps}
            row |= {f"videos/{camera}/{name}": value for name, value in (place | times).items()}
        for key, feature in _plain_stats(stats).items():
            row |= {f"stats/{key}/{name}": value for name, value in feature.items()}
        return row | {f"meta/episodes/{name}": number for name, number in rows_place.items()}

    def _episodes_path(self) -> Path:
        return self.root / EPISODES_PATH.format(**self._place(self._rows_file))

    def _place(self, number: int) -> dict[str, int]:
        """Return the chunk of a file and its number there."""
        return dict(zip(PLACE, divmod(number, self.info["chunks_size"])))

    def _path(self, stream: str, number: int) -> Path:
        camera = None if stream == "data" else stream
        path = file_path(self.info, "v3.0", self._place(number), camera, all_fields=True)
        return self.root / path

    def _new_files(self) -> dict[str, Path]:
        """Return the files of the next episode; raise an error if they cannot be written."""
        if self._place(self._next_file)["chunk_index"] >= MAX_CHUNKS:
            raise ValueError(f"{self.root} is full: all {MAX_CHUNKS} chunks are used")
        files = {key: self._path(key, self._next_file) for key in ("data", *self._cameras)}
        for path in files.values():
            if path.exists():
                raise FileExistsError(
                    f"{path} exists, but no episode of the set refers to it. Move it elsewhere to "
                    "continue the set"
                )
        return files

    def _write_summary(self) -> None:
        """Write totals and statistics, which can be computed from the episodes."""
        if self._stats:
            write_json(self.root / STATS, _plain_stats(self._stats))
        totals = {
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self.tasks),
            "splits": {"train": f"0:{self.num_episodes}"} if self.num_episodes else {},
        }
        write_json(self.root / INFO, self.info | totals)


def write_table(table: pa.Table, path: Path) -> None:
    """Write one row group with checksums, completely or not at all."""
    rows = max(len(table), 1)
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, row_group_size=rows, write_page_checksum=True)


def _plain_stats(stats: EpisodeStats) -> dict[str, dict[str, Any]]:
    """Return statistics as lists of numbers: whole for "count", else floats."""
    return {
        key: {
            name: (value if name == "count" else value.astype(np.float64)).tolist()
            for name, value in feature.items()
        }
        for key, feature in stats.items()
    }


def _stats_of_rows(table: pa.Table) -> list[EpisodeStats]:
    """Return the statistics in the rows of meta/episodes, one entry per row."""
    episodes: list[EpisodeStats] = [{} for _ in range(len(table))]
    for column in table.column_names:
        if column.startswith("stats/"):
            key, name = column.removeprefix("stats/").rsplit("/", 1)
            for episode, value in zip(episodes, table[column].to_pylist()):
                episode.setdefault(key, {})[name] = np.array(value)
    return episodes


def _tasks_table(tasks: Mapping[str, int]) -> pa.Table:
    """Return meta/tasks.parquet: the task text is the pandas index that LeRobot looks up."""
    keys = ("name", "field_name", "pandas_type", "numpy_type", "metadata")
    columns = [("task_index", "task_index", "int64", "int64", None)]
    columns += [("task", "task", "object", "str", None)]
    names = (None, None, "unicode", "str", {"encoding": "UTF-8"})
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [dict(zip(keys, names))],
        "columns": [dict(zip(keys, column)) for column in columns],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "3.0.0",
    }
    schema = pa.schema(
        [("task_index", pa.int64()), ("task", pa.large_string())],
        metadata={"pandas": json.dumps(pandas)},
    )
    return pa.table({"task_index": list(tasks.values()), "task": list(tasks)}, schema=schema)
