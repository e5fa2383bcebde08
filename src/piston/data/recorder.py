"""Recording: frames come in one by one, whole episodes go to disk as a LeRobot data set.

    with Recorder("data/my_set", fps=50, features=features) as recorder:
        for episode in range(10):
            for observation, action in teleoperate():
                recorder.add_frame({**observation, "action": action}, task="Fold the towel")
            recorder.save_episode()

Knows frames, threads and the life of an episode. Knows nothing of file layouts (see store_v30,
store_v21). After every `save_episode` the set on disk is complete and readable, whatever happens to
the process; a frame that was not saved by then is not part of it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from piston.data.episode_stats import image_stats, sampled_frames
from piston.data.episode_store import (
    INFO,
    RECORDING,
    EpisodeStore,
    FinishedEpisode,
    plain_fps,
    read_info,
)
from piston.data.features import (
    BOOKKEEPING,
    FrameError,
    cameras,
    check_frame,
    declare_features,
    image_columns,
    same_features,
)
from piston.data.store_v21 import StoreV21, new_info_v21
from piston.data.store_v30 import StoreV30, new_info_v30
from piston.data.video_encoding import (
    CameraThread,
    PngThread,
    VideoEncoding,
    VideoThread,
    encoder_available,
)

logger = logging.getLogger(__name__)

VERSIONS = ("v3.0", "v2.1")


class Recorder:
    """Writes a LeRobot data set, v3.0 or v2.1. Nothing touches the disk before the first frame (or
    `with`).
    """

    def __init__(
        self,
        root: str | Path,
        fps: float,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str | None = None,
        version: str = "v3.0",
        codec: str | VideoEncoding | None = None,
        *,
        resume: bool = False,
        chunks_size: int | None = None,
        data_files_size_in_mb: float | None = None,
        video_files_size_in_mb: float | None = None,
    ) -> None:
        """`features` are entries as in info.json; timestamp, index and the like are added.

        `codec` is "av1" (LeRobot's default, small files), "h264" (least CPU time) or a
        VideoEncoding. With `resume`, a set that is at `root` is continued; without, it is an error.
        The last three, where given, replace LeRobot's 1000, 100 and 200.
        """
        if version not in VERSIONS:
            raise ValueError(f"version {version!r}: recording writes {' or '.join(VERSIONS)}")
        self.root = Path(root)
        declared = declare_features(features)
        new_info = new_info_v30 if version == "v3.0" else new_info_v21
        self._info = new_info(plain_fps(fps), declared, robot_type)
        sizes = {
            "chunks_size": chunks_size,
            "data_files_size_in_mb": data_files_size_in_mb,
            "video_files_size_in_mb": video_files_size_in_mb,
        }
        self._sizes = {name: size for name, size in sizes.items() if size is not None}
        if unused := set(self._sizes) - set(self._info):
            raise ValueError(f"{version} has a file per episode: {sorted(unused)} mean nothing")
        self._info |= self._sizes
        self._encoding = choose_encoding(codec)
        for camera in cameras(declared):
            self._encoding.check(camera, *declared[camera]["shape"][:2])
        self._resume = resume
        self._store: EpisodeStore | None = None
        self._closed = False
        self._clear()

    @classmethod
    def open(cls, root: str | Path, codec: str | VideoEncoding | None = None) -> "Recorder":
        """Continues the set at `root`; an episode that was not finished is dropped."""
        info = read_info(Path(root))
        version = info["codebase_version"]
        recorder = cls(
            *(root, info["fps"], info["features"], info.get("robot_type"), version, codec),
            resume=True,
        )
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
        """Adds one step. Raises FrameError, and adds nothing, when the frame does not fit the
        features.
        """
        store = self._start()
        checked = check_frame(frame, store.features)
        if not isinstance(task, str) or not task.strip():
            raise FrameError(f"the task must be a sentence, found {task!r}")
        if not self._threads:
            self._start_threads(store)
        for key, value in checked.items():
            if key in self._threads:
                self._threads[key].add(value)
            else:
                self._columns.setdefault(key, []).append(value)
        self._tasks.append(task)

    def save_episode(self) -> None:
        """Makes the frames so far an episode of the set. On an error (a full disk) the episode is
        dropped.
        """
        store = self._start()
        if not self._tasks:
            raise ValueError("there are no frames to save: call add_frame first")
        try:
            store.add_episode(self._finish_episode())
        except BaseException:
            self.discard_episode()
            raise
        self._clear()

    def discard_episode(self) -> None:
        """Forgets the frames since the last save."""
        for thread in self._threads.values():
            thread.cancel()
            if isinstance(thread, VideoThread):
                thread.path.unlink(missing_ok=True)
        self._clear()

    def finalize(self) -> None:
        """Brings the files into their final layout. Frames that were not saved are dropped, with a
        warning.
        """
        if self._closed:
            return
        store = self._start()
        if self._tasks:
            logger.warning("%d frames were not saved as an episode: dropped", len(self._tasks))
        self.discard_episode()
        store.close()
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
        try:
            self.finalize()
        except Exception:
            if error is None:
                raise
            # What went wrong first is what the caller must see; the episodes are safe either way.
            logger.exception("%s could not be brought into its final layout", self.root)

    def _clear(self) -> None:
        self._threads: dict[str, CameraThread] = {}
        self._columns: dict[str, list[np.ndarray]] = {}
        self._tasks: list[str] = []

    def _start(self) -> EpisodeStore:
        if self._closed:
            raise RuntimeError(
                f"recording is finalized. Continue with Recorder.open({str(self.root)!r})"
            )
        if self._store is None:
            info = self._info
            if (self.root / INFO).exists():
                info = self._continue(read_info(self.root))
            elif self._is_foreign_folder():
                raise FileExistsError(
                    f"{self.root} exists and is not a data set: choose another folder"
                )
            store = open_store(self.root, info)
            store.start()
            self._store = store
        return self._store

    def _is_foreign_folder(self) -> bool:
        # A recorder that was killed before it wrote anything leaves only its own folder.
        ours = (self.root / RECORDING).exists()
        return not ours and self.root.exists() and any(self.root.iterdir())

    def _continue(self, found: dict[str, Any]) -> dict[str, Any]:
        if not self._resume:
            raise FileExistsError(
                f"{self.root} already holds a data set. Continue it with resume=True, "
                "or choose another folder"
            )
        for key in ("codebase_version", "fps", "robot_type", *self._sizes):
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

    def _start_threads(self, store: EpisodeStore) -> None:
        folder = self.root / RECORDING
        for key in image_columns(store.features):
            self._threads[key] = PngThread(key)
        for number, key in enumerate(cameras(store.features)):
            shape = store.features[key]["shape"]
            path = folder / f"camera-{number}.mp4"
            self._threads[key] = VideoThread(key, path, store.fps, shape, self._encoding)

    def _finish_episode(self) -> FinishedEpisode:
        for thread in self._threads.values():
            thread.finish()
        columns: dict[str, Any] = {key: np.stack(rows) for key, rows in self._columns.items()}
        videos = {}
        for key, thread in self._threads.items():
            if isinstance(thread, PngThread):
                columns[key] = thread.images
            elif isinstance(thread, VideoThread):
                videos[key] = thread.path
        return FinishedEpisode(
            columns=columns,
            frame_tasks=self._tasks,
            videos=videos,
            image_stats={
                key: image_stats([thread.histograms[i] for i in sampled_frames(len(self._tasks))])
                for key, thread in self._threads.items()
            },
            encoding=self._encoding,
        )


def open_store(root: Path, info: dict[str, Any]) -> EpisodeStore:
    """The store for the version that info.json names."""
    stores = {"v3.0": StoreV30, "v2.1": StoreV21}
    version = info["codebase_version"]
    if version not in stores:
        raise ValueError(f"{root} is {version}: only {' and '.join(stores)} can be written")
    return stores[version](root, info)


def choose_encoding(codec: str | VideoEncoding | None) -> VideoEncoding:
    """The given encoding, or AV1 as LeRobot has it; H.264 where PyAV has no AV1 encoder, and says
    so.
    """
    if codec is None and not encoder_available("av1"):
        logger.warning("this build of PyAV has no AV1 encoder: videos will be H.264")
        codec = "h264"
    return VideoEncoding.named(codec or "av1")


def _shapes(info: dict[str, Any]) -> str:
    features = {k: v for k, v in info["features"].items() if k not in BOOKKEEPING}
    return ", ".join(f"{key} {v['dtype']}{list(v['shape'])}" for key, v in features.items())
