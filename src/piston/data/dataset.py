"""A LeRobot data set as a sequence of items: numbers, chunks of actions, frames, the task.

    dataset = open_dataset("folder or owner/name", sequences={"action": 50})
    dataset[i]["action"]         (50, 14); steps beyond the end of the episode repeat its last value
    dataset[i]["action_is_pad"]  (50,)     True for these steps
    dataset.select("0:5")        some episodes of the open set; nothing is read again

With `language=True` the labels of the set are read as well (see `language`):

    dataset[i]["subtask"]        the text of the subtask of this frame, "" if there is none
    dataset.subtasks             the texts that occur
    dataset.questions            (i, Question) for each question about a picture

Opening leaves out the episodes that cannot be read, with a warning. A data set can be pickled,
forked and used by threads; each process opens its own decoders when it needs them.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int64, UInt8

from piston.data.columns import ImageRows, join_columns
from piston.data.findings import Findings, inspect_files, left_out
from piston.data.format import Episode, Feature
from piston.data.language import Kind, Labels, Question, join_labels
from piston.data.location import locate
from piston.data.metadata import Metadata
from piston.data.mixture import EpisodeChoice, choose_episodes
from piston.data.problems import EpisodeError, grouped, unknown_key
from piston.data.protocol import FrameFile, Texts, episode_bounds, locate_frame
from piston.data.video import TOLERANCE_S, VideoReaders
from piston.logs import warn_once

logger = logging.getLogger(__name__)

Sequences = Mapping[str, Sequence[float] | int]  # key → seconds from now, or a number of steps


def open_dataset(
    source: str | os.PathLike[str] | Metadata,
    *,
    sequences: Sequences | None = None,
    episodes: EpisodeChoice = None,
    cameras: Iterable[str] | None = None,
    language: bool | Kind = False,
) -> LeRobotDataset:
    """Open a folder, `owner/name` on the hub, or a data set whose metadata has been read.

    All rows and the headers of the videos are read; frames are read when they are asked for.
    `cameras=None` means all that have files, `()` none. With `language`, the labels of subtasks and
    questions are read; EpisodeError if one of them is wrong, or one of the kind that it names.
    """
    metadata = source if isinstance(source, Metadata) else Metadata.read(locate(source))
    chosen = choose_episodes(metadata.episodes, episodes)
    findings = inspect_files(metadata, chosen, cameras, language=bool(language))
    broken = left_out(findings.problems, findings.cameras)
    problems = [broken[episode.index] for episode in chosen if episode.index in broken]
    _require_cameras(findings, cameras)
    for problem in findings.problems:
        is_read = problem.camera is None or cameras is None or problem.camera in findings.cameras
        if problem.severity == "warning" and problem.episode is None and is_read:
            message = f"{metadata.root}: {problem.where}: {problem.what}; {problem.consequence}."
            warn_once(logger, message, "%s", message)
    if problems:
        listed = "".join(f"\n  {group.places}: {group.what}" for group in grouped(problems)[:5])
        logger.warning(
            "%s: %d of %d episodes are left out:%s\nList all problems: piston data check %s",
            *(metadata.root, len(problems), len(chosen), listed, metadata.root),
        )
    if len(problems) == len(chosen):
        raise ValueError(
            f"No episode of {metadata.root} can be read, e.g. {problems[0].where}: "
            f"{problems[0].what}. Run: piston data check {metadata.root}"
        )
    kept = [episode for episode in chosen if episode.index not in broken]
    labels = None
    if findings.labels is not None:
        both: tuple[Kind, ...] = ("subtasks", "questions")
        used = both if isinstance(language, bool) else (language,)
        labels = join_labels(metadata, kept, findings.labels, used)
    return LeRobotDataset(findings, kept, _offsets(sequences or {}, metadata.fps), labels)


def _require_cameras(findings: Findings, cameras: Iterable[str] | None) -> None:
    """Raise FileNotFoundError if all cameras were asked for, and none of them has frames."""
    if cameras is None and not findings.cameras:
        declared = [one.name for one in findings.metadata.features.values() if one.is_camera]
        for problem in findings.problems:
            if problem.camera in declared:
                raise FileNotFoundError(
                    f"{findings.metadata.root}: no camera has frames, e.g. {problem.camera}: "
                    f"{problem.what}. To read the set without cameras: cameras=()."
                )


class LeRobotDataset(Sequence[dict[str, Any]]):
    """`dataset[i]` counts the frames of `dataset.episodes`. Made by `open_dataset`."""

    def __init__(
        self,
        findings: Findings,
        episodes: Sequence[Episode],
        offsets: Mapping[str, np.ndarray],
        labels: Labels | None = None,
    ) -> None:
        self.metadata, self.cameras, self._labels = findings.metadata, findings.cameras, labels
        self._columns = join_columns(self.metadata, episodes, findings.data)
        self._set_episodes(episodes)
        # Where an episode begins in the columns, and in its data file.
        starts = self.episode_bounds[:, 0].tolist()
        self._starts = {episode.index: start for episode, start in zip(episodes, starts)}
        self._first_rows = findings.data.first_rows
        self._offsets = offsets
        self._videos, self._images = VideoReaders(), ImageRows(self.metadata.root)
        known = (*self.keys, *self.cameras)
        for key in offsets:
            if key not in known:
                raise self._unknown(key)

    def _set_episodes(self, episodes: Iterable[Episode]) -> None:
        self.episodes = tuple(episodes)
        self._ends = episode_bounds(self)[:, 1]

    def select(
        self, episodes: EpisodeChoice = None, *, cameras: Iterable[str] | None = None
    ) -> LeRobotDataset:
        """Return a data set of some of these episodes and cameras (None: all of them, `()`: none).

        It shares the columns and the decoders with this one.
        """
        selected = copy.copy(self)
        selected._set_episodes(choose_episodes(self.episodes, episodes))
        if cameras is not None:
            selected.cameras = tuple(self._known_camera(camera) for camera in cameras)
        return selected

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:  # type: ignore[override]
        episode, step = self.place(index)
        start = self._starts[episode.index]
        item: dict[str, Any] = {}
        steps: dict[str, np.ndarray] = {}  # of sequences
        for key, offsets in self._offsets.items():
            if key in self._columns or key in self.cameras:
                wanted = step + offsets
                steps[key] = np.clip(wanted, 0, episode.length - 1)
                item[f"{key}_is_pad"] = wanted != steps[key]
        for key, column in self._columns.items():
            value = column[start + steps.get(key, step)]
            # A copy, so that changing an item does not change the data set.
            item[key] = value.copy() if column.ndim > 1 and key not in steps else value
        task = self.metadata.tasks.get(int(self._columns["task_index"][start + step]))
        item["task"] = next(iter(episode.tasks), "") if task is None else task
        if self._labels is not None:
            item["subtask"] = self._labels.subtask(start + step)
        now = np.array([step])
        frames = self._frames(episode, {camera: steps.get(camera, now) for camera in self.cameras})
        return item | {c: images if c in steps else images[0] for c, images in frames.items()}

    @property
    def root(self) -> Path:
        return self.metadata.root

    @property
    def fps(self) -> float:
        return self.metadata.fps

    @property
    def features(self) -> Mapping[str, Feature]:
        return self.metadata.features

    @property
    def robot_type(self) -> str | None:
        return self.metadata.robot_type

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that are not cameras."""
        return tuple(self._columns)

    @property
    def episode_bounds(self) -> Int64[np.ndarray, "episodes 2"]:
        """The first row of each episode and the row after its last, in this set's numbering."""
        return episode_bounds(self)

    def column(self, key: str) -> np.ndarray:
        """Return (frames, dim), or (frames,) for plain values, read-only. Nothing is decoded."""
        if key not in self._columns:
            raise self._unknown(key)
        return self._of_episodes(self._columns[key])

    def _of_episodes(self, column: np.ndarray) -> np.ndarray:
        """Return the rows of this set's episodes, in their order, read-only."""
        if len(self) == len(column):
            return column
        starts = ((self._starts[episode.index], episode.length) for episode in self.episodes)
        part = np.concatenate([column[start : start + length] for start, length in starts])
        part.flags.writeable = False
        return part

    def frame(
        self, index: SupportsIndex, cameras: Iterable[str] | None = None
    ) -> dict[str, UInt8[np.ndarray, "h w 3"]]:
        """Return only the images of one frame."""
        wanted = self.cameras if cameras is None else map(self._known_camera, cameras)
        episode, step = self.place(index)
        frames = self._frames(episode, dict.fromkeys(wanted, np.array([step])))
        return {camera: images[0] for camera, images in frames.items()}

    @property
    def texts(self) -> dict[str, Texts]:
        """The tasks, and the subtasks if the labels have been read."""
        found = {"task": self._tasks()}
        if self._labels is not None:
            values = self.subtasks
            numbers = [values.index(t) if t in values else -1 for t in (*self._labels.texts, "")]
            rows = self._of_episodes(self._labels.numbers)
            found["subtask"] = Texts(values, np.array(numbers, np.int32)[rows])
        return found

    def _tasks(self) -> Texts:
        """Number the tasks of the frames; a task that the table lacks is the episode's first."""
        tasks, numbers = self.metadata.tasks, self.column("task_index").reshape(-1)
        owners = np.repeat(np.arange(len(self.episodes)), np.diff(self.episode_bounds)[:, 0])
        unlisted = min(numbers.min(), 0) - 1 - owners  # a number of its own for every episode
        kinds = np.where(np.isin(numbers, list(tasks)), numbers, unlisted)
        _, rows, places = np.unique(kinds, return_index=True, return_inverse=True)
        pairs = zip(numbers[rows].tolist(), owners[rows].tolist())
        texts = [tasks.get(n, next(iter(self.episodes[e].tasks), "")) for n, e in pairs]
        values, own = Texts.of(texts)
        return Texts(values, own[places.reshape(-1)])

    @property
    def subtasks(self) -> tuple[str, ...]:
        """The texts of the subtasks of these episodes, in the order of first appearance."""
        return tuple(self.frames_per_subtask)

    @property
    def frames_per_subtask(self) -> dict[str, int]:
        """The number of frames of each subtask, in the order of first appearance."""
        labels = self._required_labels()
        numbers, firsts, counts = np.unique(
            self._of_episodes(labels.numbers), return_index=True, return_counts=True
        )
        order = np.argsort(firsts)
        found = zip(numbers[order].tolist(), counts[order].tolist())
        return {labels.texts[number]: count for number, count in found if number >= 0}

    @property
    def questions(self) -> tuple[tuple[int, Question], ...]:
        """The questions about these episodes and cameras, each with the number of its frame."""
        labels, starts = self._required_labels(), self.episode_bounds[:, 0].tolist()
        return tuple(
            (start + step, question)
            for episode, start in zip(self.episodes, starts)
            for step, question in labels.questions.get(episode.index, ())
            if question.camera in self.cameras
        )

    def _required_labels(self) -> Labels:
        if self._labels is None:
            raise ValueError(
                f"The labels of {self.metadata.root} have not been read. Open the data set with "
                "open_dataset(…, language=True)."
            )
        return self._labels

    def frame_files(self, camera: str) -> list[FrameFile]:
        """Return where the frames of all episodes are, also of those that are not selected."""
        found: list[FrameFile] = []
        for episode in self.metadata.episodes:
            span = episode.videos.get(camera)
            times = None if span is None else (span.start, span.stop)
            found.append((episode.index, episode.length, episode.file_of(camera), times))
        return found

    def close(self) -> None:
        """Close the decoders; they open again when they are needed."""
        self._videos.close()

    def _known_camera(self, camera: str) -> str:
        if camera not in self.cameras:
            raise self._unknown(camera, is_camera=True)
        return camera

    def _unknown(self, key: str, *, is_camera: bool = False) -> KeyError:
        # It may have been opened without some of the cameras of the folder.
        source = f"The open data set {self.metadata.root}"
        return unknown_key(source, key, self.cameras, self.keys, is_camera=is_camera)

    def place(self, index: SupportsIndex) -> tuple[Episode, int]:
        """Return the episode of a frame and its number within the episode."""
        return locate_frame(index, self.episodes, self._ends)

    def _frames(self, episode: Episode, steps: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Read each camera in a thread of its own, the first one in this thread."""
        if not steps:
            return {}
        (first, now), *others = steps.items()
        threads = _camera_threads(os.getpid())
        waiting = {c: threads.submit(self._camera_frames, episode, c, s) for c, s in others}
        frames = {first: self._camera_frames(episode, first, now)}
        return frames | {camera: images.result() for camera, images in waiting.items()}

    def _camera_frames(self, episode: Episode, camera: str, frames: np.ndarray) -> np.ndarray:
        try:
            if self.metadata.features[camera].dtype == "image":
                rows = self._first_rows[episode.index] + frames
                return np.stack([self._images.read(episode.data_path, camera, r) for r in rows])
            span = episode.videos[camera]
            # By number, not by the recorded timestamp: frame k belongs to row k, even if the clock
            # began late or jittered. The video's own times are checked against this.
            times = span.start + frames / self.fps
            return self._videos.frames_at(self.metadata.root / span.path, times.tolist())
        except ValueError as error:
            numbers = ", ".join(map(str, frames))
            raise EpisodeError(
                f"episode {episode.index}, frame {numbers}, {camera}: {error} See: piston data "
                f"check {self.metadata.root}",
                episode.index,
            ) from error


@functools.cache
def _camera_threads(process: int) -> ThreadPoolExecutor:  # noqa: ARG001  (the key of the cache)
    """Return the threads of a process. Threads do not survive a fork, so a child has its own."""
    return ThreadPoolExecutor(thread_name_prefix="camera")


def _offsets(sequences: Sequences, fps: float) -> dict[str, np.ndarray]:
    """Return steps from now. Raise ValueError if the seconds are not those of frames."""
    offsets = {}
    for key, wanted in sequences.items():
        if isinstance(wanted, int | np.integer):
            if wanted < 1:
                raise ValueError(
                    f"The sequence of {key!r} has {wanted} steps; expected at least 1."
                )
            offsets[key] = np.arange(wanted)
            continue
        seconds = np.asarray(wanted, np.float64)
        steps = np.rint(np.nan_to_num(seconds, posinf=0, neginf=0) * fps).astype(np.int64)
        on_frames = np.abs(seconds - steps / fps) <= TOLERANCE_S  # False for NaN and infinity
        if seconds.ndim != 1 or not len(seconds) or not on_frames.all():
            raise ValueError(
                f"The sequence of {key!r} asks for {list(np.atleast_1d(seconds))} s from now; at "
                f"{fps} frames per second there are only multiples of {1 / fps:.6g} s."
            )
        offsets[key] = steps
    return offsets
