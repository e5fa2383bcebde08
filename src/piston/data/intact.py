"""Are the files of a data set whole? Asked when a set is opened, so that training does not stop
in the middle: parquet footers and mp4 boxes are read, no row and no frame.

What cannot be seen this way (values, frames that do not decode) is the business of `check`.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.episodes import Episode, Problem, episode_problem
from piston.data.metadata import DERIVED, Metadata
from piston.data.mp4 import CutFileError, count_frames

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Findings:
    """What is wrong, and which columns every readable data file has."""

    problems: tuple[Problem, ...]
    columns: frozenset[str]

    def left_out(self, cameras: Iterable[str]) -> dict[int, Problem]:
        """Episode → why, for a reader of these cameras."""
        wanted = {None, *cameras}
        return {
            problem.episode: problem
            for problem in reversed(self.problems)  # the first problem is the one that is told
            if problem.leaves_out and problem.episode is not None and problem.camera in wanted
        }


def look_over(metadata: Metadata) -> Findings:
    """The metadata's own problems and those of the files."""
    by_file: dict[str, list[Episode]] = collections.defaultdict(list)
    for episode in metadata.episodes:
        by_file[episode.data_path].append(episode)
    present = [path for path in by_file if (metadata.root / path).is_file()]
    footers = dict(zip(present, in_threads(lambda p: _footer(metadata.root / p), present)))

    problems = list(metadata.problems)
    for path, footer in footers.items():
        problems += _wrong_rows(metadata.root / path, footer, by_file[path])
    columns, missing = _columns(metadata, footers, by_file)
    problems += missing
    problems += _damaged_videos(metadata)
    return Findings(tuple(problems), columns)


def in_threads(function: Callable[[str], T], items: Sequence[str]) -> list[T]:
    """Small reads wait for the disk most of the time; a file that is slow holds up no other."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(8, 2 * (os.cpu_count() or 1))) as pool:
        return list(pool.map(function, items))


@dataclasses.dataclass(frozen=True)
class _Footer:
    rows: int
    columns: frozenset[str]
    error: str | None = None


def _footer(path: Path) -> _Footer:
    try:
        file = pq.read_metadata(path)
        return _Footer(file.num_rows, frozenset(file.schema.to_arrow_schema().names))
    except (pa.ArrowException, OSError) as error:
        return _Footer(0, frozenset(), str(error).splitlines()[0])


def _wrong_rows(path: Path, footer: _Footer, episodes: list[Episode]) -> list[Problem]:
    if footer.error is not None:
        what = f"{path.name} cannot be read: {footer.error}"
        return [episode_problem(episode.index, what) for episode in episodes]
    if footer.rows == sum(episode.length for episode in episodes):
        return []
    rows: Mapping[int, int]
    if len(episodes) == 1:
        rows = {episodes[0].index: footer.rows}
    elif "episode_index" in footer.columns:
        try:
            column = pq.read_table(path, columns=["episode_index"])["episode_index"]
        except (pa.ArrowException, OSError) as error:
            what = f"{path.name} cannot be read: {error}"
            return [episode_problem(episode.index, what) for episode in episodes]
        rows = collections.Counter(column.to_pylist())
    else:
        rows = {}  # whose rows are missing cannot be told
    return [
        episode_problem(
            episode.index,
            f"{path.name} has {rows.get(episode.index, 'an unknown number of')} rows of it, "
            f"listed are {episode.length}",
        )
        for episode in episodes
        if rows.get(episode.index) != episode.length
    ]


def _columns(
    metadata: Metadata,
    footers: Mapping[str, _Footer],
    by_file: Mapping[str, list[Episode]],
) -> tuple[frozenset[str], list[Problem]]:
    """A feature that no file has is ignored; one that some lack costs their episodes."""
    readable = {path: footer for path, footer in footers.items() if footer.error is None}
    some = frozenset[str]().union(*(footer.columns for footer in readable.values()))
    everywhere = some.intersection(*(footer.columns for footer in readable.values()))
    problems = []
    for name, feature in metadata.features.items():
        if feature.dtype == "video" or name in everywhere or not readable:
            continue
        camera = name if feature.is_camera else None
        if name in DERIVED:
            consequence = "computed from the list of episodes"
            problems.append(Problem("note", name, "not in every data file", consequence))
        elif name not in some:
            consequence = "the camera is ignored" if camera else "items do not have it"
            problems.append(Problem("warning", name, "declared, in no data file", consequence))
        else:
            what = f"its data file has no column {name!r}, others have"
            lacking = [path for path, footer in readable.items() if name not in footer.columns]
            problems += [
                episode_problem(episode.index, what, camera)
                for path in lacking
                for episode in by_file[path]
            ]
    for name in DERIVED:
        if name not in everywhere and name not in metadata.features and readable:
            what = "neither declared nor in every data file"
            problems.append(Problem("note", name, what, "computed from the list of episodes"))
    partly = {name for name in some if name not in everywhere and name not in DERIVED}
    return everywhere | (partly & metadata.features.keys()), problems


def _damaged_videos(metadata: Metadata) -> list[Problem]:
    paths = list({span.path: None for e in metadata.episodes for span in e.videos.values()})
    counts = dict(zip(paths, in_threads(lambda p: _count(metadata.root / p), paths)))
    problems = []
    for episode in metadata.episodes:
        for camera, span in episode.videos.items():
            count = counts[span.path]
            needed = round(span.start * metadata.fps) + episode.length
            if isinstance(count, str):
                problems.append(episode_problem(episode.index, f"{span.path}: {count}", camera))
            elif count is not None and count < needed:
                what = f"{span.path} has {count} frames, {needed} are needed"
                problems.append(episode_problem(episode.index, what, camera))
    return problems


def _count(path: Path) -> int | str | None:
    """Frames, or what is wrong, or None where the header does not say."""
    try:
        return count_frames(path)
    except CutFileError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
