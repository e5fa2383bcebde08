"""Recording: frames come in one by one and become whole episodes of a LeRobot v3.0 data set.

    with Recorder("data/my_set", fps=50, features=features) as recorder:
        for episode in range(10):
            for observation, action in teleoperate():
                recorder.add_frame({**observation, "action": action}, task="Fold the towel")
            recorder.save_episode()

After every `save_episode` the set on disk is complete and readable, whatever happens to the process
(see `writer`). Frames that were not saved are not part of the set.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from piston.data.encoding import (
    CameraThread,
    PngThread,
    VideoEncoding,
    VideoThread,
    encoder_available,
)
from piston.data.episode_stats import image_stats, sampled_frames
from piston.data.features import (
    BOOKKEEPING,
    FrameError,
    cameras,
    check_frame,
    declare_features,
    image_columns,
    same_features,
)
from piston.data.writer import INFO, RECORDING, DatasetWriter, NewEpisode, new_info, read_info

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
    ) -> None:
        """`features` are entries as in info.json; timestamp, index and the like are added.

        `codec` is "av1" (LeRobot's default, small files), "h264" (least CPU time) or a
        VideoEncoding. With `resume`, a set that exists at `root` is continued; without, it is an
        error.
        """
        self.root = Path(root)
        declared = declare_features(features)
        self._info = new_info(fps, declared, robot_type)
        self._encoding = choose_encoding(codec)
        for camera in cameras(declared):
            self._encoding.check(camera, *declared[camera]["shape"][:2])
        self._resume = resume
        self._writer: DatasetWriter | None = None
        self._closed = False
        self._clear()

    @classmethod
    def open(cls, root: str | Path, codec: str | VideoEncoding | None = None) -> "Recorder":
        """Continue the set at `root`; an episode that was not finished is dropped."""
        info = read_info(Path(root))
        robot_type = info.get("robot_type")
        recorder = cls(root, info["fps"], info["features"], robot_type, codec, resume=True)
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

    def add_frame(self, frame: Mapping[str, Any], task: str) -> None:
        """Add one step. Raise FrameError, and add nothing, if it does not fit the features."""
        writer = self._start()
        checked = check_frame(frame, writer.features)
        if not isinstance(task, str) or not task.strip():
            raise FrameError(f"the task must be a sentence, found {task!r}")
        if not self._threads:
            self._start_threads(writer)
        for key, value in checked.items():
            if key in self._threads:
                self._threads[key].add(value)
            else:
                self._columns.setdefault(key, []).append(value)
        self._tasks.append(task)

    def save_episode(self) -> None:
        """Store the frames so far as an episode. On an error (a full disk) they are dropped."""
        writer = self._start()
        if not self._tasks:
            raise ValueError("there are no frames to save: call add_frame first")
        try:
            writer.add_episode(self._finish_episode())
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
        writer = self._start()
        if self._tasks:
            logger.warning("%d frames were not saved as an episode: dropped", len(self._tasks))
        self.discard_episode()
        writer.close()
        self._closed = True

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finalize()

    def _clear(self) -> None:
        self._threads: dict[str, CameraThread] = {}
        self._columns: dict[str, list[np.ndarray]] = {}
        self._tasks: list[str] = []

    def _start(self) -> DatasetWriter:
        if self._closed:
            raise RuntimeError(
                f"recording is finalized. Continue with Recorder.open({str(self.root)!r})"
            )
        if self._writer is None:
            info = self._info
            if (self.root / INFO).exists():
                info = self._continue(read_info(self.root))
            # A recorder that was killed before it wrote anything leaves only its own folder.
            elif not (self.root / RECORDING).exists() and _holds_files(self.root):
                raise FileExistsError(
                    f"{self.root} exists and is not a data set: choose another folder"
                )
            writer = DatasetWriter(self.root, info)
            writer.start()
            self._writer = writer
        return self._writer

    def _continue(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the info of the set at `root`; raise if this recording does not fit it."""
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
        for key in ("fps", "robot_type"):
            if found.get(key) != self._info[key]:
                raise ValueError(
                    f"{self.root} has {key} {found.get(key)!r}, this recording "
                    f"{self._info[key]!r}: they cannot be one set"
                )
        if not same_features(found["features"], self._info["features"]):
            raise ValueError(
                f"{self.root} has other features ({_shapes(found)}) than this recording "
                f"({_shapes(self._info)})"
            )
        return found

    def _start_threads(self, writer: DatasetWriter) -> None:
        for key in image_columns(writer.features):
            self._threads[key] = PngThread(key)
        for number, key in enumerate(cameras(writer.features)):
            path = self.root / RECORDING / f"camera-{number}.mp4"
            shape = writer.features[key]["shape"]
            self._threads[key] = VideoThread(key, path, writer.fps, shape, self._encoding)

    def _finish_episode(self) -> NewEpisode:
        for thread in self._threads.values():
            thread.finish()
        columns: dict[str, Any] = {key: np.stack(rows) for key, rows in self._columns.items()}
        threads = self._threads.items()
        images = {key: thread.images for key, thread in threads if isinstance(thread, PngThread)}
        sample = sampled_frames(len(self._tasks))
        return NewEpisode(
            columns=columns | images,
            frame_tasks=self._tasks,
            videos={key: thread.path for key, thread in threads if isinstance(thread, VideoThread)},
            image_stats={
                key: image_stats([thread.histograms[i] for i in sample]) for key, thread in threads
            },
            encoder_info=self._encoding.describe(),
        )


def choose_encoding(codec: str | VideoEncoding | None) -> VideoEncoding:
    """Return the given encoding, by default AV1; H.264 with a warning if PyAV cannot encode AV1."""
    if codec is None and not encoder_available("av1"):
        logger.warning("this build of PyAV has no AV1 encoder: videos will be H.264")
        codec = "h264"
    return VideoEncoding.named(codec or "av1")


def _holds_files(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _shapes(info: dict[str, Any]) -> str:
    features = {k: v for k, v in info["features"].items() if k not in BOOKKEEPING}
    return ", ".join(f"{key} {v['dtype']}{list(v['shape'])}" for key, v in features.items())
