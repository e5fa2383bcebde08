"""LeRobot v3.0 on disk: many episodes per file.

A file that many episodes share cannot grow safely: a parquet file and an mp4 are unreadable until
their last byte is written. So an episode first gets files of its own in a chunk far behind the
others, which any reader finds through the episode's row:

    data/chunk-000/file-000.parquet    episodes 0..57, joined
    data/chunk-999/file-058.parquet    episode 58, staged
    data/chunk-999/file-059.parquet    episode 59, staged

Staged files are joined when there is enough for a whole shared file, and at the end; a shared file
never changes again. So each byte is joined once, and the cost of an episode does not grow with the
set. Joined files get new names, so the rows in `meta/episodes` stay right until one rename of the
newest of these files switches them over; only then do the staged files go. That rename is also what
makes a new episode exist.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.episode_rows import EpisodeRows, column_prefixes, slots_of
from piston.data.episode_stats import EpisodeStats, merge_stats
from piston.data.episode_store import RECORDING, EpisodeStore, Prepared
from piston.data.features import Features, cameras
from piston.data.parquet_tables import stats_of_rows, tasks_table, write_table
from piston.data.shared_files import STAGING_CHUNK, Slot, Staged, group_staged, join
from piston.data.video_encoding import VideoEncoding
from piston.data.video_remux import VideoSummary
from piston.files import publish, write_json

logger = logging.getLogger(__name__)

TASKS = Path("meta/tasks.parquet")
STATS = Path("meta/stats.json")
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
JOURNAL = RECORDING / "joining.json"
MEGABYTE = 1024**2


def new_info_v30(fps: float, features: Features, robot_type: str | None) -> dict[str, Any]:
    """info.json of a set without episodes, fields in LeRobot's order."""
    return {
        "codebase_version": "v3.0",
        "fps": fps,
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


class StoreV30(EpisodeStore):
    def __init__(self, root: Path, info: dict[str, Any]) -> None:
        super().__init__(root, info)
        self._rows = EpisodeRows(root, self.features, self.fps)
        self._stats: EpisodeStats = {}
        # Per stream ("data" and each camera): episodes to be joined, and the shared files so far.
        self._staged: dict[str, list[Staged]] = {stream: [] for stream in self._streams}
        self._shared: dict[str, set[Slot]] = {stream: set() for stream in self._streams}

    # Reading where a former recorder stopped.

    def _load(self) -> None:
        if (self.root / TASKS).exists():
            table = pq.read_table(self.root / TASKS)
            numbered = sorted(zip(table["task_index"].to_pylist(), table["task"].to_pylist()))
            self.tasks = {task: index for index, task in numbered}
        rows = self._rows.load()
        if rows is not None:
            lengths = rows["length"].to_pylist()
            self.num_episodes, self.num_frames = len(lengths), sum(lengths)
            self._find_files(rows, lengths)
            self._stats = merge_stats(stats_of_rows(rows))
            write_json(self.root / STATS, _plain_stats(self._stats))
        self._drop_unfinished()

    def _find_files(self, rows: pa.Table, lengths: list[int]) -> None:
        first = len(rows) - len(self._rows)  # only rows of the newest file are staged
        for stream, prefix in column_prefixes(self.features).items():
            for row, (slot, length) in enumerate(zip(slots_of(prefix, rows), lengths), -first):
                if slot.chunk == STAGING_CHUNK:
                    self._stage(stream, row, length)
                else:
                    self._shared[stream].add(slot)

    def _drop_unfinished(self) -> None:
        """Deletes staged and joined files that no row names."""
        for stream in self._streams:
            used = {staged.path for staged in self._staged[stream]}
            folder = self._path(stream, Slot(STAGING_CHUNK, 0)).parent
            for path in folder.glob("*"):
                if path not in used:
                    path.unlink()
            if not used and folder.is_dir():
                folder.rmdir()
        journal = self.root / JOURNAL
        if journal.exists():
            # Killed while joining: either the rows name the new files by now, or nothing does.
            for stream, chunk, number in json.loads(journal.read_text(encoding="utf-8")):
                if Slot(chunk, number) not in self._shared[stream]:
                    self._path(stream, Slot(chunk, number)).unlink(missing_ok=True)
            journal.unlink()

    # Adding an episode.

    def _commit(self, prepared: Prepared) -> None:
        if self._rows.is_full:
            self._tidy()
            self._rows.begin_next_file(self.info["chunks_size"])
        row, length = len(self._rows), len(prepared.episode)
        slot = Slot(STAGING_CHUNK, row)
        write_table(prepared.table, self._path("data", slot))
        for camera, path in prepared.episode.videos.items():
            publish(path, self._path(camera, slot))
        if prepared.has_new_tasks:
            write_table(tasks_table(prepared.tasks), self.root / TASKS)
        self._rows.append(
            prepared.index, prepared.task_names, prepared.start, length, slot, prepared.stats
        )
        for stream in self._streams:
            self._stage(stream, row, length)

    def _write_summary(self, prepared: Prepared) -> None:
        self._stats = merge_stats([self._stats, prepared.stats])
        write_json(self.root / STATS, _plain_stats(self._stats))
        self._write_info()
        try:
            self._join(final=False)
        except OSError as error:
            # Nothing is lost: staged episodes are as readable as joined ones. `close` will insist.
            logger.warning("episodes stay in files of their own for now: %s", error)

    # Joining staged episodes.

    def _tidy(self) -> None:
        self._join(final=True)
        self._drop_unfinished()

    def _join(self, final: bool) -> None:
        """Joins what fills whole shared files; at the end, everything."""
        joins: list[tuple[str, Slot, list[Staged]]] = []
        for stream, staged in self._staged.items():
            if not final and sum(episode.num_bytes for episode in staged) <= self._limit(stream):
                continue
            groups = group_staged(staged, self._limit(stream))
            slot = max(self._shared[stream], default=None)
            for group in groups if final else groups[:-1]:
                slot = slot.next(self.info["chunks_size"]) if slot else Slot(0, 0)
                joins.append((stream, slot, group))
        if not joins:
            return
        write_json(self.root / JOURNAL, [(stream, s.chunk, s.file) for stream, s, _ in joins])
        places: dict[str, dict[int, tuple[Slot, int]]] = {stream: {} for stream, _, _ in joins}
        for stream, slot, group in joins:
            join(group, self._path(stream, slot), self.fps)
            start = 0
            for episode in group:
                places[stream][episode.row] = (slot, start)
                start += episode.num_frames
        self._rows.move(places)
        for stream, slot, group in joins:
            self._shared[stream].add(slot)
            self._staged[stream] = self._staged[stream][len(group) :]
        self._drop_unfinished()

    # Names and descriptions.

    @property
    def _streams(self) -> list[str]:
        return list(column_prefixes(self.features))

    def _stage(self, stream: str, row: int, frames: int) -> None:
        path = self._path(stream, Slot(STAGING_CHUNK, row))
        self._staged[stream].append(Staged(row, path, frames, path.stat().st_size))

    def _path(self, stream: str, slot: Slot) -> Path:
        names = {"chunk_index": slot.chunk, "file_index": slot.file}
        if stream == "data":
            return self.root / self.info["data_path"].format(**names)
        return self.root / self.info["video_path"].format(video_key=stream, **names)

    def _limit(self, stream: str) -> float:
        name = "data_files_size_in_mb" if stream == "data" else "video_files_size_in_mb"
        return self.info[name] * MEGABYTE

    def _describe(self) -> dict[str, Any]:
        count = self.num_episodes
        totals = {
            "total_episodes": count,
            "total_frames": self.num_frames,
            "total_tasks": len(self.tasks),
            "splits": {"train": f"0:{count}"} if count else {},
        }
        return {key: totals.get(key, value) for key, value in self.info.items()}

    def _describe_video(
        self, summary: VideoSummary, encoding: VideoEncoding | None
    ) -> dict[str, Any]:
        settings = encoding.describe() if encoding is not None else {}
        return summary.describe(self.fps) | settings | {"is_depth_map": False}


def _plain_stats(stats: EpisodeStats) -> dict[str, Any]:
    return {
        key: {
            name: (value if name == "count" else value.astype(float)).tolist()
            for name, value in feature.items()
        }
        for key, feature in stats.items()
    }
