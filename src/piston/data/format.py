"""The LeRobot folder format, v2.0 to v3.0: where a data set is, and what its `meta/` declares.

    v2.x  one data file per episode and one video per episode and camera;
          meta/episodes.jsonl and meta/tasks.jsonl list the episodes and the tasks
    v3.0  files are shared by several episodes;
          meta/episodes/*/*.parquet says where each episode begins, meta/tasks.parquet has the tasks

`Metadata.read` reads `meta/` and lists the other files without opening them. It records a `Problem`
for everything that is untidy and raises an error only if there is nothing left to read. The content
of the data files and videos is left to `columns` and `video`.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from piston.assets import resolve
from piston.files import read_json, read_json_lines

Severity = Literal["error", "warning", "note"]
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
CAMERA_IGNORED = "the camera is ignored"
_OTHER_NAMES = {"videos": "video", "video": "videos"}  # of the folder of videos
MARK = Path("meta/piston.json")  # only in sets that Piston has begun
# The folders of a set that Piston writes, with the endings of their files.
_SET_FILES = {
    "meta": (".json", ".jsonl", ".parquet"),
    "data": (".parquet",),
    "videos": (".mp4",),
    ".recording": (".json", ".mp4", ""),
}
_FORMAT = re.compile(r"(0?\d{1,2})?d?")  # of a field in a path template
_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is wrong with a data set, and its consequence.

    An `error` keeps training from using the data set. `leaves_out` means that readers leave out
    `episode`; if a `camera` is named, only readers of that camera do.
    """

    severity: Severity
    where: str
    what: str
    consequence: str
    episode: int | None = None
    camera: str | None = None
    leaves_out: bool = False


def episode_problem(
    episode: int,
    what: str,
    camera: str | None = None,
    consequence: str | None = None,
    severity: Severity = "warning",
) -> Problem:
    """Return the problem of an episode. Without another `consequence`, readers leave it out."""
    where = f"episode {episode}" + (f", {camera}" if camera else "")
    left_out = "the episode is left out" + (", unless read without the camera" if camera else "")
    result = consequence or left_out
    return Problem(severity, where, what, result, episode, camera, leaves_out=consequence is None)


class EpisodeError(ValueError):
    """An episode cannot be used. Callers that know the configuration add how to leave it out."""

    def __init__(self, message: str, episode: int = -1) -> None:
        super().__init__(message)
        self.episode = episode


@dataclasses.dataclass(frozen=True)
class VideoSpan:
    """The part of a video file that holds an episode's frames, in seconds; `stop` is exclusive."""

    path: str  # relative to the root
    start: float
    stop: float


@dataclasses.dataclass(frozen=True)
class Episode:
    """`start` is its first row in the numbering of the whole set; `videos` has existing files."""

    index: int
    start: int
    length: int
    tasks: tuple[str, ...]
    data_path: str
    videos: Mapping[str, VideoSpan]

    def file_of(self, camera: str) -> str:
        """Return the path of the file that has a camera's frames: a video or the data file."""
        return self.videos[camera].path if camera in self.videos else self.data_path


@dataclasses.dataclass(frozen=True)
class Feature:
    """A declared feature; `dtype` is "video", "image", "string" or the name of a NumPy type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: Any = None
    video: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # codec, fps as declared

    @classmethod
    def parse(cls, name: str, declared: Any) -> Feature:
        """Take an entry of info.json. Raise ValueError if it has no dtype or shape."""
        if not isinstance(declared, Mapping) or "dtype" not in declared:
            raise ValueError(f"feature {name!r} is {declared!r}; expected its dtype and shape.")
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

    def __str__(self) -> str:
        """Return what decides which values fit, such as float32[14]."""
        return f"{self.dtype}{list(self.shape)}"


# Columns that writers fill in and readers can compute from the list of episodes.
DERIVED = {
    key: Feature(key, "float32" if key == "timestamp" else "int64", (1,))
    for key in ("timestamp", "frame_index", "episode_index", "index", "task_index")
}


def keys_of(features: Mapping[str, Feature], *dtypes: str) -> list[str]:
    """Return the names of the features of these types."""
    return [key for key, feature in features.items() if feature.dtype in dtypes]


def dimension_names(features: Iterable[Feature], dim: int, otherwise: str) -> list[str]:
    """Return the declared names of the features' dimensions, if there are `dim` of them.

    Else they are numbered: `otherwise[0]`, `otherwise[1]` …
    """
    names = [name for feature in features for name in _flat(feature.names)]
    return names if len(names) == dim else [f"{otherwise}[{i}]" for i in range(dim)]


def _flat(names: Any) -> list[str]:
    """Names are a list, or lists by group, or missing."""
    if isinstance(names, str):
        return [names]
    parts = names.values() if isinstance(names, Mapping) else names or ()
    return [name for part in parts for name in _flat(part)]


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The content of `meta/`; `info` is meta/info.json."""

    root: Path
    version: str
    fps: float
    robot_type: str | None
    features: Mapping[str, Feature]
    episodes: tuple[Episode, ...]
    tasks: Mapping[int, str]
    problems: tuple[Problem, ...] = ()
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, root: str | os.PathLike[str], *, files: bool = True) -> Metadata:
        """Read a data set's metadata. With `files=False` only `meta/` has to exist."""
        reader = _MetaReader(Path(root), with_files=files)
        metadata = cls(
            root=reader.root,
            version=reader.version,
            fps=reader.fps,
            robot_type=reader.info.get("robot_type"),
            features=reader.features,
            episodes=tuple(sorted(reader.episodes(), key=lambda episode: episode.index)),
            tasks=reader.tasks(),
            info=reader.info,
        )
        reader.check(metadata)
        return dataclasses.replace(metadata, problems=tuple(reader.problems))

    @property
    def cameras(self) -> tuple[str, ...]:
        """Image features, and video features that have at least one file."""
        filmed = {camera for episode in self.episodes for camera in episode.videos}
        return tuple(
            name
            for name, feature in self.features.items()
            if feature.dtype == "image" or (feature.dtype == "video" and name in filmed)
        )

    @property
    def total_frames(self) -> int:
        return sum(episode.length for episode in self.episodes)


def locate(path_or_repo_id: str | os.PathLike[str], *, only_meta: bool = False) -> Path:
    """Return the folder of a data set; download it (or only its `meta/`) if it is not local."""
    name = os.fspath(path_or_repo_id).rstrip("/")
    is_address = "://" in name
    tried = [] if is_address else [Path(name).expanduser(), lerobot_home() / name]
    for folder in tried:
        if folder.is_dir():
            return folder
    places = " nor ".join(map(str, tried))
    if not is_address and not _REPO_ID.fullmatch(name):
        raise FileNotFoundError(
            f"There is no data set {name}: neither {places} exists. Give a folder with "
            "meta/info.json, a name owner/name on the Hugging Face hub, or hf://…"
        )
    address = name if is_address else f"hf://datasets/{name}"
    try:
        return resolve(f"{address}/meta").parent if only_meta else resolve(address)
    except Exception as error:
        if tried:
            error.add_note(f"{name} is not a local data set either: neither {places} exists.")
        raise


def lerobot_home() -> Path:
    """Return the folder where LeRobot's own tools keep data sets."""
    if home := os.environ.get("HF_LEROBOT_HOME"):
        return Path(home).expanduser()
    hub = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(hub).expanduser() / "lerobot"


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
        f"{Path(folder).relative_to(root).as_posix()}/{name}"
        for top in ("data", "videos", "video")
        for folder, _, names in os.walk(root / top, followlinks=True)
        for name in names
    )


class _MetaReader:
    """Reads meta/ and collects problems. Without files, every declared video counts as existing."""

    def __init__(self, root: Path, *, with_files: bool) -> None:
        self.root = root
        self.problems: list[Problem] = []
        self.info = read_info(root)
        self.features = read_features(self.info)
        self.fps: float = self.info["fps"]
        self.version = "v" + str(self.info.get("codebase_version")).removeprefix("v")
        if self.info.get("codebase_version") is None:
            self.version = "v3.0" if (root / "meta" / "episodes").is_dir() else "v2.1"
            what = "codebase_version is missing"
            self._add("info.json", what, f"read as {self.version}", "note")
        if self.version not in PATHS:
            raise ValueError(
                f"{root} is a data set of version {self.info['codebase_version']!r}; only "
                f"{', '.join(PATHS)} can be read. Convert older ones with LeRobot's own scripts."
            )
        self._files = list_files(root) if with_files else None
        self._cameras = keys_of(self.features, "video")

    def _add(self, where: str, what: str, consequence: str, severity: Severity = "warning") -> None:
        self.problems.append(Problem(severity, where, what, consequence))

    def episodes(self) -> Iterable[Episode]:
        found: dict[int, Episode] = {}
        start = 0
        for where, row in self._rows("episodes", "the episodes that it lists are left out"):
            episode = self._episode(row, start)
            if episode is None:
                self._add(where, f"not a usable episode: {str(row)[:80]}", "it is left out")
            elif episode.index in found:
                self._add(where, f"episode {episode.index} again", "the first one counts")
            else:
                found[episode.index] = episode
                start = episode.start + episode.length
        return found.values()

    def tasks(self) -> dict[int, str]:
        # Numbering the episodes' texts would be a guess at the meaning of the rows' task_index.
        tasks = {}
        for where, row in self._rows("tasks", "each episode's first task is used for all its rows"):
            # pandas stores the texts as an index without a name.
            index, text = row.get("task_index"), row.get("task", row.get("__index_level_0__"))
            if isinstance(index, int) and isinstance(text, str):
                tasks[index] = text
            else:
                self._add(where, f"not a usable task: {row}", "it is left out")
        return tasks

    def _rows(self, table: str, without: str) -> Iterator[tuple[str, Row]]:
        """Yield the place and the content of each row; `without` is the consequence of none."""
        names, read = [f"{table}.jsonl"], read_json_lines
        if self.version == "v3.0":
            names, read = [f"{table}.parquet", f"{table}/*/*.parquet"], _read_parquet
        paths = [path for name in names for path in sorted((self.root / "meta").glob(name))]
        if not paths:
            self._add(f"meta/{names[0]}", "is missing", without)
        for path in paths:
            try:
                for number, row in read(path):
                    where = f"{path.name}:{number}"
                    if row is not None:
                        yield where, row
                    else:
                        self._add(where, "not a JSON object", "the line is left out")
            except (pa.ArrowException, OSError) as error:
                where = path.relative_to(self.root).as_posix()
                self._add(where, f"cannot be read: {error}", without)

    def _episode(self, row: Row, start: int) -> Episode | None:
        index, length = row.get("episode_index"), row.get("length")
        if not isinstance(index, int) or not isinstance(length, int) or length < 1:
            return None
        tasks = row.get("tasks") or ()
        texts = (tasks,) if isinstance(tasks, str) else tasks
        data_path = self._path(row)
        if data_path is None or not isinstance(texts, list | tuple):
            return None
        if isinstance(row.get("dataset_from_index"), int):
            start = row["dataset_from_index"]
        spans = {camera: self._video(row, camera) for camera in self._cameras}
        videos = {camera: span for camera, span in spans.items() if span is not None}
        return Episode(index, start, length, tuple(map(str, texts)), data_path, videos)

    def _video(self, row: Row, camera: str) -> VideoSpan | None:
        if self.version == "v3.0":
            start, stop = (row.get(f"videos/{camera}/{end}_timestamp") for end in ("from", "to"))
        else:
            start, stop = 0.0, row["length"] / self.fps
        path = self._path(row, camera)
        if path is None or not isinstance(start, int | float) or not isinstance(stop, int | float):
            return None
        if self._files is not None and path not in self._files:
            # Some sets have the folder `video` in place of `videos`, or vice versa.
            top, _, rest = path.partition("/")
            path = f"{_OTHER_NAMES.get(top)}/{rest}"
            if path not in self._files:
                return None
        frames = (stop - start) * self.fps
        if not frames > row["length"] - 0.5:  # it would show frames of the next episode
            what = f"{row['length']} rows, but its video spans {frames:.1f} frames"
            self.problems.append(episode_problem(row["episode_index"], what, camera))
            return None
        return VideoSpan(path, float(start), float(stop))

    def _path(self, row: Row, camera: str | None = None) -> str | None:
        """Return the path of a video or of the data file; None if the row lacks its numbers."""
        index = row["episode_index"]
        place = {"episode_chunk": index // self.info["chunks_size"], "episode_index": index}
        if self.version == "v3.0":
            prefix = f"videos/{camera}" if camera else "data"
            numbers: list[Any] = [row.get(f"{prefix}/{name}") for name in PLACE]
            # pandas may have written whole numbers as floating-point ones, and NaN for none.
            if not all(isinstance(n, int | float) and n % 1 == 0 for n in numbers):
                return None
            place = dict(zip(PLACE, map(int, numbers)))
        return file_path(self.info, self.version, place, camera)

    def check(self, metadata: Metadata) -> None:
        """Compare the totals and the files with the list of episodes."""
        actual = {"total_episodes": len(metadata.episodes), "total_frames": metadata.total_frames}
        if metadata.tasks:  # without them, the missing file is a problem of its own
            actual["total_tasks"] = len(metadata.tasks)
        for key, value in actual.items():
            if (declared := self.info.get(key, value)) != value:
                what = f"{key} is {declared}, the list of episodes gives {value}"
                self._add("info.json", what, "the list is used", "note")
        if not metadata.episodes:
            listed = (f"\n  {problem.where}: {problem.what}" for problem in self.problems[:5])
            raise ValueError(
                f"{self.root / 'meta'} describes no episode that can be read.{''.join(listed)}"
            )
        if self._files is None:
            return
        reported = {(problem.episode, problem.camera) for problem in self.problems}
        for name in self._cameras:
            if name not in metadata.cameras:
                self._add(name, "declared as video, has no files", CAMERA_IGNORED)
                reported |= {(episode.index, name) for episode in metadata.episodes}
        for episode in metadata.episodes:
            for camera in self._cameras:
                if camera not in episode.videos and (episode.index, camera) not in reported:
                    what = "its video is missing"
                    self.problems.append(episode_problem(episode.index, what, camera))
            if episode.data_path not in self._files:
                what = f"{episode.data_path} is missing"
                self.problems.append(episode_problem(episode.index, what))
        paths = (span.path for episode in metadata.episodes for span in episode.videos.values())
        renamed = any(path.startswith("video/") for path in paths)
        if renamed and not str(self.info.get("video_path")).startswith("video/"):
            self._add("video/", "the folder is not named `videos`", "it is read anyway", "note")


def _read_parquet(path: Path) -> Iterator[tuple[int, Row | None]]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        # Statistics are most of the table of episodes, and are not needed to read the data.
        names = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
        return enumerate(file.read(columns=names).to_pylist())


def read_info(root: Path) -> Row:
    """Read meta/info.json. Raise an error if there is none or if it lacks features or fps."""
    path = root / INFO
    if not path.is_file():
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
    template = info.get(field) or PATHS[version][field]
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


def is_inside(path: str) -> bool:
    """Return whether a path that a set names stays in it; links in the set are followed."""
    return not path.startswith("/") and ".." not in path.split("/")


@functools.cache
def _template_fields(template: str) -> frozenset[str]:
    fields = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    if bad := [spec for _, spec, kind in fields if kind or not _FORMAT.fullmatch(spec or "")]:
        raise ValueError(f"the format {bad[0]!r} of a field is not a number of digits")
    return frozenset(str(name) for name, *_ in fields)
