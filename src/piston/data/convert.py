"""Converting LeRobot v2.0 and v2.1 data sets to v3.0.

Videos are linked or copied unchanged, unless the codec is unusual or the frames do not fit the rows
in number or time: then they are encoded anew. Statistics of columns are computed, with quantiles.
Those of images are taken from the source if it has them for every episode, because computing them
means decoding; they have no quantiles then.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.check import Findings, inspect_files
from piston.data.columns import Rows, decode_image
from piston.data.encoding import VideoEncoding, VideoThread, probe_video
from piston.data.episode_stats import (
    EpisodeStats,
    FeatureStats,
    frame_histogram,
    image_stats,
    sampled_frames,
)
from piston.data.features import BOOKKEEPING, IMAGE_NAMES, Features, cameras, image_columns
from piston.data.format import Episode, Metadata
from piston.data.recorder import choose_encoding
from piston.data.video import TOLERANCE_S, VideoReader
from piston.data.writer import RECORDING, DatasetWriter, NewEpisode, new_info
from piston.files import atomic_folder, link_or_copy, read_json_lines
from piston.progress import Progress, no_progress

logger = logging.getLogger(__name__)

# Codecs that every reader of LeRobot sets can decode.
KEPT_CODECS = ("av1", "h264", "hevc", "mpeg4", "vp9")
CARRIED_STATS = ("min", "max", "mean", "std", "count")


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was written and what was not."""

    target: Path
    num_episodes: int
    num_frames: int
    skipped: Mapping[str, str]  # episode or file -> why it was left out
    ignored: tuple[str, ...] = ()  # declared features without any data
    num_encoded: int = 0  # videos that had to be encoded anew
    num_retimed: int = 0  # episodes whose time stamps were not frame / fps, and are now


def convert_to_v30(
    source: str | Path,
    target: str | Path,
    progress: Progress = no_progress,
    *,
    overwrite: bool = False,
    skip_broken: bool = False,
    recompute_image_stats: bool = False,
    codec: str | VideoEncoding | None = None,
    task: str | None = None,
) -> Conversion:
    """Write the v2.x set `source` to `target` as v3.0; `target` appears only once it is complete.

    Episodes that cannot be read to the end are an error, or left out with `skip_broken`. `codec` is
    for videos that must be encoded anew, `task` for episodes that name none.
    """
    metadata = Metadata.read(source)
    if metadata.version == "v3.0":
        raise ValueError(f"{source} is v3.0 already: there is nothing to convert")
    check_target(target, [metadata.root])
    findings = inspect_files(metadata, metadata.episodes)
    broken = {i: problem.what for i, problem in findings.left_out(metadata.cameras).items()}
    if broken and not skip_broken:
        raise ValueError(
            f"{source}: {len(broken)} episodes cannot be converted, the first: {_first(broken)}. "
            f"Run: piston data check {source}. To leave them out: --skip-broken (skip_broken=True)"
        )
    kept = [episode for episode in metadata.episodes if episode.index not in broken]
    if not kept:
        raise ValueError(f"{source}: no episode can be read, the first: {_first(broken)}")
    if task is not None and all(episode.tasks for episode in kept):
        raise ValueError(
            f"{source}: all episodes name their tasks, --task {task!r} would have no effect: "
            "leave it out"
        )
    features, ignored = _target_features(metadata, kept, findings.stored)
    stats = {} if recompute_image_stats else _stored_image_stats(metadata, features)
    with atomic_folder(Path(target), overwrite=overwrite) as folder:
        writer = DatasetWriter(folder, new_info(metadata.fps, features, metadata.robot_type))
        writer.start()
        writer.add_tasks(text for _, text in sorted(metadata.tasks.items()))
        reader = _SourceReader(findings, features, folder, stats, choose_encoding(codec), task)
        total, done = sum(episode.length for episode in kept), 0
        for episode in kept:
            try:
                converted = reader.read(episode)
            except (ValueError, FileNotFoundError) as error:
                if not skip_broken:
                    error.add_note(
                        f"in episode {episode.index}; to leave such episodes out: --skip-broken "
                        "(skip_broken=True)"
                    )
                    raise
                broken[episode.index] = str(error)
            else:
                writer.add_episode(converted)
            done += episode.length
            progress(done, total)
        if not writer.num_episodes:
            raise ValueError(f"{source}: no episode can be read, the first: {_first(broken)}")
        writer.close()
    if reader.num_retimed:
        logger.warning(
            "%s: the time stamps of %d episodes were not frame / fps; they are in the new set",
            *(source, reader.num_retimed),
        )
    return Conversion(
        target=Path(target),
        num_episodes=writer.num_episodes,
        num_frames=writer.num_frames,
        skipped={f"episode {index}": what for index, what in sorted(broken.items())},
        ignored=ignored,
        num_encoded=reader.num_encoded,
        num_retimed=reader.num_retimed,
    )


def check_target(target: str | Path, sources: Iterable[Path]) -> None:
    """Raise ValueError if replacing `target` would delete a source."""
    folder = Path(target).resolve()
    if any(source.resolve().is_relative_to(folder) for source in sources):
        raise ValueError(f"{target} holds the source files: choose another folder")


def _target_features(
    metadata: Metadata, kept: Sequence[Episode], stored: frozenset[str]
) -> tuple[Features, tuple[str, ...]]:
    """Return the features that have data, bookkeeping last, and the names of the others."""
    features: Features = {}
    ignored = []
    for key, entry in metadata.info["features"].items():
        is_video = entry["dtype"] == "video"
        if key in BOOKKEEPING:
            continue
        if key not in (metadata.cameras if is_video else stored):
            ignored.append(key)
            logger.warning("%s: feature %r is declared but has no data", metadata.root, key)
            continue
        features[key] = {
            "dtype": entry["dtype"],
            "shape": [int(size) for size in entry.get("shape") or [1]],
            "names": entry.get("names"),
        }
        if is_video:
            features[key] |= _actual_size(metadata, kept, key, features[key]["shape"])
    return features | {key: dict(entry) for key, entry in BOOKKEEPING.items()}, tuple(ignored)


def _actual_size(
    metadata: Metadata, kept: Sequence[Episode], camera: str, declared: list[int]
) -> dict[str, Any]:
    """Return the size of the camera's frames if it is not the declared one."""
    if metadata.features[camera].video.get("video.is_depth_map"):
        raise ValueError(f"{metadata.root}: {camera} is a depth video, which cannot be converted")
    path = next(episode.videos[camera].path for episode in kept if camera in episode.videos)
    info, _ = probe_video(metadata.root / path, metadata.fps)
    found = [info["video.height"], info["video.width"], 3]
    if sorted(declared) == sorted(found):
        return {}
    logger.warning(
        "%s: %s is declared as %s, its frames are %s; the new set declares these",
        *(metadata.root, camera, declared, found),
    )
    return {"shape": found, "names": IMAGE_NAMES}


def _stored_image_stats(metadata: Metadata, features: Features) -> dict[int, EpisodeStats]:
    """Return the source's image statistics by episode; none unless every episode has them."""
    keys = cameras(features) + image_columns(features)
    stored: dict[int, EpisodeStats] = {}
    for _, row in read_json_lines(metadata.root / "meta" / "episodes_stats.jsonl"):
        stats = {key: ((row or {}).get("stats") or {}).get(key, {}) for key in keys}
        if row is not None and all(set(CARRIED_STATS) <= set(found) for found in stats.values()):
            stored[row["episode_index"]] = {
                key: {name: np.array(found[name]) for name in CARRIED_STATS}
                for key, found in stats.items()
            }
    complete = all(episode.index in stored for episode in metadata.episodes)
    return stored if complete else {}


class _SourceReader:
    """Reads episodes of a v2.x set for the writer; counts what could not be kept as it was."""

    def __init__(
        self,
        findings: Findings,
        features: Features,
        folder: Path,
        stats: Mapping[int, EpisodeStats],
        encoding: VideoEncoding,
        task: str | None,
    ) -> None:
        self._metadata, self._files = findings.metadata, findings.files
        self._features = features
        self._folder = folder
        self._stats = stats
        self._encoding = encoding
        self._task = task
        self.num_encoded = 0
        self.num_retimed = 0

    def read(self, episode: Episode) -> NewEpisode:
        rows = self._files[episode.data_path].rows[episode.index]
        columns = self._columns(episode, rows)
        return NewEpisode(
            columns=columns,
            frame_tasks=self._frame_tasks(episode, rows),
            videos={camera: self._video(episode, camera) for camera in cameras(self._features)},
            image_stats=self._stats.get(episode.index) or self._image_stats(episode, columns),
            timestamps=self._timestamps(rows),
            tasks=episode.tasks or None,
        )

    def _columns(self, episode: Episode, rows: Rows) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for key, entry in self._features.items():
            if entry["dtype"] not in ("image", "video") and key not in BOOKKEEPING:
                columns[key] = _as_declared(rows[key], entry, f"{episode.data_path}: {key}")
        if keys := image_columns(self._features):
            path = self._metadata.root / episode.data_path
            try:
                table = pq.read_table(path, columns=keys)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            for key in keys:
                cells = table[key].to_pylist()
                columns[key] = [_image_bytes(cell, self._metadata.root) for cell in cells]
        return columns

    def _timestamps(self, rows: Rows) -> np.ndarray | None:
        """Return the source's own, unless they differ from those of the video frames."""
        if "timestamp" not in rows:
            return None
        times = rows["timestamp"].reshape(-1)
        if np.abs(times - np.arange(len(times)) / self._metadata.fps).max() < TOLERANCE_S:
            return times
        self.num_retimed += 1
        return None

    def _frame_tasks(self, episode: Episode, rows: Rows) -> list[str]:
        default = episode.tasks[0] if episode.tasks else self._task
        texts = [default] * episode.length
        if "task_index" in rows and self._metadata.tasks:
            numbers = rows["task_index"].reshape(-1)
            texts = [self._metadata.tasks.get(int(number), default) for number in numbers]
        found = [text for text in texts if text is not None]
        if len(found) < len(texts):
            raise ValueError(
                f"episode {episode.index} names no task. Give one for such episodes: --task"
            )
        return found

    def _video(self, episode: Episode, camera: str) -> Path:
        """Put the episode's video into the .recording folder, encoded anew if necessary."""
        source, fps = self._metadata.root / episode.videos[camera].path, self._metadata.fps
        copy = self._folder / RECORDING / f"{camera}.mp4"
        info, times = probe_video(source, fps)
        expected = np.arange(episode.length) / fps
        fits = len(times) == len(expected) and np.abs(times - expected).max() < TOLERANCE_S
        if fits and info["video.codec"] in KEPT_CODECS:
            # Resolved: a link to a symbolic link would be a symbolic link.
            link_or_copy(source.resolve(), copy)
            return copy
        shape = (info["video.height"], info["video.width"])
        self._encoding.check(camera, *shape)
        thread = VideoThread(camera, copy, fps, shape, self._encoding)
        try:
            with contextlib.closing(VideoReader(source)) as reader:
                for time in expected:
                    thread.add(reader.frames_at([time])[0])
        except BaseException:
            thread.cancel()
            raise
        thread.finish()
        self.num_encoded += 1
        return copy

    def _image_stats(self, episode: Episode, columns: Mapping[str, Any]) -> dict[str, FeatureStats]:
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


def _as_declared(values: np.ndarray, entry: Mapping[str, Any], where: str) -> np.ndarray:
    """Return a column with the declared shape and dtype; raise ValueError if it does not fit."""
    if entry["dtype"] == "string":
        return values
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    if values[0].size != np.prod(shape) or not np.can_cast(values.dtype, dtype, "same_kind"):
        found = f"{values.dtype}{list(values.shape[1:])}"
        raise ValueError(f"{where} is {found}, declared {dtype}{list(shape)}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))[0])
        raise ValueError(f"{where} is NaN or infinite in row {row}")
    return values.astype(dtype).reshape(len(values), *shape)


def _image_bytes(cell: Any, root: Path) -> bytes:
    if isinstance(cell, Mapping) and cell.get("bytes") is None and cell.get("path") is not None:
        return (root / cell["path"]).read_bytes()
    return cell["bytes"] if isinstance(cell, Mapping) else cell


def _first(broken: Mapping[int, str]) -> str:
    index = min(broken)
    return f"episode {index} ({broken[index]})"
