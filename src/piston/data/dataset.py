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

import functools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from piston.data.columns import ImageRows, join_columns
from piston.data.findings import Findings, inspect_files, left_out
from piston.data.format import Episode, Feature
from piston.data.language import Kind, Labels, Question, join_labels
from piston.data.location import locate
from piston.data.metadata import Metadata
from piston.data.mixture import EpisodeChoice, choose_episodes
from piston.data.problems import EpisodeError, grouped
from piston.data.protocol import FrameFile, Texts
from piston.data.video import VideoReaders
from piston.data.view import Sequences, View
from piston.logs import warn_once

logger = logging.getLogger(__name__)


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
    return LeRobotDataset(findings, kept, sequences or {}, labels)


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


class LeRobotDataset(View):
    """`dataset[i]` counts the frames of `dataset.episodes`. Made by `open_dataset`."""

    episodes: tuple[Episode, ...]
    blocks = None

    def __init__(
        self,
        findings: Findings,
        episodes: Sequence[Episode],
        sequences: Sequences,
        labels: Labels | None = None,
    ) -> None:
        self.metadata, self._labels = findings.metadata, labels
        self._columns = join_columns(self.metadata, episodes, findings.data)
        self._first_rows = findings.data.first_rows  # of the episodes in their data files
        self._videos, self._images = VideoReaders(), ImageRows(self.metadata.root)
        self.root, self.fps, self.keys = self.metadata.root, self.metadata.fps, tuple(self._columns)
        self.cameras = findings.cameras
        self._place_episodes(episodes, sequences)

    @property
    def features(self) -> Mapping[str, Feature]:
        return self.metadata.features

    @property
    def robot_type(self) -> str | None:
        return self.metadata.robot_type

    def _texts_at(self, episode: Episode, row: int) -> dict[str, str]:
        task = self.metadata.tasks.get(int(self._columns["task_index"][row]))
        texts = {"task": next(iter(episode.tasks), "") if task is None else task}
        return texts if self._labels is None else {**texts, "subtask": self._labels.subtask(row)}

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

    def _read(self, episode: Episode, steps: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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
