"""What is found whenever a data set is opened: rows, headers of videos, and what is wrong.

`inspect_files` finds the episodes that have to be left out, so that training does not stop later.
No frame is decoded.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from piston.data.columns import DataRows, read_rows
from piston.data.format import DERIVED, Episode
from piston.data.language import EpisodeLabels, read_labels
from piston.data.metadata import CAMERA_IGNORED, Metadata
from piston.data.problems import Problem, Severity, episode_problem, unknown_key
from piston.data.video import TOLERANCE_S, Header, VideoHeader, num_usable_cpus, read_header


@dataclasses.dataclass(frozen=True)
class Findings:
    """What was read of a data set's files for some episodes and cameras, and what is wrong."""

    metadata: Metadata
    cameras: tuple[str, ...]
    problems: tuple[Problem, ...]
    data: DataRows
    headers: Mapping[str, Header]
    labels: Mapping[int, EpisodeLabels] | None = None  # by episode; None: they were not read


def left_out(problems: Iterable[Problem], cameras: Iterable[str]) -> dict[int, Problem]:
    """Return the episodes that readers of these cameras leave out, with the first reason."""
    wanted, reasons = {None, *cameras}, dict[int, Problem]()
    for problem in problems:
        if problem.leaves_out and problem.episode is not None and problem.camera in wanted:
            reasons.setdefault(problem.episode, problem)
    return reasons


def inspect_files(
    metadata: Metadata,
    episodes: Sequence[Episode],
    cameras: Iterable[str] | None = None,
    *,
    language: bool = False,
) -> Findings:
    """Read the rows of these episodes and the headers of these cameras' videos (None: of all).

    With `language`, their labels are read as well. What is wrong with labels is not a problem here.
    """
    data = read_rows(metadata, episodes)
    labels = read_labels(metadata, episodes, data) if language else None
    problems = list(metadata.problems)
    problems += [episode_problem(i, what) for i, what in sorted(data.unreadable.items())]
    problems += _missing_columns(metadata, episodes, data)
    there = [
        c for c in metadata.cameras if metadata.features[c].dtype == "video" or c in data.stored
    ]
    if isinstance(cameras, str):
        raise TypeError(f"cameras is the text {cameras!r}; expected a list: [{cameras!r}].")
    chosen = tuple(there if cameras is None else cameras)
    for camera in chosen:
        if camera not in there:
            raise _no_frames(metadata, camera, problems, there)
    spans = [(e, c, e.videos[c]) for e in episodes for c in chosen if c in e.videos]
    paths = list(dict.fromkeys(span.path for _, _, span in spans))
    with ThreadPoolExecutor(min(8, 2 * num_usable_cpus())) as pool:
        headers = dict(zip(paths, pool.map(lambda path: read_header(metadata.root / path), paths)))
    problems += _shared_frames(metadata, chosen)
    problems += _early_ends(metadata, chosen, headers)
    for episode, camera, span in spans:
        if what := _damage(headers[span.path], span.start, episode.length, metadata.fps):
            problems.append(episode_problem(episode.index, f"{span.path}: {what}", camera))
    return Findings(metadata, chosen, tuple(problems), data, headers, labels)


def _no_frames(
    metadata: Metadata, camera: str, problems: Iterable[Problem], there: Sequence[str]
) -> Exception:
    """Return the error for a camera that was asked for and has no frames."""
    for problem in problems:
        if problem.camera == camera and problem.consequence == CAMERA_IGNORED:
            return FileNotFoundError(
                f"{metadata.root}: there are no frames of {camera}: {problem.what}. Copy the files "
                "there, or use other cameras."
            )
    columns = [key for key, feature in metadata.features.items() if not feature.is_camera]
    return unknown_key(str(metadata.root), camera, there, columns, is_camera=True)


def _missing_columns(
    metadata: Metadata, episodes: Sequence[Episode], data: DataRows
) -> Iterator[Problem]:
    """Ignore a feature that no file has; leave out the episodes of files that lack another one."""
    if not data.names:
        return
    features, everywhere = metadata.features, data.everywhere
    for key in dict.fromkeys((*features, *DERIVED)):
        if key in everywhere or (key in features and features[key].dtype == "video"):
            continue
        if key in DERIVED:
            declared = "not" if key in features else "neither declared nor"
            what = data.ignored.get(key, f"{declared} in every data file")
            yield Problem("note", key, what, "computed from the list of episodes")
        elif features[key].is_language:
            if key not in data.stored:  # episodes of files without the column have no labels
                yield Problem("note", key, "declared, in no data file", "there are no such labels")
        elif key in data.stored:
            what = f"its data file has no column {key!r}, others have"
            for episode in episodes:
                if key not in data.names.get(episode.data_path, {key}):
                    camera = key if features[key].is_camera else None
                    yield episode_problem(episode.index, what, camera)
        elif features[key].is_camera:
            what = "declared as image, but in no data file and in no video"
            yield Problem("warning", key, what, CAMERA_IGNORED, camera=key)
        else:
            severity: Severity = "warning" if key in data.ignored else "error"
            what = data.ignored.get(key, "declared, in no data file")
            consequence = "items lack it: training that uses it is not possible"
            yield Problem(severity, key, what, consequence)


def _shared_frames(metadata: Metadata, cameras: Iterable[str]) -> Iterator[Problem]:
    """Find episodes of one file that claim the same frames: whose they are is unknown."""

    def end(episode: Episode) -> float:
        """Between an episode's last frame and the one after it, in seconds of the file."""
        return episode.videos[camera].start + (episode.length - 0.5) / metadata.fps

    for camera in cameras:
        filmed = [episode for episode in metadata.episodes if camera in episode.videos]
        filmed.sort(key=lambda e: (e.videos[camera].path, e.videos[camera].start))
        for _, inside in itertools.groupby(filmed, key=lambda e: e.videos[camera].path):
            last, *others = inside
            for episode in others:
                if episode.videos[camera].start < end(last):
                    for one, other in ((last, episode), (episode, last)):
                        what = f"its span in the video overlaps that of episode {other.index}"
                        yield episode_problem(one.index, what, camera)
                last = max(last, episode, key=end)  # the one that ends last


def _early_ends(
    metadata: Metadata, cameras: Iterable[str], headers: Mapping[str, Header]
) -> Iterator[Problem]:
    """Judge spans that are declared shorter than the episode by the frames of the video.

    Some writers declare the time of the last frame as the end. An episode is read if all spans of
    the camera are one frame short, or if the frames up to the next episode, or up to the end of the
    file, are exactly as many as its rows. Otherwise they may be those of another episode.
    """
    fps, read = metadata.fps, list[str]()
    for camera in cameras:
        filmed = [(e, span) for e in metadata.episodes if (span := e.videos.get(camera))]
        short = [
            (episode, span, frames)
            for episode, span in filmed
            if span.stop is not None
            and (frames := (span.stop - span.start) * fps) < episode.length - 0.5
        ]
        is_usual = len(short) == len(filmed) and all(n > e.length - 1.5 for e, _, n in short)
        starts = sorted((span.path, span.start) for _, span in filmed if short)
        for episode, span, frames in short:
            header = headers.get(span.path)
            end = header.num_frames if isinstance(header, VideoHeader) else -1
            following = bisect.bisect_right(starts, (span.path, span.start))
            if following < len(starts) and starts[following][0] == span.path:
                end = round(starts[following][1] * fps)
            if is_usual or end - round(span.start * fps) == episode.length:
                what = f"to_timestamp is {span.stop:.6g} s, its {episode.length} frames end at"
                ending = span.start + episode.length / fps
                read.append(f"episode {episode.index}, {camera}: {what} {ending:.6g} s")
            else:
                what = f"{episode.length} rows, but its video spans {frames:.1f} frames"
                yield episode_problem(episode.index, what, camera)
    if read:
        what = f"{len(read)} spans of videos are declared too short, the first: {read[0]}"
        yield Problem("warning", "meta/episodes", what, "the frames of the videos count")


def _damage(header: Header, start: float, length: int, fps: float) -> str | None:
    """Return what keeps an episode from being read from a video file."""
    if header is None or isinstance(header, str):
        return header
    if header.spacing:
        error = abs(header.spacing - 1 / fps) - header.resolution
        if (length - 1) * error > TOLERANCE_S:  # of the last frame's time
            return (
                f"has {1 / header.spacing:.6g} frames per second, declared are {fps:g}: which "
                "frame belongs to which row is unknown"
            )
    needed = round(start * fps) + length
    if header.num_frames < needed:
        return f"has {header.num_frames} frames, {needed} are needed"
    return None
