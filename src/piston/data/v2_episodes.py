"""Episodes of a v2.x set, in the shape in which a store takes them.

Knows what is kept as it is, computed anew and encoded anew. Knows nothing of the target beyond a
folder for its videos.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.columns import decode_image, to_array
from piston.data.episode_stats import (
    STAT_NAMES,
    EpisodeStats,
    FeatureStats,
    frame_histogram,
    image_stats,
    sampled_frames,
)
from piston.data.episode_store import RECORDING, FinishedEpisode
from piston.data.features import BOOKKEEPING, Features, cameras, image_columns
from piston.data.format import Episode, Metadata
from piston.data.video import TOLERANCE_S, VideoReader
from piston.data.video_encoding import VideoEncoding, VideoThread
from piston.data.video_remux import JOINABLE_CODECS, summarise_video


class SourceEpisodes:
    """`read(episode)`; counts what could not be kept as it was."""

    def __init__(
        self,
        metadata: Metadata,
        features: Features,
        folder: Path,
        stats: Mapping[int, EpisodeStats],
        encoding: VideoEncoding,
        task: str | None,
    ) -> None:
        self._metadata = metadata
        self._features = features
        self._folder = folder
        self._stats = stats
        self._encoding = encoding
        self._task = task
        self.num_encoded = 0
        self.num_retimed = 0

    def read(self, episode: Episode) -> FinishedEpisode:
        path = self._metadata.root / episode.data_path
        try:
            with pq.ParquetFile(path) as file:
                stored = set(file.schema_arrow.names)
                table = file.read(columns=[key for key in self._features if key in stored])
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        columns = self._columns(table, path)
        videos = {camera: self._video(episode, camera) for camera in cameras(self._features)}
        return FinishedEpisode(
            columns=columns,
            frame_tasks=self._frame_tasks(episode, table, path),
            videos=videos,
            image_stats=self._image_stats(episode, columns),
            timestamps=self._timestamps(table, path),
            tasks=episode.tasks or None,
        )

    def _columns(self, table: pa.Table, path: Path) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for key, entry in self._features.items():
            if entry["dtype"] == "image":
                cells = table[key].to_pylist()
                columns[key] = [_picture_bytes(cell, self._metadata.root) for cell in cells]
            elif entry["dtype"] != "video" and key not in BOOKKEEPING:
                values = to_array(table[key], tuple(entry["shape"]), path, key)
                columns[key] = _declared(values, entry, key, path)
        return columns

    def _timestamps(self, table: pa.Table, path: Path) -> np.ndarray | None:
        """The source's own, unless they stray from the frames they belong to."""
        if "timestamp" not in table.column_names:
            return None
        times = to_array(table["timestamp"], (), path, "timestamp").reshape(-1)
        if np.abs(times - np.arange(len(times)) / self._metadata.fps).max() < TOLERANCE_S:
            return times
        # In a file that episodes share, a reader that goes by these would run into the next one.
        self.num_retimed += 1
        return None

    def _frame_tasks(self, episode: Episode, table: pa.Table, path: Path) -> list[str]:
        default = episode.tasks[0] if episode.tasks else self._task
        if "task_index" in table.column_names and self._metadata.tasks:
            numbers = to_array(table["task_index"], (), path, "task_index").reshape(-1)
            texts = [self._metadata.tasks.get(int(number), default) for number in numbers]
        else:
            texts = [default] * episode.length
        found = [text for text in texts if text is not None]
        if len(found) < len(texts):
            raise ValueError(
                f"{path}: episode {episode.index} names no task. Give one for such episodes"
            )
        return found

    def _video(self, episode: Episode, camera: str) -> Path:
        source = self._metadata.root / episode.videos[camera].path
        copy = self._folder / RECORDING / f"{camera}.mp4"
        summary = summarise_video(source)
        if (
            summary.codec in JOINABLE_CODECS
            and summary.num_frames == episode.length
            and summary.follows_fps(self._metadata.fps)
        ):
            shutil.copyfile(source, copy)
            return copy
        shape = [summary.height, summary.width, 3]
        self._encoding.check(camera, *shape[:2])
        thread = VideoThread(camera, copy, self._metadata.fps, shape, self._encoding)
        try:
            with contextlib.closing(VideoReader(source)) as reader:
                for frame in range(episode.length):
                    thread.add(reader.frames_at([frame / self._metadata.fps])[0])
        except BaseException:
            thread.cancel()
            raise
        thread.finish()
        self.num_encoded += 1
        return copy

    def _image_stats(self, episode: Episode, columns: Mapping[str, Any]) -> dict[str, FeatureStats]:
        if episode.index in self._stats:
            return self._stats[episode.index]
        sample = sampled_frames(episode.length)
        stats = {}
        for camera in cameras(self._features):
            path = self._metadata.root / episode.videos[camera].path
            with contextlib.closing(VideoReader(path)) as reader:
                images = (reader.frames_at([i / self._metadata.fps])[0] for i in sample)
                stats[camera] = image_stats([frame_histogram(image) for image in images])
        for key in image_columns(self._features):
            images = (decode_image(columns[key][i], self._metadata.root) for i in sample)
            stats[key] = image_stats([frame_histogram(image) for image in images])
        return stats


def carried_image_stats(metadata: Metadata, features: Features) -> dict[int, EpisodeStats]:
    """Image statistics per episode from the source, or nothing unless all episodes have them."""
    path = metadata.root / "meta" / "episodes_stats.jsonl"
    keys = cameras(features) + image_columns(features)
    if not path.is_file():
        return {}
    carried: dict[int, EpisodeStats] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        stats = {key: row["stats"].get(key, {}) for key in keys}
        if all({"min", "max", "mean", "std", "count"} <= set(found) for found in stats.values()):
            carried[row["episode_index"]] = {
                key: {name: np.array(found[name]) for name in STAT_NAMES if name in found}
                for key, found in stats.items()
            }
    complete = all(episode.index in carried for episode in metadata.episodes)
    return carried if complete else {}


def _declared(values: np.ndarray, entry: Mapping[str, Any], key: str, path: Path) -> np.ndarray:
    if entry["dtype"] == "string":
        return values
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    if values[0].size != np.prod(shape) or not np.can_cast(values.dtype, dtype, "same_kind"):
        raise ValueError(
            f"{path}: {key} is {values.dtype}{list(values.shape[1:])}, "
            f"declared {dtype}{list(shape)}"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))[0])
        raise ValueError(f"{path}: {key} is NaN or infinite in row {row}")
    return values.astype(dtype).reshape(len(values), *shape)


def _picture_bytes(cell: Any, root: Path) -> bytes:
    if isinstance(cell, Mapping) and cell.get("bytes") is None and cell.get("path") is not None:
        return (root / cell["path"]).read_bytes()
    return cell["bytes"] if isinstance(cell, Mapping) else cell
