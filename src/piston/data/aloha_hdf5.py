"""Converting ALOHA's HDF5 episodes to a LeRobot v3.0 data set.

    /action                     (T, a)
    /observations/qpos          (T, s)         -> observation.state
    /observations/qvel, effort  (T, s)         -> observation.velocity, .effort (optional)
    /observations/images/CAM    (T, h, w, 3) uint8, or (T, bytes) JPEG padded with zeros
                                               -> observation.images.CAM

Compressed images hold what `cv2.imencode` was given, so decoding gives RGB for the usual recorders;
raw images are used as they are.
"""

import importlib
import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from piston.data.convert import Conversion, check_target
from piston.data.encoding import VideoEncoding
from piston.data.features import FrameError
from piston.data.recorder import Recorder
from piston.files import atomic_folder
from piston.progress import Progress, no_progress

logger = logging.getLogger(__name__)

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

Features = dict[str, dict[str, Any]]


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
    if images not in ("video", "image"):
        raise ValueError(f'images must be "video" or "image", found {images!r}')
    files = episode_files(source)
    check_target(target, files)
    features, lengths, broken = _check_files(files, images, skip_broken)
    done = 0
    with (
        atomic_folder(Path(target), overwrite=overwrite) as folder,
        Recorder(folder, fps, features, "aloha", codec) as recorder,
    ):
        for path, length in lengths.items():
            sentence = task if isinstance(task, str) else task(path)
            try:
                _record(recorder, path, features, bgr, sentence)
            except ValueError as error:
                recorder.discard_episode()
                _skip(path, error, broken, skip_broken)
            else:
                recorder.save_episode()
            done += length
            progress(done, sum(lengths.values()))
        if len(broken) == len(files):
            raise ValueError(f"none of the {len(files)} files can be converted")
        num_episodes, num_frames = recorder.num_episodes, recorder.num_frames
    skipped = {path.name: why for path, why in broken.items()}
    return Conversion(Path(target), num_episodes, num_frames, skipped)


def episode_files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files in the order of their numbers: episode_2 before episode_10."""
    if not isinstance(source, str | Path):
        files = [Path(path) for path in source]
    elif Path(source).is_dir():
        files = [path for path in Path(source).iterdir() if path.suffix in SUFFIXES]
        files.sort(key=_by_number)
    else:
        files = [Path(source)]
    if missing := [str(path) for path in files if not path.is_file()]:
        raise FileNotFoundError(f"these files do not exist: {', '.join(missing)}")
    if not files:
        raise FileNotFoundError(f"no .hdf5 files in {source}")
    return files


def _by_number(path: Path) -> list[Any]:
    parts = re.split(r"(\d+)", path.stem)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _skip(path: Path, error: ValueError, broken: dict[Path, str], skip_broken: bool) -> None:
    if not skip_broken:
        raise error
    logger.warning("left out: %s", error)
    broken[path] = str(error)


def _open(path: Path) -> Any:
    try:
        h5py = importlib.import_module("h5py")  # an extra that only this module needs
    except ImportError as error:
        raise ImportError("HDF5 files need h5py. Install it: pip install 'piston[hdf5]'") from error
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} is not a readable HDF5 file: {error}") from error


def _check_files(
    files: Sequence[Path], images: str, skip_broken: bool
) -> tuple[Features, dict[Path, int], dict[Path, str]]:
    """Look at every file before anything is written.

    Return the features of the first episode, the lengths of all that have them, and what is wrong
    with the others.
    """
    features: Features = {}
    lengths: dict[Path, int] = {}
    broken: dict[Path, str] = {}
    for path in files:
        try:
            with _open(path) as file:
                features = features or _features(file, images)
                lengths[path] = _length(file, features)
        except ValueError as error:
            _skip(path, error, broken, skip_broken)
    if not lengths:
        raise ValueError(f"none of the {len(files)} files can be converted")
    return features, lengths, broken


def _features(file: Any, images: str) -> Features:
    """Return what the file holds, cameras first."""
    features: Features = {}
    for camera in sorted(file.get("observations/images", ())):
        height, width, _ = _image(file[_name(CAMERA + camera)], 0).shape
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


def _name(key: str) -> str:
    """Return the name of a feature in the file."""
    return STATES.get(key) or f"observations/images/{key.removeprefix(CAMERA)}"


def _length(file: Any, features: Features) -> int:
    found = {}
    for key, entry in features.items():
        name = _name(key)
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
        with _open(path) as file:
            for step, frame in enumerate(_frames(file, features, bgr)):
                try:
                    recorder.add_frame(frame, sentence)
                except FrameError as error:
                    raise ValueError(f"{path}, step {step}: {error}") from error
    except OSError as error:  # damage is only found when the part is read
        raise ValueError(f"{path} cannot be read: {error}") from error


def _frames(file: Any, features: Features, bgr: bool) -> Iterator[dict[str, np.ndarray]]:
    states = {key: file[STATES[key]][:].astype(np.float32) for key in features if key in STATES}
    cameras = {key: file[_name(key)] for key in features if key not in STATES}
    for step in range(len(states["action"])):
        frame = {key: values[step] for key, values in states.items()}
        for key, images in cameras.items():
            image = _image(images, step)
            frame[key] = image[:, :, ::-1] if bgr else image
        yield frame


def _image(images: Any, step: int) -> UInt8[np.ndarray, "h w 3"]:
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
