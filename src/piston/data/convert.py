"""Converting LeRobot v2.0 and v2.1 data sets and ALOHA's HDF5 episodes to v3.0.

LeRobot v2.x: videos are linked or copied unchanged, unless the codec is unusual or the frames do
not fit the rows in number or time: then they are encoded anew. Statistics of columns are computed,
with quantiles. Those of images are taken from the source if it has them for every episode, because
computing them means decoding; they have no quantiles then.

ALOHA, one file per episode:

    /action                     (T, a)
    /observations/qpos          (T, s)         -> observation.state
    /observations/qvel, effort  (T, s)         -> observation.velocity, .effort (optional)
    /observations/images/CAM    (T, h, w, 3) uint8, or (T, bytes) JPEG padded with zeros
                                               -> observation.images.CAM

Compressed images hold what `cv2.imencode` was given, so decoding gives RGB for the usual recorders;
raw images are used as they are.
"""

import contextlib
import dataclasses
import importlib
import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from piston.data.check import Findings, inspect_files, left_out
from piston.data.columns import Columns, decode_image, image_bytes
from piston.data.encoding import VideoEncoding, encode_video, probe_video
from piston.data.features import (
    BOOKKEEPING,
    IMAGE_DTYPES,
    IMAGE_NAMES,
    EpisodeStats,
    Features,
    FeatureStats,
    FrameError,
    frame_histogram,
    image_stats,
    keys_of,
    sampled_frames,
)
from piston.data.format import Episode, Metadata
from piston.data.recorder import Recorder
from piston.data.video import TOLERANCE_S, VideoReader
from piston.data.writer import RECORDING, DatasetWriter, NewEpisode, new_info
from piston.files import atomic_folder, link_or_copy, read_json_lines
from piston.progress import Progress, no_progress

logger = logging.getLogger(__name__)

# Codecs that every reader of LeRobot sets can decode.
KEPT_CODECS = ("av1", "h264", "hevc", "mpeg4", "vp9")
CARRIED_STATS = ("min", "max", "mean", "std", "count")

SUFFIXES = (".hdf5", ".h5")
STATES = {
    "observation.state": "observations/qpos",
    "observation.velocity": "observations/qvel",
    "observation.effort": "observations/effort",
    "action": "action",
}
REQUIRED = ("observation.state", "action")
CAMERA = "observation.images."
_ARM = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
# Both arms, left first, as ALOHA's recorder concatenates them.
JOINTS = [f"{side}_{joint}" for side in ("left", "right") for joint in _ARM]


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
    _check_target(target, [metadata.root])
    findings = inspect_files(metadata, metadata.episodes)
    broken = left_out(findings.problems, metadata.cameras)
    skipped = {f"episode {index}": broken[index].what for index in sorted(broken)}
    if skipped and not skip_broken:
        raise ValueError(
            f"{source}: {len(broken)} episodes cannot be converted, {_first(skipped)}. "
            f"Run: piston data check {source}. To leave them out: --skip-broken (skip_broken=True)"
        )
    kept = [episode for episode in metadata.episodes if episode.index not in broken]
    if not kept:
        raise ValueError(f"{source}: no episode can be read, {_first(skipped)}")
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
        encoding = VideoEncoding.choose(codec)
        reader = _SourceReader(metadata, findings, features, folder, stats, encoding, task)
        total, done = sum(episode.length for episode in kept), 0
        for episode in kept:
            converted = None
            with _left_out(f"episode {episode.index}", skipped, skip_broken):
                converted = reader.read(episode)
            if converted is not None:
                writer.add_episode(converted)
            done += episode.length
            progress(done, total)
        if not writer.num_episodes:
            raise ValueError(f"{source}: no episode can be read, {_first(skipped)}")
        writer.close()
    if reader.num_retimed:
        logger.warning(
            "%s: the time stamps of %d episodes were not frame / fps; they are in the new set",
            *(source, reader.num_retimed),
        )
    counts = (writer.num_episodes, writer.num_frames)
    changes = (reader.num_encoded, reader.num_retimed)
    return Conversion(Path(target), *counts, skipped, ignored, *changes)


def _check_target(target: str | Path, sources: Iterable[Path]) -> None:
    """Raise ValueError if replacing `target` would delete a source."""
    folder = Path(target).resolve()
    if any(source.resolve().is_relative_to(folder) for source in sources):
        raise ValueError(f"{target} holds the source files: choose another folder")


@contextlib.contextmanager
def _left_out(name: str, skipped: dict[str, str], skip_broken: bool) -> Iterator[None]:
    """With `skip_broken`, note what is wrong with an episode in `skipped` and continue."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        if not skip_broken:
            error.add_note(
                f"in {name}; to leave such episodes out: --skip-broken (skip_broken=True)"
            )
            raise
        logger.warning("%s is left out: %s", name, error)
        skipped[name] = str(error)


def _first(skipped: Mapping[str, str]) -> str:
    name, why = next(iter(skipped.items()))
    return f"the first: {name} ({why})"


def _target_features(
    metadata: Metadata, kept: Sequence[Episode], stored: frozenset[str]
) -> tuple[Features, tuple[str, ...]]:
    """Return the features that have data, bookkeeping last, and the names of the others."""
    features: Features = {}
    ignored = []
    for key, entry in metadata.info["features"].items():
        if key in BOOKKEEPING:
            continue
        dtype, shape = entry["dtype"], [int(size) for size in entry.get("shape") or [1]]
        if key not in (metadata.cameras if dtype == "video" else stored):
            ignored.append(key)
            logger.warning("%s: feature %r is declared but has no data", metadata.root, key)
            continue
        features[key] = {"dtype": dtype, "shape": shape, "names": entry.get("names")}
        if dtype != "video":
            continue
        if metadata.features[key].video.get("video.is_depth_map"):
            raise ValueError(f"{metadata.root}: {key} is a depth video, which cannot be converted")
        path = next(episode.videos[key].path for episode in kept if key in episode.videos)
        info, _ = probe_video(metadata.root / path, metadata.fps)
        found = [info["video.height"], info["video.width"], 3]
        if sorted(shape) != sorted(found):
            logger.warning(
                "%s: %s is declared as %s, its frames are %s; the new set declares these",
                *(metadata.root, key, shape, found),
            )
            features[key] |= {"shape": found, "names": IMAGE_NAMES}
    return features | {key: dict(entry) for key, entry in BOOKKEEPING.items()}, tuple(ignored)


def _stored_image_stats(metadata: Metadata, features: Features) -> dict[int, EpisodeStats]:
    """Return the source's image statistics by episode; none unless every episode has them."""
    stored: dict[int, EpisodeStats] = {}
    for _, row in read_json_lines(metadata.root / "meta" / "episodes_stats.jsonl"):
        found = (row or {}).get("stats") or {}
        with contextlib.suppress(KeyError):
            stored[(row or {})["episode_index"]] = {
                key: {name: np.array(found[key][name]) for name in CARRIED_STATS}
                for key in keys_of(features, *IMAGE_DTYPES)
            }
    complete = all(episode.index in stored for episode in metadata.episodes)
    return stored if complete else {}


@dataclasses.dataclass
class _SourceReader:
    """Reads episodes of a v2.x set for the writer; counts what could not be kept as it was."""

    metadata: Metadata
    findings: Findings
    features: Features
    folder: Path
    stats: Mapping[int, EpisodeStats]
    encoding: VideoEncoding
    task: str | None
    num_encoded: int = 0
    num_retimed: int = 0

    def read(self, episode: Episode) -> NewEpisode:
        rows = self.findings.data.rows[episode.index]
        columns = self._columns(episode, rows)
        times = rows["timestamp"].reshape(-1) if "timestamp" in rows else None
        steps = np.arange(episode.length) / self.metadata.fps
        if times is not None and np.abs(times - steps).max() >= TOLERANCE_S:
            times = None  # as those of the video frames
            self.num_retimed += 1
        cameras = keys_of(self.features, "video")
        return NewEpisode(
            columns=columns,
            frame_tasks=self._frame_tasks(episode, rows),
            videos={camera: self._video(episode, camera) for camera in cameras},
            image_stats=self.stats.get(episode.index) or self._image_stats(episode, columns),
            timestamps=times,
            tasks=episode.tasks or None,
        )

    def _columns(self, episode: Episode, rows: Columns) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for key, entry in self.features.items():
            if entry["dtype"] not in IMAGE_DTYPES and key not in BOOKKEEPING:
                columns[key] = _as_declared(rows[key], entry, f"{episode.data_path}: {key}")
        if keys := keys_of(self.features, "image"):
            path = self.metadata.root / episode.data_path
            try:
                table = pq.read_table(path, columns=keys)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            for key in keys:
                cells = table[key].to_pylist()
                columns[key] = [image_bytes(cell, self.metadata.root) for cell in cells]
        return columns

    def _frame_tasks(self, episode: Episode, rows: Columns) -> list[str]:
        default = episode.tasks[0] if episode.tasks else self.task
        texts = [default] * episode.length
        if "task_index" in rows and self.metadata.tasks:
            numbers = rows["task_index"].reshape(-1).tolist()
            texts = [self.metadata.tasks.get(number, default) for number in numbers]
        found = [text for text in texts if text is not None]
        if len(found) < len(texts):
            raise ValueError(
                f"episode {episode.index} names no task. Give one for such episodes: --task"
            )
        return found

    def _video(self, episode: Episode, camera: str) -> Path:
        """Put the episode's video into the .recording folder, encoded anew if necessary."""
        source, fps = self.metadata.root / episode.videos[camera].path, self.metadata.fps
        copy = self.folder / RECORDING / f"{camera}.mp4"
        info, times = probe_video(source, fps)
        expected = np.arange(episode.length) / fps
        fits = len(times) == len(expected) and np.abs(times - expected).max() < TOLERANCE_S
        if fits and info["video.codec"] in KEPT_CODECS:
            # Resolved: a link to a symbolic link would be a symbolic link.
            link_or_copy(source.resolve(), copy)
            return copy
        self.encoding.check(camera, info["video.height"], info["video.width"])
        with contextlib.closing(VideoReader(source)) as reader:
            images = (reader.frames_at([time])[0] for time in expected)
            encode_video(images, copy, fps, self.encoding)
        self.num_encoded += 1
        return copy

    def _image_stats(self, episode: Episode, columns: Mapping[str, Any]) -> dict[str, FeatureStats]:
        sample, root = sampled_frames(episode.length), self.metadata.root
        stats = {}
        for camera in keys_of(self.features, "video"):
            with contextlib.closing(VideoReader(root / episode.videos[camera].path)) as reader:
                images = (reader.frames_at([i / self.metadata.fps])[0] for i in sample)
                stats[camera] = image_stats([frame_histogram(image) for image in images])
        for key in keys_of(self.features, "image"):
            images = (decode_image(columns[key][i], root) for i in sample)
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


def convert_aloha_hdf5(
    source: str | Path | Sequence[str | Path],
    target: str | Path,
    task: str | Callable[[Path], str],
    fps: float = 50,
    progress: Progress = no_progress,
    *,
    overwrite: bool = False,
    skip_broken: bool = False,
    bgr: bool = False,
    images: str = "video",
    codec: str | VideoEncoding | None = None,
) -> Conversion:
    """Write the episodes in a folder (or the given files) to `target`; it appears once complete.

    `task` is the sentence for all episodes, or a function that returns it for a file. `bgr` says
    that images hold blue first. `images` is "video", or "image" for lossless PNG.
    """
    if images not in IMAGE_DTYPES:
        raise ValueError(f'images must be "video" or "image", found {images!r}')
    files = episode_files(source)
    _check_target(target, files)
    # Every file is looked at before anything is written. The first episode decides the features.
    features: Features = {}
    lengths: dict[Path, int] = {}
    skipped: dict[str, str] = {}
    for path in files:
        with _left_out(path.name, skipped, skip_broken), _open_hdf5(path) as file:
            features = features or _hdf5_features(file, images)
            lengths[path] = _hdf5_length(file, features)
    if not lengths:
        raise ValueError(f"none of the {len(files)} files can be converted")
    done = 0
    with (
        atomic_folder(Path(target), overwrite=overwrite) as folder,
        Recorder(folder, fps, features, "aloha", codec) as recorder,
    ):
        for path, length in lengths.items():
            sentence = task if isinstance(task, str) else task(path)
            with _left_out(path.name, skipped, skip_broken):
                _record(recorder, path, features, bgr, sentence)
            if recorder.num_unsaved_frames == length:
                recorder.save_episode()
            else:
                recorder.discard_episode()
            done += length
            progress(done, sum(lengths.values()))
        if not recorder.num_episodes:
            raise ValueError(f"none of the {len(files)} files can be converted")
        return Conversion(Path(target), recorder.num_episodes, recorder.num_frames, skipped)


def episode_files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files in the order of their numbers: episode_2 before episode_10."""

    def by_number(path: Path) -> list[Any]:
        parts = re.split(r"(\d+)", path.stem)
        return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]

    if not isinstance(source, str | Path):
        files = [Path(path) for path in source]
    elif Path(source).is_dir():
        files = [path for path in Path(source).iterdir() if path.suffix in SUFFIXES]
        files.sort(key=by_number)
    else:
        files = [Path(source)]
    if missing := [str(path) for path in files if not path.is_file()]:
        raise FileNotFoundError(f"these files do not exist: {', '.join(missing)}")
    if not files:
        raise FileNotFoundError(f"no .hdf5 files in {source}")
    return files


def _open_hdf5(path: Path) -> Any:
    try:
        h5py = importlib.import_module("h5py")  # an extra that only this function needs
    except ImportError as error:
        raise ImportError("HDF5 files need h5py. Install it: pip install 'piston[hdf5]'") from error
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} is not a readable HDF5 file: {error}") from error


def _hdf5_name(key: str) -> str:
    return STATES.get(key) or f"observations/images/{key.removeprefix(CAMERA)}"


def _hdf5_features(file: Any, images: str) -> Features:
    """Return what the file holds, cameras first."""
    features: Features = {}
    for camera in sorted(file.get("observations/images", ())):
        height, width, _ = _hdf5_image(file[_hdf5_name(CAMERA + camera)], 0).shape
        features[CAMERA + camera] = {"dtype": images, "shape": (height, width, 3)}
    for key, name in STATES.items():
        if name in file:
            size = file[name].shape[1]
            names = JOINTS if size == len(JOINTS) else [f"motor_{i}" for i in range(size)]
            features[key] = {"dtype": "float32", "shape": (size,), "names": names}
        elif key in REQUIRED:
            raise ValueError(f"{file.filename} is not an ALOHA episode: it has no /{name}")
    used = {*STATES.values(), "observations", "compress_len"}
    if unused := [f"/{name}" for name in file if name not in used]:
        logger.warning("%s: not converted: %s", file.filename, ", ".join(unused))
    return features


def _hdf5_length(file: Any, features: Features) -> int:
    """Return the number of steps. Raise ValueError if the file lacks something."""
    found = {}
    for key, entry in features.items():
        name = _hdf5_name(key)
        if name not in file:
            raise ValueError(f"{file.filename} has no /{name}, which the first episode has")
        found[name] = len(file[name])
        shape = file[name].shape[1:]
        if key in STATES and shape != entry["shape"]:
            raise ValueError(
                f"{file.filename}: /{name} has shape {shape}, the first episode {entry['shape']}"
            )
    if len(set(found.values())) != 1 or not found["action"]:
        raise ValueError(f"{file.filename}: lengths differ or are zero: {found}")
    return found["action"]


def _record(recorder: Recorder, path: Path, features: Features, bgr: bool, sentence: str) -> None:
    try:
        with _open_hdf5(path) as file:
            states = {k: file[STATES[k]][:].astype(np.float32) for k in features if k in STATES}
            cameras = {key: file[_hdf5_name(key)] for key in features if key not in STATES}
            for step in range(len(states["action"])):
                frame = {key: values[step] for key, values in states.items()}
                for key, images in cameras.items():
                    frame[key] = _hdf5_image(images, step)[:, :, :: -1 if bgr else 1]
                try:
                    recorder.add_frame(frame, sentence)
                except FrameError as error:
                    raise ValueError(f"{path}, step {step}: {error}") from error
    except OSError as error:  # damage is only found when the part is read
        raise ValueError(f"{path} cannot be read: {error}") from error


def _hdf5_image(images: Any, step: int) -> UInt8[np.ndarray, "h w 3"]:
    where = f"{images.file.filename}: {images.name}, step {step}"
    if images.ndim == 4:
        return np.asarray(images[step])
    if images.ndim not in (1, 2):
        raise ValueError(
            f"{where}: shape {images.shape} is neither raw (T, h, w, 3) nor JPEG (T, bytes)"
        )
    data = np.asarray(images[step], dtype=np.uint8).tobytes()
    try:
        # JPEG ends with its own marker; the zeros that fill the row come after it.
        with Image.open(io.BytesIO(data)) as image:
            return np.array(image.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{where}: the compressed image cannot be decoded") from error
