"""Recording: frames come in one by one and become whole episodes of a LeRobot v3.0 data set.

    with Recorder("data/my_set", fps=50, features=features) as recorder:
        for episode in range(10):
            for observation, action in teleoperate():
                recorder.add_frame({**observation, "action": action}, task="Fold the towel")
            recorder.save_episode()

With `language=True`, frames can have a subtask and questions about their pictures (see `labels`):

    recorder.add_frame(frame, task, subtask="grasp the corner", questions=[Question(…)])

After every `save_episode` the set on disk is complete and readable, whatever happens to the process
(see `writer`). Frames that were not saved are not part of the set. A thread per camera encodes
while the robot moves; if it cannot keep up, `add_frame` waits instead of filling memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from piston.data.format import CAMERA_DTYPES, INFO, LANGUAGE, keys_of, read_features, read_info
from piston.data.record.columns import image_stats, sampled_frames
from piston.data.record.declare import FrameError, check_frame, check_labels, declare_features
from piston.data.record.encoding import (
    CameraThread,
    Images,
    VideoEncoding,
    encode_png,
    encode_video,
)
from piston.data.record.labels import Question, label_cells
from piston.data.record.writer import RECORDING, DatasetWriter, NewEpisode, new_info

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)


class Recorder:
    """Writes a LeRobot v3.0 data set. Nothing touches the disk before the first frame or `with`."""

    def __init__(
        self,
        root: str | Path,
        fps: float,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str | None = None,
        codec: str | VideoEncoding | None = None,
        *,
        resume: bool = False,
        language: bool = False,
    ) -> None:
        """`features` are entries as in info.json; timestamp, index and the like are added.

        `codec` is "av1" (LeRobot's default, small files), "h264" (least CPU time) or a
        VideoEncoding. With `resume`, a set that exists at `root` is continued; without, it is an
        error. With `language`, the set has columns for subtasks and questions.
        """
        self.root = Path(root)
        declared = declare_features(features, language=language)
        self._info = new_info(fps, declared, robot_type)
        self._encoding = VideoEncoding.choose(codec)
        for camera in keys_of(declared, "video"):
            self._encoding.check(camera, *declared[camera].shape[:2])
        self._resume = resume
        self._writer: DatasetWriter | None = None
        self._closed = False
        self._clear()

    @classmethod
    def open(cls, root: str | Path, codec: str | VideoEncoding | None = None) -> Recorder:
        """Continue the set at `root`; an episode that was not finished is dropped."""
        info = read_info(Path(root))
        robot_type = info.get("robot_type")
        options = {"resume": True, "language": not LANGUAGE.keys().isdisjoint(info["features"])}
        recorder = cls(root, info["fps"], info["features"], robot_type, codec, **options)
        recorder._start()
        return recorder

    @property
    def num_episodes(self) -> int:
        """Episodes on disk."""
        return self._start().num_episodes

    @property
    def num_frames(self) -> int:
        """Frames on disk."""
        return self._start().num_frames

    @property
    def num_unsaved_frames(self) -> int:
        """Frames of the episode in progress."""
        return len(self._tasks)

    def add_frame(
        self,
        frame: Mapping[str, Any],
        task: str,
        *,
        subtask: str | None = None,
        questions: Sequence[Question] = (),
    ) -> None:
        """Add one step. Raise FrameError, and add nothing, if it does not fit the features.

        A subtask lasts until the next one, so after the first one of an episode every frame has to
        have one.
        """
        writer = self._start()
        checked = check_frame(frame, writer.features)
        if not isinstance(task, str) or not task.strip():
            raise FrameError(f"the task must be a sentence, found {task!r}")
        check_labels(subtask, questions, writer.features)
        if self._subtasks and self._subtasks[-1] and not subtask:
            raise FrameError(
                f"the frame has no subtask, but the one before has {self._subtasks[-1]!r}. The "
                "format cannot say that a subtask ends: give the frame the same one or the next one"
            )
        if not self._threads:
            self._start_threads(writer)
        for key, value in checked.items():
            if key in self._threads:
                self._threads[key].add(value)
            else:
                self._columns.setdefault(key, []).append(value)
        self._tasks.append(task)
        self._subtasks.append(subtask or "")
        self._questions.append(tuple(questions))

    def save_episode(self) -> None:
        """Store the frames so far as an episode. On an error (a full disk) they are dropped."""
        writer = self._start()
        if not self._tasks:
            raise ValueError("there are no frames to save: call add_frame first")
        try:
            encoded = {key: thread.finish() for key, thread in self._threads.items()}
            videos = {key: encoded.pop(key) for key in keys_of(writer.features, "video")}
            sample = sampled_frames(len(self._tasks))
            columns = {key: np.stack(rows) for key, rows in self._columns.items()} | encoded
            if LANGUAGE.keys() <= writer.features.keys():
                columns |= label_cells(self._subtasks, self._questions, writer.fps)
            episode = NewEpisode(
                videos=videos,
                columns=columns,
                frame_tasks=self._tasks,
                image_stats={
                    key: image_stats([thread.histograms[i] for i in sample])
                    for key, thread in self._threads.items()
                },
                encoder_info=self._encoding.describe(),
            )
            writer.add_episode(episode)
        except BaseException:
            self.discard_episode()
            raise
        self._clear()

    def discard_episode(self) -> None:
        """Drop the frames since the last save."""
        for thread in self._threads.values():
            thread.cancel()
        self._clear()

    def finalize(self) -> None:
        """End the recording. Frames that were not saved are dropped with a warning."""
        if self._closed:
            return
        if self._tasks:
            logger.warning("%d frames were not saved as an episode: dropped", len(self._tasks))
        self.discard_episode()
        self._start().close()
        self._closed = True

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finalize()

    def _clear(self) -> None:
        self._threads: dict[str, CameraThread] = {}
        self._columns: dict[str, list[np.ndarray]] = {}
        self._tasks: list[str] = []
        self._subtasks: list[str] = []  # "" for none
        self._questions: list[tuple[Question, ...]] = []

    def _start(self) -> DatasetWriter:
        if self._closed:
            raise RuntimeError(
                f"recording is finalized. Continue with Recorder.open({str(self.root)!r})"
            )
        if self._writer is None:
            info = self._info
            if (self.root / INFO).exists():
                info = read_info(self.root)
                self._check_continued(info)
            # A recorder that was killed before it wrote anything leaves only its own folder.
            elif not (self.root / RECORDING).exists() and any(self.root.glob("*")):
                raise FileExistsError(
                    f"{self.root} exists and is not a data set: choose another folder"
                )
            writer = DatasetWriter(self.root, info)
            writer.start()
            self._writer = writer
        return self._writer

    def _check_continued(self, found: dict[str, Any]) -> None:
        """Raise an error if this recording does not fit the set at `root`."""
        if not self._resume:
            raise FileExistsError(
                f"{self.root} already holds a data set. Continue it with resume=True, "
                "or choose another folder"
            )
        version = found.get("codebase_version")
        if version != "v3.0":
            raise ValueError(
                f"{self.root} is a LeRobot {version} set, only v3.0 can be continued. "
                f"Convert it: piston data convert {self.root} NEW_FOLDER"
            )
        theirs_labelled, ours_labelled = (
            not LANGUAGE.keys().isdisjoint(info["features"]) for info in (found, self._info)
        )
        if theirs_labelled != ours_labelled:
            has = "has" if theirs_labelled else "does not have"
            raise ValueError(
                f"{self.root} {has} the columns {', '.join(LANGUAGE)}, this recording has "
                f"language={ours_labelled}. Continue it with language={theirs_labelled}, or choose "
                "another folder"
            )
        theirs, ours = (
            {"fps": info["fps"], "robot_type": info.get("robot_type")}
            | {key: str(feature) for key, feature in read_features(info).items()}
            for info in (found, self._info)
        )
        different = [
            f"{key} is {theirs.get(key)} there, {ours.get(key)} here"
            for key in theirs | ours
            if theirs.get(key) != ours.get(key)
        ]
        if different:
            raise ValueError(
                f"{self.root} does not fit this recording: {'; '.join(different)}. Choose another "
                "folder"
            )

    def _start_threads(self, writer: DatasetWriter) -> None:
        for key in keys_of(writer.features, *CAMERA_DTYPES):
            encode: Callable[[Images], Any] = encode_png
            if writer.features[key].dtype == "video":
                encode = functools.partial(
                    encode_video,
                    path=self.root / RECORDING / f"camera-{len(self._threads)}.mp4",
                    fps=writer.fps,
                    encoding=self._encoding,
                )
            self._threads[key] = CameraThread(key, encode)
