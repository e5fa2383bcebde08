"""Converting ALOHA's HDF5 episodes to a LeRobot v3.0 data set.

There is one file per episode:

    /action                     (T, a)
    /observations/qpos          (T, s)         -> observation.state
    /observations/qvel, effort  (T, s)         -> observation.velocity, .effort (optional)
    /observations/images/CAM    (T, h, w, 3) uint8, or (T, bytes) JPEG padded with zeros
                                               -> observation.images.CAM

Compressed images hold what `cv2.imencode` was given, so decoding gives RGB for the usual recorders;
raw images are used as they are.
"""

import importlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from piston.data.columns import decode_image
from piston.data.convert import Conversion, convert_each, replacing_options
from piston.data.format import CAMERA_DTYPES
from piston.data.record import Recorder
from piston.data.record.declare import FrameError
from piston.data.record.encoding import VideoEncoding
from piston.extras import needed_for
from piston.files import atomic_folder, check_new_folder
from piston.progress import Progress, no_progress
from piston.robots.aloha import NAMES

logger = logging.getLogger(__name__)

Entries = dict[str, dict[str, Any]]  # "features" of info.json

SUFFIXES = (".hdf5", ".h5")
STATES = {
    "observation.state": "observations/qpos",
    "observation.velocity": "observations/qvel",
    "observation.effort": "observations/effort",
    "action": "action",
}
REQUIRED = ("observation.state", "action")
CAMERA = "observation.images."


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
    if images not in CAMERA_DTYPES:
        raise ValueError(f'images must be "video" or "image", found {images!r}')
    files = episode_files(source)
    replacing = replacing_options(overwrite, files)
    check_new_folder(Path(target), **replacing)
    features: Entries = {}
    episodes: list[tuple[str, int, Path]] = []
    done = Conversion(Path(target))

    def look(path: Path) -> None:
        with _open_hdf5(path) as file:
            if not features:
                features.update(_hdf5_features(file, images))
            episodes.append((path.name, _hdf5_length(file, features), path))

    def convert(path: Path) -> None:
        sentence = task if isinstance(task, str) else task(path)
        try:
            with _open_hdf5(path) as file:
                for frame in _hdf5_frames(file, features, bgr):
                    recorder.add_frame(frame, sentence)
            recorder.save_episode()
        except FrameError as error:
            step = recorder.num_unsaved_frames
            raise ValueError(f"{path}, step {step}: {error}") from error
        finally:
            recorder.discard_episode()  # what was not saved because of an error

    # Every file is looked at before anything is written. The first episode decides the features.
    convert_each([(path.name, 0, path) for path in files], look, done.skipped, skip_broken)
    with (
        atomic_folder(done.target, **replacing) as folder,
        Recorder(folder, fps, features, "aloha", codec) as recorder,
    ):
        convert_each(episodes, convert, done.skipped, skip_broken, progress)
        done.num_episodes, done.num_frames = recorder.num_episodes, recorder.num_frames
    return done


def episode_files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files in the order of their numbers: episode_2 before episode_10."""
    if not isinstance(source, str | Path):
        files = [Path(path) for path in source]
    elif Path(source).is_dir():
        files = [path for path in Path(source).iterdir() if path.suffix in SUFFIXES]
        files.sort(key=lambda path: re.sub(r"\d+", lambda number: f"{number[0]:0>20}", path.stem))
    else:
        files = [Path(source)]
    if missing := [str(path) for path in files if not path.is_file()]:
        raise FileNotFoundError(f"these files do not exist: {', '.join(missing)}")
    if not files:
        raise FileNotFoundError(f"no .hdf5 files in {source}")
    return files


def _open_hdf5(path: Path) -> Any:
    with needed_for("An HDF5 file"):
        h5py = importlib.import_module("h5py")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} is not a readable HDF5 file: {error}") from error


def _hdf5_name(key: str) -> str:
    return STATES.get(key) or f"observations/images/{key.removeprefix(CAMERA)}"


def _hdf5_features(file: Any, images: str) -> Entries:
    """Return what the file holds, cameras first."""
    features: Entries = {}
    for camera in sorted(file.get("observations/images", ())):
        height, width, _ = _hdf5_image(file[_hdf5_name(CAMERA + camera)], 0).shape
        features[CAMERA + camera] = {"dtype": images, "shape": (height, width, 3)}
    for key, name in STATES.items():
        if name in file:
            size = file[name].shape[1]
            names = list(NAMES) if size == len(NAMES) else [f"motor_{i}" for i in range(size)]
            features[key] = {"dtype": "float32", "shape": (size,), "names": names}
        elif key in REQUIRED:
            raise ValueError(f"{file.filename} is not an ALOHA episode: it has no /{name}")
    used = {*STATES.values(), "observations", "compress_len"}
    if unused := [f"/{name}" for name in file if name not in used]:
        logger.warning("%s: not converted: %s", file.filename, ", ".join(unused))
    return features


def _hdf5_length(file: Any, features: Entries) -> int:
    """Return the number of steps. Raise ValueError if the file lacks something."""
    lengths = {}
    for key, entry in features.items():
        name = _hdf5_name(key)
        if name not in file:
            raise ValueError(f"{file.filename} has no /{name}, which the first episode has")
        lengths[name], *shape = file[name].shape
        if key in STATES and (shape := tuple(shape)) != entry["shape"]:
            raise ValueError(
                f"{file.filename}: /{name} has shape {shape}, the first episode {entry['shape']}"
            )
    if len(set(lengths.values())) != 1 or not lengths["action"]:
        raise ValueError(f"{file.filename}: lengths differ or are zero: {lengths}")
    return lengths["action"]


def _hdf5_frames(file: Any, features: Entries, bgr: bool) -> Iterator[dict[str, np.ndarray]]:
    try:
        states = {k: file[STATES[k]][:].astype(np.float32) for k in features if k in STATES}
        cameras = {key: file[_hdf5_name(key)] for key in features if key not in STATES}
        for step in range(len(states["action"])):
            frame = {key: values[step] for key, values in states.items()}
            for key, images in cameras.items():
                frame[key] = _hdf5_image(images, step)[:, :, :: -1 if bgr else 1]
            yield frame
    except OSError as error:  # damage is only found when the part is read
        raise ValueError(f"{file.filename} cannot be read: {error}") from error


def _hdf5_image(images: Any, step: int) -> UInt8[np.ndarray, "h w 3"]:
    if images.ndim == 4:
        return np.asarray(images[step])
    where = f"{images.file.filename}: {images.name}, step {step}"
    if images.ndim not in (1, 2):
        raise ValueError(
            f"{where}: shape {images.shape} is neither raw (T, h, w, 3) nor JPEG (T, bytes)"
        )
    try:
        # JPEG ends with its own marker; the zeros that fill the row come after it.
        return decode_image(np.asarray(images[step], np.uint8).tobytes(), Path())
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
