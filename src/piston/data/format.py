"""The LeRobot folder format, v2.0 to v3.0: its features and its file names.

    v2.x  one data file per episode and one video per episode and camera;
          meta/episodes.jsonl and meta/tasks.jsonl list the episodes and the tasks
    v3.0  files are shared by several episodes;
          meta/episodes/*/*.parquet says where each episode begins, meta/tasks.parquet has the tasks

The lists of episodes and tasks are left to `metadata`, the content of the data files and videos to
`columns` and `video`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
import os
import re
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from piston.data import protocol
from piston.files import read_json

Row = dict[str, Any]  # of the table of episodes or of tasks

_PATHS_V2 = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
_PATHS_V3 = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
# The templates of versions that can be read, where info.json has none.
PATHS = {"v2.0": _PATHS_V2, "v2.1": _PATHS_V2, "v3.0": _PATHS_V3}
PLACE = ("chunk_index", "file_index")  # of a file of v3.0
INFO = Path("meta/info.json")
CAMERA_DTYPES = ("video", "image")  # in files of their own, or as images in the rows
MARK = Path("meta/piston.json")  # only in sets that Piston has begun
# The folders of a set that Piston writes, with the endings of their files.
_SET_FILES = {
    "meta": (".json", ".jsonl", ".parquet"),
    "data": (".parquet",),
    "videos": (".mp4",),
    ".recording": (".json", ".mp4", ""),
}
_FORMAT = re.compile(r"(0?\d{1,2})?d?")  # of a field in a path template


@dataclasses.dataclass(frozen=True)
class VideoSpan:
    """Where an episode's frames are: a file, the time of the first one, and the declared end.

    How many frames belong to the episode is the number of its rows: some writers declare the time
    of the last frame as the end (v3.0), others none.
    """

    path: str  # relative to the root
    start: float  # in seconds, as is `stop`
    stop: float | None = None


@dataclasses.dataclass(frozen=True)
class Episode(protocol.Episode):
    """`start` is its first row in the numbering of the whole set; `videos` has existing files."""

    start: int = 0
    data_path: str = ""
    videos: Mapping[str, VideoSpan] = dataclasses.field(default_factory=dict)

    def file_of(self, camera: str) -> str:
        """Return the path of the file that has a camera's frames: a video or the data file."""
        return self.videos[camera].path if camera in self.videos else self.data_path


@dataclasses.dataclass(frozen=True)
class Feature:
    """A declared feature.

    `dtype` is "video", "image", "string", "language" or the name of a NumPy type.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: Any = None
    video: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # codec, fps as declared

    @classmethod
    def parse(cls, name: str, declared: Any) -> Feature:
        """Take an entry of info.json. Raise ValueError if it has no dtype or shape."""
        if not isinstance(declared, Mapping) or "dtype" not in declared:
            raise ValueError(
                f"feature {name!r} has no dtype: it is {declared!r}; expected its dtype and shape."
            )
        shape = declared.get("shape") or ()
        if not isinstance(shape, list | tuple) or not all(
            isinstance(size, numbers.Real) and size % 1 == 0 for size in shape
        ):
            raise ValueError(f"feature {name!r} has the shape {shape!r}; expected integers.")
        video = declared.get("info") or declared.get("video_info")
        return cls(
            name=name,
            dtype=str(declared["dtype"]),
            shape=tuple(int(size) for size in shape),
            names=declared.get("names"),
            video=video if isinstance(video, dict) else {},
        )

    @property
    def is_camera(self) -> bool:
        return self.dtype in CAMERA_DTYPES

    @property
    def is_language(self) -> bool:
        """Whether it is a column of labels, which only `language` reads."""
        return self.dtype == "language" or self.name in LANGUAGE

    def __str__(self) -> str:
        """Return what decides which values fit, such as float32[14]."""
        return f"{self.dtype}{list(self.shape)}"


# Columns that writers fill in and readers can compute from the list of episodes.
DERIVED = {
    key: Feature(key, "float32" if key == "timestamp" else "int64", (1,))
    for key in ("timestamp", "frame_index", "episode_index", "index", "task_index")
}

# The columns of labels; `language` says what they hold.
PERSISTENT, EVENTS = "language_persistent", "language_events"
LANGUAGE = {key: Feature(key, "language", (1,)) for key in (PERSISTENT, EVENTS)}
SUBTASK_INDEX, SUBTASKS = "subtask_index", Path("meta/subtasks.parquet")  # the older form


def keys_of(features: Mapping[str, Feature], *dtypes: str) -> list[str]:
    """Return the names of the features of these types."""
    return [key for key, feature in features.items() if feature.dtype in dtypes]


def dimension_names(features: Iterable[Feature], dim: int, otherwise: str) -> list[str]:
    """Return the declared names of the features' dimensions, if there are `dim` of them.

    Else they are numbered: `otherwise[0]`, `otherwise[1]` … If a name occurs twice, as that of a
    joint of two arms, all get their number: `elbow[0]`, `elbow[1]`.
    """
    names = [name for feature in features for name in _flat(feature.names)]
    if len(names) == len(set(names)) == dim:
        return names
    return [f"{names[i] if len(names) == dim else otherwise}[{i}]" for i in range(dim)]


def declared_names(feature: Feature) -> list[str]:
    """Return the declared names of a vector's dimensions; none if there is not one for each."""
    names = _flat(feature.names)
    return names if len(set(names)) == feature.shape[0] == len(names) else []


def _flat(names: Any) -> list[str]:
    """Names are a list, or lists by group, or missing."""
    if isinstance(names, str):
        return [names]
    parts = names.values() if isinstance(names, Mapping) else names or ()
    return [name for part in parts for name in _flat(part)]


def not_a_written_set(root: Path) -> str | None:
    """Return why a folder is not a data set as Piston wrote it; None if it is.

    LeRobot's format has no field for the program that wrote a set: a file of our own marks it.
    """
    if not (root / INFO).is_file():
        return f"it is not a data set (it has no {INFO})"
    if not (root / MARK).is_file():
        return f"Piston did not write this data set (it has no {MARK})"
    for path in root.rglob("*"):
        top, *_ = path.relative_to(root).parts
        if top not in _SET_FILES or not (path.is_dir() or path.suffix in _SET_FILES[top]):
            return f"it contains {path.relative_to(root)}, which is not part of a data set"
    return None


def list_files(root: Path) -> frozenset[str]:
    """Return the paths of all data and video files, relative to the root."""
    return frozenset(
        f"{inside}/{name}"
        for top in ("data", "videos", "video")
        for folder, _, names in os.walk(root / top, followlinks=True)
        for inside in [Path(folder).relative_to(root).as_posix()]
        for name in names
    )


def read_info(root: Path) -> Row:
    """Read meta/info.json. Raise an error if there is none or if it lacks features or fps."""
    path = root / INFO
    if not path.is_file():
        below: list[Path] = []
        with contextlib.suppress(OSError):  # a folder that goes away meanwhile: without the hint
            below = sorted(p.parent.parent for p in root.glob("**/meta/info.json"))[:5]
        hint = f" It contains data sets: {', '.join(map(str, below))}." if below else ""
        raise FileNotFoundError(
            f"{root} is not a LeRobot data set: {path} is missing. Give the folder that contains "
            f"meta/ and data/.{hint}"
        )
    info = read_json(path)
    if not isinstance(info, dict) or not isinstance(info.get("features"), dict):
        raise ValueError(f"{path} declares no features; a LeRobot data set declares them there.")
    info["chunks_size"] = chunk = info.get("chunks_size") or 1000
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise ValueError(f"{path}: fps is {fps!r}; expected frames per second, e.g. 30.")
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"{path}: chunks_size is {chunk!r}; expected files per folder, e.g. 1000.")
    try:
        read_features(info)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return info


def read_features(info: Row) -> dict[str, Feature]:
    try:
        return {name: Feature.parse(name, declared) for name, declared in info["features"].items()}
    except ValueError as error:
        raise ValueError(f"{INFO}: {error}") from error


def file_path(
    info: Row,
    version: str,
    place: Mapping[str, int],
    camera: str | None = None,
    *,
    all_fields: bool = False,
) -> str:
    """Fill in the template of the data files or of a camera's videos; the root is not included.

    Raise ValueError if this is not possible, if the path leads outside the set, or if the template
    does not have `all_fields`, so that two files would have the same path. Fields have no format
    but a number of digits, such as {chunk_index:03d}: any other width could fill the memory.
    """
    field = "video_path" if camera else "data_path"
    fields: Row = {**place, "video_key": camera} if camera else {**place}
    template = _template(info, version, camera)
    reason = "it leads outside the set, or its fields or their formats are others"
    try:
        used = _template_fields(template)
        if used == fields.keys() or (used < fields.keys() and not all_fields):
            path = template.format(**fields)
            if is_inside(path):
                return path
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        reason = repr(error)
    raise ValueError(
        f"meta/info.json: {field} is {template!r}, which cannot be filled in ({reason}); expected "
        f"is a path inside the set with the fields {', '.join(fields)}"
    )


def fields_used(info: Row, version: str, camera: str | None) -> frozenset[str]:
    """Return the fields of the template of the data files or of a camera's videos."""
    return _template_fields(_template(info, version, camera))


def _template(info: Row, version: str, camera: str | None) -> Any:
    field = "video_path" if camera else "data_path"
    return info.get(field) or PATHS[version][field]


def is_inside(path: str) -> bool:
    """Return whether a path that a set names stays in it; links in the set are followed."""
    return not path.startswith("/") and ".." not in path.split("/")


@functools.cache
def _template_fields(template: str) -> frozenset[str]:
    fields = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    if bad := [spec for _, spec, kind in fields if kind or not _FORMAT.fullmatch(spec or "")]:
        raise ValueError(f"the format {bad[0]!r} of a field is not a number of digits")
    return frozenset(str(name) for name, *_ in fields)
