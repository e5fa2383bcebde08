"""What every version of the format shares when episodes are written.

Knows the bookkeeping columns, tasks, statistics and `meta/info.json`. Knows nothing of frames
arriving one by one (see recorder) nor of the folder's layout (see store_v30, store_v21). A store
changes its own state only after the files are on disk, so a failed write (a full disk) loses that
episode and nothing else.
"""

import abc
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pyarrow as pa

from piston.data.episode_stats import EpisodeStats, FeatureStats, column_stats
from piston.data.features import Features, cameras
from piston.data.parquet_tables import data_table
from piston.data.video_encoding import VideoEncoding
from piston.data.video_remux import VideoSummary, summarise_video
from piston.files import remove_leftovers, write_json

INFO = Path("meta/info.json")
# Where unfinished things live; hidden, so that no reader looks inside.
RECORDING = Path(".recording")


@dataclasses.dataclass(frozen=True)
class FinishedEpisode:
    """One whole episode, ready to be stored."""

    columns: dict[str, Any]  # feature -> (n, *shape) array, or n PNGs
    frame_tasks: list[str]
    videos: dict[str, Path]  # camera -> mp4 that the store may move away
    image_stats: dict[str, FeatureStats]  # cameras and image columns
    encoding: VideoEncoding | None = None  # None: encoded by someone else
    timestamps: np.ndarray | None = None  # None: frame i at i / fps
    tasks: tuple[str, ...] | None = None  # None: the frames' tasks in order of appearance

    def __len__(self) -> int:
        return len(self.frame_tasks)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An episode with everything that its place in the set decides."""

    episode: FinishedEpisode
    index: int
    start: int
    tasks: dict[str, int]  # all tasks, with the new ones
    num_stored_tasks: int  # how many of them are on disk already
    table: pa.Table
    stats: EpisodeStats
    summaries: dict[str, VideoSummary]

    @property
    def has_new_tasks(self) -> bool:
        return len(self.tasks) > self.num_stored_tasks

    @property
    def task_names(self) -> list[str]:
        return list(self.episode.tasks or dict.fromkeys(self.episode.frame_tasks))


class EpisodeStore(abc.ABC):
    """A data set on disk that grows by whole episodes; readable at every moment."""

    list_name = "List"  # see parquet_tables.data_schema

    def __init__(self, root: Path, info: dict[str, Any]) -> None:
        self.root = root
        self.info = info
        self.tasks: dict[str, int] = {}
        self._num_stored_tasks = 0
        self.num_episodes = 0
        self.num_frames = 0
        self._lock = filelock.FileLock(root / RECORDING / "lock")

    @property
    def features(self) -> Features:
        return self.info["features"]

    @property
    def fps(self) -> float:
        return self.info["fps"]

    def start(self) -> None:
        """Takes the folder for this process, reads where the last one stopped, clears its rest."""
        (self.root / RECORDING).mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except filelock.Timeout as error:
            raise RuntimeError(f"another process is recording into {self.root}") from error
        remove_leftovers(self.root)
        self._load()
        self._num_stored_tasks = len(self.tasks)
        for leftover in (self.root / RECORDING).iterdir():
            if leftover.name != "lock":
                leftover.unlink()
        self._write_info()

    def add_tasks(self, tasks: list[str]) -> None:
        """Gives tasks their numbers ahead of the episodes that use them."""
        self.tasks = _with_tasks(self.tasks, tasks)

    def add_episode(self, episode: FinishedEpisode) -> None:
        """Stores an episode; on return it is part of the set."""
        prepared = self._prepare(episode)
        self._add_video_info(prepared)
        self._commit(prepared)
        self.tasks = prepared.tasks
        self._num_stored_tasks = len(self.tasks)
        self.num_episodes += 1
        self.num_frames += len(episode)
        self._write_summary(prepared)

    def close(self) -> None:
        """Leaves the final layout and frees the folder."""
        self._tidy()
        self._lock.release()
        shutil.rmtree(self.root / RECORDING, ignore_errors=True)

    def _prepare(self, episode: FinishedEpisode) -> Prepared:
        num_frames = len(episode)
        tasks = _with_tasks(self.tasks, [*episode.frame_tasks, *(episode.tasks or ())])
        times = episode.timestamps
        frame_index = np.arange(num_frames)
        bookkeeping = {
            "timestamp": frame_index / self.fps if times is None else times,
            "frame_index": frame_index,
            "episode_index": np.full(num_frames, self.num_episodes),
            "index": frame_index + self.num_frames,
            "task_index": np.array([tasks[task] for task in episode.frame_tasks]),
        }
        columns = episode.columns | bookkeeping
        return Prepared(
            episode=episode,
            index=self.num_episodes,
            start=self.num_frames,
            tasks=tasks,
            num_stored_tasks=self._num_stored_tasks,
            table=data_table(columns, self.features, self.list_name),
            stats=_episode_stats(columns, self.features, episode.image_stats),
            summaries=self._check_videos(episode),
        )

    def _check_videos(self, episode: FinishedEpisode) -> dict[str, VideoSummary]:
        summaries = {}
        for camera in cameras(self.features):
            summary = summarise_video(episode.videos[camera])
            if summary.num_frames != len(episode):
                raise ValueError(
                    f"{camera!r}: the video has {summary.num_frames} frames, "
                    f"the episode {len(episode)}"
                )
            summaries[camera] = summary
        return summaries

    def _add_video_info(self, prepared: Prepared) -> None:
        for camera, summary in prepared.summaries.items():
            if "info" not in self.features[camera]:
                self.features[camera]["info"] = self._describe_video(
                    summary, prepared.episode.encoding
                )

    def _write_info(self) -> None:
        write_json(self.root / INFO, self._describe())

    @abc.abstractmethod
    def _load(self) -> None:
        """Reads episodes, frames and tasks from disk; drops what was not finished."""

    @abc.abstractmethod
    def _commit(self, prepared: Prepared) -> None:
        """Writes files in an order that keeps the set whole, the one that makes the episode exist
        last.
        """

    @abc.abstractmethod
    def _write_summary(self, prepared: Prepared) -> None:
        """Totals and statistics, which can be rebuilt from the episodes."""

    @abc.abstractmethod
    def _tidy(self) -> None:
        """Brings files into their final layout."""

    @abc.abstractmethod
    def _describe(self) -> dict[str, Any]:
        """info.json with the current totals."""

    @abc.abstractmethod
    def _describe_video(
        self, summary: VideoSummary, encoding: VideoEncoding | None
    ) -> dict[str, Any]:
        """The "info" of a video feature."""


def read_info(root: Path) -> dict[str, Any]:
    path = root / INFO
    if not path.is_file():
        raise FileNotFoundError(f"{root} is not a data set: it has no {INFO}")
    return json.loads(path.read_text(encoding="utf-8"))


def _episode_stats(
    columns: dict[str, Any], features: Features, image_stats: dict[str, FeatureStats]
) -> EpisodeStats:
    return {
        key: image_stats[key] if key in image_stats else column_stats(np.asarray(columns[key]))
        for key, entry in features.items()
        if entry["dtype"] != "string"
    }


def _with_tasks(known: dict[str, int], tasks: list[str]) -> dict[str, int]:
    numbered = dict(known)
    for task in tasks:
        if task not in numbered:
            numbered[task] = max(numbered.values(), default=-1) + 1
    return numbered


def plain_fps(fps: float) -> float:
    """LeRobot writes whole rates as integers."""
    if not 0 < fps < float("inf"):
        raise ValueError(f"fps must be positive and finite, found {fps}")
    return int(fps) if float(fps).is_integer() else float(fps)
