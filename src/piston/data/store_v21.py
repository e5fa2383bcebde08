"""LeRobot v2.1 on disk: one data file and one video per camera for every episode, JSON lines beside
them.

`meta/episodes.jsonl` decides which episodes exist: an episode whose line is there is complete, one
without is not part of the set.
"""

import json
from pathlib import Path
from typing import Any

from piston.data.episode_stats import QUANTILES, EpisodeStats
from piston.data.episode_store import EpisodeStore, Prepared
from piston.data.features import Features, cameras
from piston.data.parquet_tables import write_table
from piston.data.video_encoding import VideoEncoding
from piston.data.video_remux import VideoSummary
from piston.files import append_json_lines, publish, write_text

EPISODES = Path("meta/episodes.jsonl")
EPISODES_STATS = Path("meta/episodes_stats.jsonl")
TASKS = Path("meta/tasks.jsonl")
DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


def new_info_v21(fps: float, features: Features, robot_type: str | None) -> dict[str, Any]:
    """info.json of a set without episodes, fields in LeRobot's order."""
    return {
        "codebase_version": "v2.1",
        "robot_type": robot_type,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "total_videos": 0,
        "total_chunks": 0,
        "chunks_size": 1000,
        "fps": fps,
        "splits": {},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if cameras(features) else None,
        "features": features,
    }


class StoreV21(EpisodeStore):
    list_name = "Sequence"  # the LeRobot releases that read v2.1 use an old `datasets`

    def _load(self) -> None:
        episodes = _read_lines(self.root / EPISODES)
        tasks = sorted(_read_lines(self.root / TASKS), key=lambda line: line["task_index"])
        self.tasks = {line["task"]: line["task_index"] for line in tasks}
        self.num_episodes = len(episodes)
        self.num_frames = sum(line["length"] for line in episodes)
        self._drop_unfinished()

    def _drop_unfinished(self) -> None:
        """An episode's files and statistics come before its line; without the line they go."""
        self._data_path(self.num_episodes).unlink(missing_ok=True)
        for camera in cameras(self.features):
            self._video_path(camera, self.num_episodes).unlink(missing_ok=True)
        stats = _read_lines(self.root / EPISODES_STATS)
        kept = [line for line in stats if line["episode_index"] < self.num_episodes]
        if len(kept) < len(stats):
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
            write_text(self.root / EPISODES_STATS, text)

    def _commit(self, prepared: Prepared) -> None:
        index = prepared.index
        write_table(prepared.table, self._data_path(index))
        for camera, path in prepared.episode.videos.items():
            publish(path, self._video_path(camera, index))
        if prepared.has_new_tasks:
            tasks = [{"task_index": i, "task": task} for task, i in prepared.tasks.items()]
            append_json_lines(self.root / TASKS, tasks[prepared.num_stored_tasks :])
        stats = {"episode_index": index, "stats": _plain_stats(prepared.stats)}
        append_json_lines(self.root / EPISODES_STATS, [stats])
        line = {
            "episode_index": index,
            "tasks": prepared.task_names,
            "length": len(prepared.episode),
        }
        append_json_lines(self.root / EPISODES, [line])

    def _write_summary(self, prepared: Prepared) -> None:
        del prepared  # v2.1 keeps no statistics of the whole set
        self._write_info()

    def _tidy(self) -> None:
        self._write_info()

    def _describe(self) -> dict[str, Any]:
        count, chunk = self.num_episodes, self.info["chunks_size"]
        totals = {
            "total_episodes": count,
            "total_frames": self.num_frames,
            "total_tasks": len(self.tasks),
            "total_videos": count * len(cameras(self.features)),
            "total_chunks": -(-count // chunk),
            "splits": {"train": f"0:{count}"} if count else {},
        }
        return {key: totals.get(key, value) for key, value in self.info.items()}

    def _describe_video(
        self, summary: VideoSummary, encoding: VideoEncoding | None
    ) -> dict[str, Any]:
        del encoding  # v2.1 does not say how a video was encoded
        described = summary.describe(self.fps)
        first = ("video.height", "video.width", "video.codec", "video.pix_fmt")
        return {key: described[key] for key in first} | {"video.is_depth_map": False} | described

    def _data_path(self, index: int) -> Path:
        chunk = index // self.info["chunks_size"]
        path = self.info["data_path"].format(episode_chunk=chunk, episode_index=index)
        return self.root / path

    def _video_path(self, camera: str, index: int) -> Path:
        chunk = index // self.info["chunks_size"]
        return self.root / self.info["video_path"].format(
            episode_chunk=chunk, episode_index=index, video_key=camera
        )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _plain_stats(stats: EpisodeStats) -> dict[str, Any]:
    """v2.1 has no quantiles, and keeps whole numbers whole."""
    return {
        key: {name: value.tolist() for name, value in feature.items() if name not in QUANTILES}
        for key, feature in stats.items()
    }
