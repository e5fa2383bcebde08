"""ALOHA's HDF5 episodes become a LeRobot v3.0 data set.

    /action                     (T, a)
    /observations/qpos          (T, s)         -> observation.state
    /observations/qvel, effort  (T, s)         -> observation.velocity, observation.effort, if there
    /observations/images/CAM    (T, h, w, 3) uint8, or (T, bytes) JPEG padded with zeros
                                               -> observation.images.CAM

Knows these files; the recorder does the writing. Compressed images hold what `cv2.imencode` was
given, so decoding gives RGB for the usual recorders; raw images are taken as they are.
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

from piston.data.convert import Conversion, Progress, writing_target
from piston.data.features import FrameError
from piston.data.recorder import Recorder
from piston.data.video_encoding import VideoEncoding

logger = logging.getLogger(__name__)

STATES = {
    "observation.state": "observations/qpos",
    "observation.velocity": "observations/qvel",
    "observation.effort": "observations/effort",
    "action": "action",
}
REQUIRED = ("observation.state", "action")
IMAGES = "observations/images"
_ARM = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
# Both arms, left first, as ALOHA's recorder concatenates them.
JOINTS = [f"{side}_{joint}" for side in ("left", "right") for joint in _ARM]


def convert_aloha_hdf5(
    source: str | Path | Sequence[str | Path],
    target: str | Path,
    task: str | Callable[[Path], str],
    fps: float = 50,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    skip_broken: bool = False,
    bgr: bool = False,
    images: str = "video",
    codec: str | VideoEncoding | None = None,
    robot_type: str = "aloha",
) -> Conversion:
    """Writes the episodes in a folder (or the files given) to `target`; it appears once complete.

    `task` is the sentence for all episodes, or a function that gives it for a file. `bgr` says
    that the files hold blue first. `images` is "video", or "image" for PNG without any loss.
    """
    if images not in ("video", "image"):
        raise ValueError(f'images must be "video" or "image", found {images!r}')
    files = episode_files(source)
    features = _first_features(files, images, skip_broken)
    broken, lengths = _check_files(files, features, skip_broken)
    kept = [path for path in files if path not in broken]
    total, done = sum(lengths[path] for path in kept), 0
    sources = {path.parent.resolve() for path in files}
    if Path(target).resolve() in sources:
        raise ValueError(f"{target} holds the source files: choose another folder")
    with (
        writing_target(target, overwrite) as folder,
        Recorder(folder, fps, features, robot_type, codec=codec) as recorder,
    ):
        for path in kept:
            sentence = task if isinstance(task, str) else task(path)
            try:
                _record(recorder, path, features, bgr, sentence)
            except ValueError as error:
                recorder.discard_episode()
                if not skip_broken:
                    raise
                logger.warning("left out: %s", error)
                broken[path] = str(error)
            else:
                recorder.save_episode()
            done += lengths[path]
            if progress is not None:
                progress(done, total)
        if len(broken) == len(files):
            raise ValueError(f"none of the {len(files)} files can be converted")
        num_episodes, num_frames = recorder.num_episodes, recorder.num_frames
    skipped = {path.name: why for path, why in broken.items()}
    return Conversion(Path(target), num_episodes, num_frames, skipped)


def _record(
    recorder: Recorder, path: Path, features: dict[str, Any], bgr: bool, sentence: str
) -> None:
    for step, frame in enumerate(_frames(path, features, bgr)):
        try:
            recorder.add_frame(frame, sentence)
        except FrameError as error:
            raise ValueError(f"{path}, step {step}: {error}") from error


def episode_files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files in the order of their numbers: episode_2 before episode_10."""
    if not isinstance(source, str | Path):
        files = [Path(path) for path in source]
    elif Path(source).is_dir():
        files = [p for p in Path(source).iterdir() if p.suffix in (".hdf5", ".h5")]
        files.sort(key=_by_number)
    else:
        files = [Path(source)]
    missing = [str(path) for path in files if not path.is_file()]
    if missing or not files:
        raise FileNotFoundError(
            f"not there: {', '.join(missing)}" if missing else f"no .hdf5 files in {source}"
        )
    return files


def _by_number(path: Path) -> list[Any]:
    parts = re.split(r"(\d+)", path.stem)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _open(path: Path) -> Any:
    try:
        h5py = importlib.import_module("h5py")  # only needed here: an extra
    except ImportError as error:
        raise ImportError("HDF5 files need h5py. Install it: pip install 'piston[hdf5]'") from error
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} is not a readable HDF5 file: {error}") from error


def _first_features(files: Sequence[Path], images: str, skip_broken: bool) -> dict[str, Any]:
    """Of the first file; of the first that can be read where others are skipped."""
    for path in files:
        try:
            with _open(path) as file:
                return _features(file, images)
        except ValueError:
            if not skip_broken:
                raise
    raise ValueError(f"none of the {len(files)} files can be converted")


def _features(file: Any, images: str) -> dict[str, dict[str, Any]]:
    """What the file holds, cameras first."""
    features: dict[str, dict[str, Any]] = {}
    for camera in sorted(file.get(IMAGES, ())):
        height, width, _ = _image(file[IMAGES][camera], 0).shape
        key = f"observation.images.{camera}"
        features[key] = {"dtype": images, "shape": (height, width, 3)}
    for key, name in STATES.items():
        if name in file:
            size = file[name].shape[1]
            names = JOINTS if size == len(JOINTS) else [f"motor_{i}" for i in range(size)]
            features[key] = {"dtype": "float32", "shape": (size,), "names": names}
        elif key in REQUIRED:
            raise ValueError(f"{file.filename} is no ALOHA episode: it has no /{name}")
    used = {*STATES.values(), "observations", "compress_len"}
    unused = [f"/{name}" for name in file if name not in used]
    if unused:
        logger.warning("%s: not converted: %s", file.filename, ", ".join(unused))
    return features


def _check_files(
    files: Sequence[Path], features: dict[str, Any], skip_broken: bool
) -> tuple[dict[Path, str], dict[Path, int]]:
    """Looks at every file before anything is written: what is wrong, how long the others are."""
    broken: dict[Path, str] = {}
    lengths: dict[Path, int] = {}
    for path in files:
        try:
            with _open(path) as file:
                lengths[path] = _length(file, features)
        except ValueError as error:
            if not skip_broken:
                raise
            logger.warning("left out: %s", error)
            broken[path] = str(error)
    if len(broken) == len(files):
        raise ValueError(f"none of the {len(files)} files can be converted")
    return broken, lengths


def _length(file: Any, features: dict[str, Any]) -> int:
    found = {}
    for key, entry in features.items():
        name = STATES.get(key, f"{IMAGES}/{key.removeprefix('observation.images.')}")
        if name not in file:
            raise ValueError(f"{file.filename} has no /{name}, which the first episode has")
        found[name] = len(file[name])
        if key in STATES and file[name].shape[1:] != entry["shape"]:
            shape = file[name].shape[1:]
            raise ValueError(
                f"{file.filename}: /{name} has shape {shape}, the first episode {entry['shape']}"
            )
    if len(set(found.values())) != 1 or not found["action"]:
        raise ValueError(f"{file.filename}: lengths differ or are zero: {found}")
    return found["action"]


def _frames(path: Path, features: dict[str, Any], bgr: bool) -> Iterator[dict[str, np.ndarray]]:
    try:
        with _open(path) as file:
            yield from _steps(file, features, bgr)
    except OSError as error:  # a damaged part is only met when it is read
        raise ValueError(f"{path} cannot be read: {error}") from error


def _steps(file: Any, features: dict[str, Any], bgr: bool) -> Iterator[dict[str, np.ndarray]]:
    states = {key: file[STATES[key]][:].astype(np.float32) for key in features if key in STATES}
    cameras = {
        key: file[IMAGES][key.removeprefix("observation.images.")]
        for key in features
        if key not in STATES
    }
    for step in range(len(states["action"])):
        frame = {key: values[step] for key, values in states.items()}
        for key, pictures in cameras.items():
            picture = _image(pictures, step)
            frame[key] = picture[:, :, ::-1] if bgr else picture
        yield frame


def _image(pictures: Any, step: int) -> UInt8[np.ndarray, "h w 3"]:
    where = f"{pictures.file.filename}: {pictures.name}, step {step}"
    if pictures.ndim == 4:
        return np.asarray(pictures[step])
    if pictures.ndim not in (1, 2):
        raise ValueError(
            f"{where}: shape {pictures.shape} is neither raw (T, h, w, 3) nor JPEG (T, bytes)"
        )
    data = np.asarray(pictures[step], dtype=np.uint8).tobytes()
    try:
        # JPEG ends with its own marker; the zeros that fill up the row come after it.
        with Image.open(io.BytesIO(data)) as picture:
            return np.array(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{where}: the compressed image cannot be decoded") from error
