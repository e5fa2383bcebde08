"""What a LeRobot folder says of itself (v2.0, v2.1, v3.0), without opening a data file.

Knows `meta/` and the names of the files that lie beside it. What is untidy is read as far as it
makes sense and recorded as a `Problem`; only what leaves nothing to read is an error. Knows nothing
of what the data files hold: see `intact` (are they whole?), `columns`, `images` and `video`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from piston.data import layouts
from piston.data.episodes import Episode, FileListing, Problem, VideoSpan, episode_problem

__all__ = ["Episode", "Feature", "Metadata", "Problem", "VideoSpan"]

VERSIONS = ("v2.0", "v2.1", "v3.0")
# A reader can do without these columns: they follow from the episodes.
DERIVED = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclasses.dataclass(frozen=True)
class Feature:
    """One declared feature; dtype is "video", "image", "string" or a NumPy name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: Any = None
    video: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # codec, fps as declared

    @property
    def is_camera(self) -> bool:
        return self.dtype in ("video", "image")


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
    """`Metadata.read(root)`; `info` is meta/info.json as it is."""

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
        """With `files=False` only `meta/` needs to be there, and nothing is said of the rest."""
        root = Path(root)
        problems: list[Problem] = []
        info = _read_info(root)
        features = _features(info)
        version = _version(root, info, problems)
        listing = FileListing.of(root) if files else None
        reading = layouts.Reading(root, info, _fps(info), listing, problems)
        tasks, episodes = (layouts.read_v3 if version == "v3.0" else layouts.read_v2)(reading)
        if not episodes:
            told = "".join(f"\n  {problem.where}: {problem.what}" for problem in problems[:5])
            raise ValueError(f"{root / 'meta'} describes no episode that could be read.{told}")
        metadata = cls(
            root=root,
            version=version,
            fps=_fps(info),
            robot_type=info.get("robot_type"),
            features=features,
            episodes=tuple(sorted(episodes, key=lambda episode: episode.index)),
            tasks=tasks,
            info=info,
        )
        problems += _wrong_totals(metadata)
        if listing is not None:
            problems += _missing_files(metadata, listing, known=problems)
        return dataclasses.replace(metadata, problems=tuple(problems))

    @property
    def cameras(self) -> tuple[str, ...]:
        """Image features, and video features of which there is any file."""
        filmed = {camera for episode in self.episodes for camera in episode.videos}
        return tuple(
            name
            for name, feature in self.features.items()
            if feature.dtype == "image" or (feature.dtype == "video" and name in filmed)
        )

    @property
    def total_frames(self) -> int:
        return sum(episode.length for episode in self.episodes)

    def episode(self, index: int) -> Episode:
        for episode in self.episodes:
            if episode.index == index:
                return episode
        raise KeyError(f"{self.root} has no episode {index}; {describe_numbers(self.episodes)}.")


def describe_numbers(episodes: Iterable[Episode]) -> str:
    """ "it has the 50 episodes 0 … 49"."""
    numbers = sorted(episode.index for episode in episodes)
    return f"it has the {len(numbers)} episodes {numbers[0]} … {numbers[-1]}"


def _read_info(root: Path) -> dict[str, Any]:
    path = root / "meta" / "info.json"
    if not path.is_file():
        below = sorted(p.parent.parent for p in root.glob("**/meta/info.json"))[:5]
        hint = f" Below it are data sets: {', '.join(map(str, below))}." if below else ""
        raise FileNotFoundError(
            f"{root} is no LeRobot data set: {path} is not there. Expected is the folder with "
            f"meta/ and data/.{hint}"
        )
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(info, dict) or not isinstance(info.get("features"), dict):
        raise ValueError(f"{path} declares no features; a LeRobot data set has them there.")
    return info


def _version(root: Path, info: dict[str, Any], problems: list[Problem]) -> str:
    declared = info.get("codebase_version")
    if declared is None:
        guess = "v3.0" if (root / "meta" / "episodes").is_dir() else "v2.1"
        problems.append(
            Problem("note", "info.json", "codebase_version is missing", f"read as {guess}")
        )
        return guess
    version = "v" + str(declared).removeprefix("v")
    if version not in VERSIONS:
        raise ValueError(
            f"{root} is a data set of version {declared!r}; {', '.join(VERSIONS)} can be read. "
            "Convert older ones with LeRobot's own scripts."
        )
    return version


def _fps(info: dict[str, Any]) -> float:
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise ValueError(
            f"meta/info.json: fps is {fps!r}; expected are frames per second, e.g. 30."
        )
    return fps


def _features(info: dict[str, Any]) -> dict[str, Feature]:
    features = {}
    for name, declared in info["features"].items():
        if not isinstance(declared, dict) or "dtype" not in declared:
            raise ValueError(f"meta/info.json: feature {name!r} has no dtype: {declared!r}")
        shape = declared.get("shape") or ()
        if not isinstance(shape, list | tuple) or not all(
            isinstance(size, int | float) and int(size) == size for size in shape
        ):
            raise ValueError(
                f"meta/info.json: feature {name!r} has the shape {shape!r}; expected is a list of "
                "whole numbers."
            )
        video = declared.get("info") or declared.get("video_info") or {}
        features[name] = Feature(
            name=name,
            dtype=str(declared["dtype"]),
            shape=tuple(int(size) for size in shape),
            names=declared.get("names"),
            video=video if isinstance(video, dict) else {},
        )
    return features


def _wrong_totals(metadata: Metadata) -> list[Problem]:
    actual = {
        "total_episodes": len(metadata.episodes),
        "total_frames": metadata.total_frames,
        "total_tasks": len(metadata.tasks),
    }
    if not metadata.tasks:
        del actual["total_tasks"]  # their file is missing, which is said elsewhere
    return [
        Problem(
            "note",
            "info.json",
            f"{key} is {metadata.info[key]}, the episodes say {value}",
            "the episodes are believed",
        )
        for key, value in actual.items()
        if key in metadata.info and metadata.info[key] != value
    ]


def _missing_files(metadata: Metadata, listing: FileListing, known: list[Problem]) -> list[Problem]:
    problems = []
    said = {(problem.episode, problem.camera) for problem in known}
    cameras = metadata.cameras
    declared = [name for name, feature in metadata.features.items() if feature.dtype == "video"]
    for camera in declared:
        if camera not in cameras:
            what = "declared as video, but there is no file of it"
            problems.append(Problem("warning", camera, what, "the camera is ignored"))
    for episode in metadata.episodes:
        if episode.data_path not in listing.paths:
            problems.append(episode_problem(episode.index, f"{episode.data_path} is not there"))
        problems += [
            episode_problem(episode.index, "its video is not there", camera)
            for camera in declared
            if camera in cameras
            and camera not in episode.videos
            and (episode.index, camera) not in said
        ]
    renamed = any(
        span.path.startswith("video/") for e in metadata.episodes for span in e.videos.values()
    )
    if renamed and not str(metadata.info.get("video_path")).startswith("video/"):
        problems.append(
            Problem("note", "video/", "the folder is not named `videos`", "read anyway")
        )
    return problems
