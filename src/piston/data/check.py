"""Reads a whole data set once and tells everything that is wrong with it, and what will happen.

Asks the same code that training reads with, so that what passes here does not stop a run later.
Knows nothing of how it is shown. An `error` is what would stop training; a damaged episode that the
reader leaves out by itself is a `warning`, unless no episode remains.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from piston.data.check_rows import check_rows
from piston.data.columns import find_rows
from piston.data.episodes import Episode, FileListing, Problem
from piston.data.images import ImageRows
from piston.data.intact import CAMERA_IGNORED, Findings, look_over
from piston.data.location import locate
from piston.data.metadata import Metadata
from piston.data.mp4 import CutFileError, read_header
from piston.data.processors import num_usable_cpus
from piston.data.video import TOLERANCE_S, VideoError, VideoReader

BLACK = 20  # the brightest gray value of a frame that shows nothing (video black is 16)
STOPS = "training stops there; leave the episode out (--data.episodes '!N') or replace the file"

Progress = Callable[[int, int], None]  # frames and rows done, in all


def check_dataset(
    path_or_repo_id: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    tolerance_s: float = TOLERANCE_S,
) -> list[Problem]:
    """Every problem, the worst first. Raises only where there is no data set to check."""
    metadata = Metadata.read(locate(path_or_repo_id))
    findings = look_over(metadata, tolerance_s)
    work = _Work(metadata, findings, tolerance_s, progress)
    problems = [
        *findings.problems,
        *_strangers(metadata),
        *work.rows(),
        *work.pictures(),
        *work.videos(),
    ]
    if not readable_episodes(metadata, problems):
        what = "no episode can be read with all cameras"
        problems.append(Problem("error", "data set", what, "training cannot use it"))
    declared = any(feature.is_camera for feature in metadata.features.values())
    if declared and not readable_cameras(metadata, problems):
        what = "cameras are declared, none of them has files"
        problems.append(Problem("error", "data set", what, "training cannot use it"))
    rank = {"error": 0, "warning": 1, "note": 2}
    return sorted(problems, key=lambda problem: rank[problem.severity])


def usable(problems: Iterable[Problem]) -> bool:
    """Whether training can use the set."""
    return all(problem.severity != "error" for problem in problems)


def readable_episodes(metadata: Metadata, problems: Iterable[Problem]) -> list[Episode]:
    """Those that a reader of all cameras gets."""
    left_out = Findings(tuple(problems), frozenset()).left_out(metadata.cameras)
    return [episode for episode in metadata.episodes if episode.index not in left_out]


def readable_cameras(metadata: Metadata, problems: Iterable[Problem]) -> list[str]:
    """Those that have files."""
    ignored = {problem.where for problem in problems if problem.consequence == CAMERA_IGNORED}
    return [camera for camera in metadata.cameras if camera not in ignored]


class _Work:
    """What takes time; counts what is done of it."""

    def __init__(
        self,
        metadata: Metadata,
        findings: Findings,
        tolerance_s: float,
        progress: Progress | None,
    ):
        self._metadata = metadata
        self._findings = findings
        self._tolerance_s = tolerance_s
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._stopped = threading.Event()
        unreadable = findings.left_out(())
        self._episodes = [e for e in metadata.episodes if e.index not in unreadable]
        self._images = [
            name
            for name, feature in metadata.features.items()
            if feature.dtype == "image" and name in findings.columns
        ]
        per_row = 1 + len(self._images)
        in_videos = sum(e.length for e, _ in self._filmed())
        self._total = per_row * sum(e.length for e in self._episodes) + in_videos

    def _filmed(self) -> Iterator[tuple[Episode, str]]:
        """Episodes and cameras whose file is whole."""
        for camera in self._metadata.cameras:
            damaged = self._findings.left_out([camera])
            for episode in self._metadata.episodes:
                if camera in episode.videos and episode.index not in damaged:
                    yield episode, camera

    def _count(self, done: int) -> None:
        with self._lock:
            self._done += done
            if self._progress is not None:
                self._progress(self._done, self._total)

    def rows(self) -> Iterator[Problem]:
        for problems, done in check_rows(self._metadata, self._episodes, self._findings.columns):
            yield from problems
            self._count(done)

    def pictures(self) -> Iterator[Problem]:
        images = ImageRows(self._metadata.root)
        for camera in self._images:
            for episode in self._episodes:
                path = self._metadata.root / episode.data_path
                try:
                    rows = find_rows(self._metadata, path, [episode], episode.length)
                except ValueError:
                    continue  # told by `rows`
                first = rows[episode.index].start
                cells = (
                    images.read(episode.data_path, camera, first + k) for k in range(episode.length)
                )
                yield from self._look_at(episode, camera, cells)

    def videos(self) -> list[Problem]:
        by_file: dict[str, list[tuple[Episode, str]]] = collections.defaultdict(list)
        for episode, camera in self._filmed():
            by_file[episode.videos[camera].path].append((episode, camera))
        with ThreadPoolExecutor(max_workers=num_usable_cpus()) as pool:
            try:
                found = pool.map(lambda item: self._video(*item), by_file.items())
                return [problem for problems in found for problem in problems]
            except BaseException:  # Ctrl-C: a long video must not be waited for
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _video(self, path: str, inside: list[tuple[Episode, str]]) -> list[Problem]:
        whole = self._metadata.root / path
        try:
            reader = VideoReader(whole)
        except VideoError as error:
            return [
                Problem("error", f"episode {e.index}, {camera}", str(error), STOPS, e.index, camera)
                for e, camera in inside
            ]
        problems = self._unlike_declared(reader, path, inside[0][1])
        problems += self._surplus(whole, inside)
        for episode, camera in inside:
            start = episode.videos[camera].start
            times = [start + k / self._metadata.fps for k in range(episode.length)]
            frames = reader.brightness(times, self._tolerance_s)
            problems += self._look_at(episode, camera, frames)
        reader.close()
        return problems

    def _look_at(
        self, episode: Episode, camera: str, frames: Iterator[np.ndarray]
    ) -> list[Problem]:
        """Read every frame of one camera in one episode."""
        where, black, number = f"episode {episode.index}, {camera}", [], 0
        try:
            for frame in frames:
                if self._stopped.is_set():
                    return []
                if frame.max() <= BLACK:
                    black.append(number)
                self._count(1)
                number += 1
        except ValueError as error:
            self._count(episode.length - number)
            what = f"frame {number}: {error}"
            return [Problem("error", where, what, STOPS, episode.index, camera)]
        if not black:
            return []
        what = f"{len(black)} of {episode.length} frames are black: {_ranges(black)}"
        consequence = "they are read as they are"
        return [Problem("warning", where, what, consequence, episode.index, camera)]

    def _unlike_declared(self, reader: VideoReader, path: str, camera: str) -> list[Problem]:
        feature, problems = self._metadata.features[camera], []
        codec = feature.video.get("video.codec")
        if codec is not None and codec != reader.codec:
            what = f"the codec is {reader.codec}, declared is {codec}"
            problems.append(Problem("note", path, what, "read by what the file says"))
        if len(feature.shape) == 3 and set(reader.size) - set(feature.shape):
            what = f"frames are {reader.size[0]}×{reader.size[1]}, declared is {feature.shape}"
            problems.append(Problem("warning", path, what, "frames keep the size of the file"))
        return problems

    def _surplus(self, path: Path, inside: list[tuple[Episode, str]]) -> list[Problem]:
        try:
            header = read_header(path)
        except CutFileError:
            return []  # told by `look_over`
        needed = max(
            round(episode.videos[camera].start * self._metadata.fps) + episode.length
            for episode, camera in inside
        )
        if header is None or header.num_frames <= needed:
            return []
        where = path.relative_to(self._metadata.root).as_posix()
        what = f"{header.num_frames} frames, the episodes have {needed}"
        return [Problem("note", where, what, "the frames at the end are not used")]


def _strangers(metadata: Metadata) -> Iterator[Problem]:
    """Files that nothing refers to: an undeclared camera, an episode that was never listed."""
    known = {episode.data_path for episode in metadata.episodes}
    known |= {span.path for episode in metadata.episodes for span in episode.videos.values()}
    unknown = sorted(
        path
        for path in FileListing.of(metadata.root).paths - known
        if path.endswith((".mp4", ".parquet")) and not Path(path).name.startswith(".")
    )
    by_folder = collections.Counter(str(Path(path).parent) for path in unknown)
    for folder, count in by_folder.items():
        what = f"{count} files that no listed episode and no declared camera refers to"
        yield Problem("note", folder, what, "they are not read")


def _ranges(numbers: list[int]) -> str:
    """0–4, 7, 9–11; the first few."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a}–{b}" for a, b in runs[:5]]
    return ", ".join(shown) + (" …" if len(runs) > 5 else "")
