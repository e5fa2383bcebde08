"""Converting LeRobot v2.0 and v2.1 data sets to v3.0; `aloha_hdf5` converts ALOHA's episodes.

Videos are linked or copied unchanged, unless the codec is unusual or the frames do not fit the rows
in number or time: then they are encoded anew. Statistics of columns are computed, with quantiles.
Those of images are taken from the source if it has them for every episode, because computing them
means decoding; they have no quantiles then. Labels of subtasks and questions are kept as they are.
"""

import contextlib
import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.check import bad_rows
from piston.data.columns import image_bytes
from piston.data.dataset import LeRobotDataset
from piston.data.findings import inspect_files, left_out
from piston.data.format import (
    CAMERA_DTYPES,
    DERIVED,
    LANGUAGE,
    SUBTASK_INDEX,
    SUBTASKS,
    Episode,
    Feature,
    keys_of,
    not_a_written_set,
)
from piston.data.metadata import Metadata
from piston.data.record.columns import EpisodeStats, frame_histogram, image_stats, sampled_frames
from piston.data.record.declare import IMAGE_NAMES, Features
from piston.data.record.encoding import VideoEncoding, encode_video
from piston.data.record.writer import RECORDING, DatasetWriter, NewEpisode, new_info
from piston.data.video import TOLERANCE_S, probe_video
from piston.files import atomic_folder, check_new_folder, link_or_copy, read_json_lines
from piston.progress import Progress, no_progress

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

# Codecs that every reader of LeRobot sets can decode.
KEPT_CODECS = ("av1", "h264", "hevc", "mpeg4", "vp9")
CARRIED_STATS = ("min", "max", "mean", "std", "count")


@dataclasses.dataclass
class Conversion:
    """What was written and what was not."""

    target: Path
    num_episodes: int = 0
    num_frames: int = 0
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # episode or file -> why
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
    replacing = replacing_options(overwrite, [metadata.root])
    check_new_folder(Path(target), **replacing)
    findings, done = inspect_files(metadata, metadata.episodes), Conversion(Path(target))
    broken = left_out(findings.problems, metadata.cameras)
    done.skipped |= {f"episode {index}": broken[index].what for index in sorted(broken)}
    kept = [episode for episode in metadata.episodes if episode.index not in broken]
    if broken and not (skip_broken and kept):
        raise ValueError(
            f"{source}: {len(broken)} episodes cannot be converted, the first: episode "
            f"{min(broken)} ({broken[min(broken)].what}). Run: piston data check {source}. To "
            "leave out some: --skip-broken (skip_broken=True)"
        )
    if task is not None and all(episode.tasks for episode in kept):
        raise ValueError(
            f"{source}: all episodes name their tasks, --task {task!r} would have no effect: "
            "leave it out"
        )
    features, done.ignored = _target_features(metadata, kept, findings.data.stored)
    stats = {} if recompute_image_stats else _stored_image_stats(metadata, features)
    encoding = VideoEncoding.choose(codec)

    def convert(episode: Episode) -> None:
        dataset = LeRobotDataset(findings, [episode], {})
        columns = _columns(dataset, features)
        times = dataset.column("timestamp").reshape(-1)
        if is_retimed := np.abs(times - np.arange(len(times)) / metadata.fps).max() >= TOLERANCE_S:
            done.num_retimed += 1
        videos: dict[str, Path] = {}
        for camera in keys_of(features, "video"):
            videos[camera] = folder / RECORDING / f"camera-{len(videos)}.mp4"
            done.num_encoded += _place_video(dataset, camera, videos[camera], encoding)
        converted = NewEpisode(
            columns=columns,
            frame_tasks=_frame_tasks(dataset, task),
            videos=videos,
            image_stats=stats.get(episode.index) or _image_stats(dataset, features),
            timestamps=None if is_retimed else times,
            tasks=episode.tasks or None,
        )
        dataset.close()
        writer.add_episode(converted)

    with atomic_folder(done.target, **replacing) as folder:
        writer = DatasetWriter(folder, new_info(metadata.fps, features, metadata.robot_type))
        writer.start()
        writer.add_tasks(text for _, text in sorted(metadata.tasks.items()))
        if SUBTASK_INDEX in features and (metadata.root / SUBTASKS).is_file():
            shutil.copyfile(metadata.root / SUBTASKS, folder / SUBTASKS)
        episodes = [(f"episode {episode.index}", episode.length, episode) for episode in kept]
        convert_each(episodes, convert, done.skipped, skip_broken, progress)
        writer.close()
    done.num_episodes, done.num_frames = writer.num_episodes, writer.num_frames
    return done


def replacing_options(overwrite: bool, sources: Sequence[Path]) -> dict[str, Any]:
    """Return the options with which `atomic_folder` decides what the target may replace."""
    return {"overwrite": not_a_written_set if overwrite else None, "inputs": sources}


def convert_each(
    episodes: Sequence[tuple[str, int, Item]],
    convert: Callable[[Item], None],
    skipped: dict[str, str],
    skip_broken: bool,
    progress: Progress = no_progress,
) -> None:
    """Convert episodes, given with their names and lengths. Raise ValueError if none can be.

    With `skip_broken`, an episode that cannot be converted is noted in `skipped`.
    """
    total, done, num_converted = sum(length for _, length, _ in episodes), 0, 0
    for name, length, episode in episodes:
        try:
            convert(episode)
            num_converted += 1
        except (ValueError, FileNotFoundError) as error:
            if not skip_broken:
                error.add_note(
                    f"in {name}; to leave such episodes out: --skip-broken (skip_broken=True)"
                )
                raise
            skipped[name] = str(error)
        done += length
        progress(done, total)
    if not num_converted:
        name, why = next(iter(skipped.items()))
        raise ValueError(f"no episode can be converted, the first: {name} ({why})")


def _target_features(
    metadata: Metadata, kept: Sequence[Episode], stored: frozenset[str]
) -> tuple[Features, tuple[str, ...]]:
    """Return the features that have data, bookkeeping last, and the names of the others."""
    features: Features = {}
    ignored, root = [], metadata.root
    for key, feature in metadata.features.items():
        if key in DERIVED:
            continue
        if key not in (metadata.cameras if feature.dtype == "video" else stored):
            ignored.append(key)
            continue
        declared = Feature(key, feature.dtype, feature.shape or (1,), feature.names)
        features[key] = LANGUAGE.get(key, declared)
        if feature.dtype != "video":
            continue
        if feature.video.get("video.is_depth_map"):
            raise ValueError(f"{root}: {key} is a depth video, which cannot be converted")
        info, _ = probe_video(root / kept[0].videos[key].path, metadata.fps)
        found = (info["video.height"], info["video.width"], 3)
        if sorted(feature.shape) != sorted(found):
            logger.warning(
                "%s: %s is declared as %s, its frames are %s; the new set declares these",
                *(root, key, list(feature.shape), list(found)),
            )
            features[key] = Feature(key, "video", found, IMAGE_NAMES)
    return features | DERIVED, tuple(ignored)


def _stored_image_stats(metadata: Metadata, features: Features) -> dict[int, EpisodeStats]:
    """Return the source's image statistics by episode; none unless every episode has good ones."""
    stored: dict[int, EpisodeStats] = {}
    for _, row in read_json_lines(metadata.root / "meta" / "episodes_stats.jsonl"):
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            found: Any = row
            stored[found["episode_index"]] = {
                key: _checked_image_stats(found["stats"][key])
                for key in keys_of(features, *CAMERA_DTYPES)
            }
    return stored if all(episode.index in stored for episode in metadata.episodes) else {}


def _checked_image_stats(stored: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a camera's statistics; raise an error if they are not numbers of the right shape."""
    stats = {}
    for name in CARRIED_STATS:
        value = np.array(stored[name], np.int64 if name == "count" else np.float64)
        shape = (1,) if name == "count" else (3, 1, 1)
        if value.shape != shape or not (np.isfinite(value) & (np.abs(value) < 1e15)).all():
            raise ValueError(f"{name} is {stored[name]!r}")
        stats[name] = value
    return stats


def _columns(dataset: LeRobotDataset, features: Features) -> dict[str, Any]:
    """Return the columns of the only episode, images as encoded, labels as they are."""
    [episode], root = dataset.episodes, dataset.metadata.root
    columns: dict[str, Any] = {
        key: _as_declared(dataset.column(key), feature, episode.data_path)
        for key, feature in features.items()
        if not feature.is_camera and not feature.is_language and key not in DERIVED
    }
    if keys := keys_of(features, "image", "language"):
        try:
            path = root / episode.data_path
            table = pq.read_table(path, columns=keys, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{root / episode.data_path} cannot be read: {error}") from None
        for key in keys:
            columns[key] = table[key].to_pylist()
            if features[key].is_camera:
                columns[key] = [image_bytes(cell, root) for cell in columns[key]]
    return columns


def _frame_tasks(dataset: LeRobotDataset, task: str | None) -> list[str]:
    [episode], tasks = dataset.episodes, dataset.metadata.tasks
    default = episode.tasks[0] if episode.tasks else task
    numbers = dataset.column("task_index").reshape(-1).tolist()
    texts = [text for number in numbers if (text := tasks.get(number, default)) is not None]
    if len(texts) < len(numbers):
        raise ValueError(
            f"episode {episode.index} names no task. Give one for such episodes: --task"
        )
    return texts


def _place_video(dataset: LeRobotDataset, camera: str, copy: Path, encoding: VideoEncoding) -> bool:
    """Link or copy the episode's video. Return whether it had to be encoded anew."""
    source = dataset.metadata.root / dataset.episodes[0].videos[camera].path
    info, times = probe_video(source, dataset.fps)
    expected = np.arange(len(dataset)) / dataset.fps
    fits = len(times) == len(expected) and np.abs(times - expected).max() < TOLERANCE_S
    if fits and info["video.codec"] in KEPT_CODECS:
        # Resolved: a link to a symbolic link would be a symbolic link.
        link_or_copy(source.resolve(), copy)
        return False
    encoding.check(camera, info["video.height"], info["video.width"])
    images = (dataset.frame(row, [camera])[camera] for row in range(len(dataset)))
    encode_video(images, copy, dataset.fps, encoding)
    return True


def _image_stats(dataset: LeRobotDataset, features: Features) -> EpisodeStats:
    stats = {}
    for key in keys_of(features, *CAMERA_DTYPES):
        images = (dataset.frame(row, [key])[key] for row in sampled_frames(len(dataset)))
        stats[key] = image_stats([frame_histogram(image) for image in images])
    return stats


def _as_declared(values: np.ndarray, feature: Feature, path: str) -> np.ndarray:
    """Return a column with the declared shape and dtype; raise ValueError if it does not fit."""
    if feature.dtype == "string":
        return values
    where = f"{path}: {feature.name}"
    try:
        dtype = np.dtype(feature.dtype)
    except TypeError as error:
        raise ValueError(f"{where} is declared as {feature}, not as numbers") from error
    size = np.prod(feature.shape)
    if values[0].size != size or not np.can_cast(values.dtype, dtype, "same_kind"):
        found = f"{values.dtype}{list(values.shape[1:])}"
        raise ValueError(f"{where} is {found}, declared {feature}")
    if len(bad := bad_rows(values)):
        raise ValueError(f"{where} is NaN or infinite in row {bad[0]}")
    return values.astype(dtype).reshape(len(values), *feature.shape)
