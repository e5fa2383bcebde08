"""Are the files of a data set whole? Asked when a set is opened, so that training does not stop
in the middle: parquet footers and mp4 boxes are read, no row and no frame.

What cannot be seen this way (values, frames that do not decode) is the business of `check`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.episodes import Episode, Problem, episode_problem
from piston.data.metadata import DERIVED, Metadata
from piston.data.mp4 import CutFileError, VideoHeader, read_header
from piston.data.processors import num_usable_cpus
from piston.data.video import TOLERANCE_S

T = TypeVar("T")

CAMERA_IGNORED = "the camera is ignored"


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


def look_over(metadata: Metadata, tolerance_s: float = TOLERANCE_S) -> Findings:
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
    problems += _shared_frames(metadata)
    problems += _damaged_videos(metadata, tolerance_s)
    return Findings(tuple(problems), columns)


def in_threads(function: Callable[[str], T], items: Sequence[str]) -> list[T]:
    """Small reads wait for the disk most of the time; a file that is slow holds up no other."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(8, 2 * num_usable_cpus())) as pool:
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
            what, lacking_it = (
                "declared, in no data file",
                "items lack it: who uses it cannot train",
            )
            problems.append(
                Problem("warning", name, what, CAMERA_IGNORED)
                if camera
                else Problem("error", name, what, lacking_it)
            )
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


def _shared_frames(metadata: Metadata) -> Iterator[Problem]:
    """Episodes of one file that claim the same frames: whose they are cannot be told."""
    for camera in metadata.cameras:
        filmed = [episode for episode in metadata.episodes if camera in episode.videos]
        filmed.sort(key=lambda e: (e.videos[camera].path, e.videos[camera].start))
        for _, inside in itertools.groupby(filmed, key=lambda e: e.videos[camera].path):
            longest: Episode | None = None  # of those before, the one that ends last
            for episode in inside:
                start = episode.videos[camera].start
                if longest is not None and start < _last_time(longest, camera, metadata.fps):
                    for one, other in ((longest, episode), (episode, longest)):
                        what = f"its span in the video overlaps that of episode {other.index}"
                        yield episode_problem(one.index, what, camera)
                if longest is None or _last_time(episode, camera, metadata.fps) > _last_time(
                    longest, camera, metadata.fps
                ):
                    longest = episode


def _last_time(episode: Episode, camera: str, fps: float) -> float:
    """Between an episode's last frame and the one after it, in seconds of the file."""
    return episode.videos[camera].start + (episode.length - 0.5) / fps


def _damaged_videos(metadata: Metadata, tolerance_s: float) -> list[Problem]:
    paths = list({span.path: None for e in metadata.episodes for span in e.videos.values()})
    headers = dict(zip(paths, in_threads(lambda p: _header(metadata.root / p), paths)))
    problems = []
    for episode in metadata.episodes:
        for camera, span in episode.videos.items():
            header = headers[span.path]
            needed = round(span.start * metadata.fps) + episode.length
            if isinstance(header, str):
                what = f"{span.path}: {header}"
            elif header is None:
                continue
            elif header.spacing and header.drift(metadata.fps, episode.length) > tolerance_s:
                what = (
                    f"{span.path} has {1 / header.spacing:.6g} frames per second, declared are "
                    f"{metadata.fps:g}: which frame belongs to which row cannot be told"
                )
            elif header.num_frames < needed:
                what = f"{span.path} has {header.num_frames} frames, {needed} are needed"
            else:
                continue
            problems.append(episode_problem(episode.index, what, camera))
    return problems


def _header(path: Path) -> VideoHeader | str | None:
    """What it says, or what is wrong, or None where it does not say."""
    try:
        return read_header(path)
    except CutFileError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
