"""What a data set is made of: episodes, where their frames and rows lie, and what is wrong.

Only the words; `layouts` and `metadata` read them from a folder.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One oddity of a data set and what happens because of it.

    An `error` keeps training from using the set. `leaves_out`: the reader leaves out `episode`,
    unless the trouble is with a `camera` that it was not asked for.
    """

    severity: Severity
    where: str
    what: str
    consequence: str
    episode: int | None = None
    camera: str | None = None
    leaves_out: bool = False


def episode_problem(episode: int, what: str, camera: str | None = None) -> Problem:
    """The usual case: the reader does without this episode."""
    where = f"episode {episode}" + (f", {camera}" if camera else "")
    consequence = "the episode is left out" + (", unless read without the camera" if camera else "")
    return Problem("warning", where, what, consequence, episode, camera, leaves_out=True)


class EpisodeError(ValueError):
    """Something inside an episode cannot be used.

    Who knows the run's configuration adds how to leave the episode out.
    """

    def __init__(self, message: str, episode: int = -1) -> None:
        super().__init__(message)
        self.episode = episode


@dataclasses.dataclass(frozen=True)
class VideoSpan:
    """Where in a file one episode's frames are: seconds, `stop` exclusive."""

    path: str  # relative to the root
    start: float
    stop: float


@dataclasses.dataclass(frozen=True)
class Episode:
    """`start`: first row in the global order; `videos`: the cameras whose file is there."""

    index: int
    start: int
    length: int
    tasks: tuple[str, ...]
    data_path: str
    videos: Mapping[str, VideoSpan]


class FileListing:
    """The data and video files that are there, by name only."""

    def __init__(self, paths: Iterable[str]):
        self.paths = frozenset(paths)

    @classmethod
    def of(cls, root: Path) -> FileListing:
        found = []
        for top in ("data", "videos", "video"):
            for folder, _, names in os.walk(root / top, followlinks=True):
                below = Path(folder).relative_to(root).as_posix()
                found += [f"{below}/{name}" for name in names]
        return cls(found)

    def find(self, path: str) -> str | None:
        """The path as declared, or with `video` for `videos` (and the reverse) in its place."""
        if path in self.paths:
            return path
        top, _, rest = path.partition("/")
        other = {"videos": "video", "video": "videos"}.get(top)
        renamed = f"{other}/{rest}"
        return renamed if other and renamed in self.paths else None
