"""What the `meta/` of a data set says: episodes, tasks, features, and where their files are.

`Metadata.read` lists the other files without opening them. It records a `Problem` for everything
that is untidy, reads the variations of the format that are known, and raises an error only if there
is nothing left to read. The content of the files is judged by `check`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.format import (
    CAMERA_DTYPES,
    PATHS,
    PLACE,
    Episode,
    Feature,
    Row,
    VideoSpan,
    fields_used,
    file_path,
    keys_of,
    list_files,
    read_features,
    read_info,
)
from piston.data.problems import Problem, Severity, episode_problem
from piston.files import read_json_lines

CAMERA_IGNORED = "the camera is ignored"
_OTHER_NAMES = {"videos": "video", "video": "videos"}  # of the folder of videos


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
        episodes = sorted(reader.episodes(), key=lambda episode: episode.index)
        metadata = cls(
            root=reader.root,
            version=reader.version,
            fps=reader.fps,
            robot_type=reader.info.get("robot_type"),
            features=reader.stored_features(episodes),
            episodes=tuple(episodes),
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


class _MetaReader:
    """Reads meta/ and collects problems. Without files, every declared video counts as existing."""

    def __init__(self, root: Path, *, with_files: bool) -> None:
        self.root = root
        self.problems: list[Problem] = []
        self.info = read_info(root)
        self.features = read_features(self.info)
        self.fps: float = self.info["fps"]
        self.version = self._version()
        self._files = list_files(root) if with_files else None
        # Some writers declare videos as images.
        has_videos = any(path.startswith("video") for path in self._files or ())
        kinds = CAMERA_DTYPES if has_videos else ("video",)
        self._cameras = keys_of(self.features, *kinds)
        self._missing: dict[tuple[int, str | None], str] = {}  # by episode and camera: what is
        self._moved: dict[str, str] = {}  # of data and videos: the first that is elsewhere

    def _version(self) -> str:
        """Return the version whose list of episodes exists; writers declare others by mistake."""
        declared = self.info.get("codebase_version")
        version = "v" + str(declared).removeprefix("v")
        if declared is not None and version not in PATHS:
            raise ValueError(
                f"{self.root} is a data set of version {declared!r}; only {', '.join(PATHS)} can "
                "be read. Convert older ones with LeRobot's own scripts."
            )
        lists = {"v3.0": self.root / "meta/episodes", "v2.1": self.root / "meta/episodes.jsonl"}
        existing = [name for name, path in lists.items() if path.exists()]
        if declared is None:
            found = next(iter(existing), "v2.1")
            self._add("info.json", "codebase_version is missing", f"read as {found}", "note")
            return found
        own = "v3.0" if version == "v3.0" else "v2.1"
        if existing and own not in existing:
            what = f"codebase_version is {declared}, but the list of episodes is that of"
            self._add("info.json", f"{what} {existing[0]}", f"read as {existing[0]}")
            return existing[0]
        return version

    def _add(
        self,
        where: str,
        what: str,
        consequence: str,
        severity: Severity = "warning",
        camera: str | None = None,
    ) -> None:
        self.problems.append(Problem(severity, where, what, consequence, camera=camera))

    def episodes(self) -> Iterable[Episode]:
        found: dict[int, Episode] = {}
        start = 0
        for where, row in self._rows("episodes", "the episodes that it lists are left out"):
            if (index := _whole(row.get("episode_index"))) in found:
                self._add(where, f"episode {index} again", "the first one counts")
            elif (episode := self._episode(row, start)) is None:
                self._add(where, f"not a usable episode: {str(row)[:80]}", "it is left out")
            else:
                found[episode.index] = episode
                start = episode.start + episode.length
        return found.values()

    def stored_features(self, episodes: Iterable[Episode]) -> dict[str, Feature]:
        """Return the features; cameras that have videos are declared as such."""
        features = dict(self.features)
        for name in {camera for episode in episodes for camera in episode.videos}:
            if features[name].dtype != "video":
                features[name] = dataclasses.replace(features[name], dtype="video")
                what = "declared as image, but its frames are in videos"
                self._add(name, what, "the videos are read", camera=name)
        return features

    def tasks(self) -> dict[int, str]:
        # Numbering the episodes' texts would be a guess at the meaning of the rows' task_index.
        tasks = {}
        for where, row in self._rows("tasks", "each episode's first task is used for all its rows"):
            # pandas stores the texts as an index without a name.
            text = row.get("task", row.get("__index_level_0__"))
            index = _whole(row.get("task_index"))
            if index is not None and isinstance(text, str):
                tasks[index] = text
            else:
                self._add(where, f"not a usable task: {row}", "it is left out")
        return tasks

    def _rows(self, table: str, without: str) -> Iterator[tuple[str, Row]]:
        """Yield the place and the content of each row; `without` is the consequence of none."""
        lists = {".jsonl": [f"{table}.jsonl"]}
        lists[".parquet"] = [f"{table}.parquet", f"{table}/*/*.parquet"]
        own, other = sorted(lists, reverse=self.version == "v3.0")
        paths = self._meta_files(lists[own])
        if not paths:
            paths, what = self._meta_files(lists[other]), "is missing"
            if paths:
                what += f", but {paths[0].relative_to(self.root).as_posix()} exists"
            self._add(f"meta/{lists[own][0]}", what, "that is read" if paths else without)
        for path in paths:
            try:
                read = _read_parquet if path.suffix == ".parquet" else read_json_lines
                for number, row in read(path):
                    where = f"{path.name}:{number}"
                    if row is not None:
                        yield where, row
                    else:
                        self._add(where, "not a JSON object", "the line is left out")
            except (pa.ArrowException, OSError) as error:
                where = path.relative_to(self.root).as_posix()
                self._add(where, f"cannot be read: {error}", without)

    def _meta_files(self, patterns: Iterable[str]) -> list[Path]:
        return [path for one in patterns for path in sorted((self.root / "meta").glob(one))]

    def _episode(self, row: Row, start: int) -> Episode | None:
        index, length = (_whole(row.get(key)) for key in ("episode_index", "length"))
        if index is None or length is None or length < 1:
            return None
        row = {**row, "episode_index": index, "length": length}
        tasks = row.get("tasks") or ()
        texts = (tasks,) if isinstance(tasks, str) else tasks
        data_path = self._find(row)
        if data_path is None or not isinstance(texts, list | tuple):
            return None
        if (first := _whole(row.get("dataset_from_index"))) is not None:
            start = first
        spans = {camera: self._video(row, camera) for camera in self._cameras}
        videos = {camera: span for camera, span in spans.items() if span is not None}
        return Episode(index, length, tuple(map(str, texts)), start, data_path, videos)

    def _video(self, row: Row, camera: str) -> VideoSpan | None:
        start: Any = 0.0
        stop: Any = row["length"] / self.fps
        if self.version == "v3.0":
            start, stop = (row.get(f"videos/{camera}/{end}_timestamp") for end in ("from", "to"))
        path = self._find(row, camera)
        place = row["episode_index"], camera
        if path is None or not isinstance(start, int | float) or not start >= 0:
            self._missing[place] = "the list of episodes does not say where its frames are"
        if path is None or place in self._missing:
            return None
        known_stop = isinstance(stop, int | float) and stop == stop
        return VideoSpan(path, float(start), float(stop) if known_stop else None)

    def _find(self, row: Row, camera: str | None = None) -> str | None:
        """Return the path of a video or of the data file; None if the row lacks its numbers.

        It is declared in info.json. If there is no such file: in the usual place, or in the folder
        `video` instead of `videos` or vice versa.
        """
        declared = self._path(self.info, row, camera)
        if declared is None or self._files is None or declared in self._files:
            return declared
        for path in filter(None, (declared, self._path({}, row, camera))):
            top, _, rest = path.partition("/")
            for candidate in (path, f"{_OTHER_NAMES.get(top, top)}/{rest}"):
                if candidate in self._files:
                    kind = "video_path" if camera else "data_path"
                    self._moved.setdefault(kind, f"no file {declared}, but {candidate}")
                    return candidate
        self._missing[row["episode_index"], camera] = f"{declared} is missing"
        return declared

    def _path(self, info: Row, row: Row, camera: str | None) -> str | None:
        """Fill in the template of `info`; None if the row lacks a number that it uses."""
        index, unknown = row["episode_index"], set()
        chunk = index // self.info["chunks_size"]
        # Some writers use the names of the other version.
        place = {"episode_chunk": chunk, "episode_index": index}
        place |= {"chunk_index": chunk, "file_index": index}
        if self.version == "v3.0":
            prefix = f"videos/{camera}" if camera else "data"
            for name in PLACE:
                number = _whole(row.get(f"{prefix}/{name}"))
                if number is not None:
                    place[name] = number
                else:
                    unknown.add(name)
        path = file_path(info, self.version, place, camera)
        if unknown and unknown & fields_used(info, self.version, camera):
            return None
        return path

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
        if self._files is not None:
            self._check_files(metadata)

    def _check_files(self, metadata: Metadata) -> None:
        for camera in keys_of(metadata.features, "video"):
            if camera not in metadata.cameras:
                what = self._missing[metadata.episodes[0].index, camera]
                what = f"declared as video, has no files: {what}"
                self._add(camera, what, CAMERA_IGNORED, camera=camera)
        filmed = [c for c in metadata.cameras if metadata.features[c].dtype == "video"]
        for episode in metadata.episodes:
            for name in (None, *filmed):
                if lacks := self._missing.get((episode.index, name)):
                    self.problems.append(episode_problem(episode.index, lacks, name))
        for kind, what in self._moved.items():
            self._add(f"info.json: {kind}", what, "the files that exist are read")


def _whole(value: Any) -> int | None:
    """Return a whole number, also if pandas wrote it with a decimal point; None for others."""
    return int(value) if isinstance(value, int | float) and value % 1 == 0 else None


def _read_parquet(path: Path) -> Iterator[tuple[int, Row | None]]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        # Statistics are most of the table of episodes, and are not needed to read the data.
        names = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
        return enumerate(file.read(columns=names).to_pylist())
