"""Recording: frames come in one by one and become whole episodes of a LeRobot v3.0 data set.

    with Recorder("data/my_set", fps=50, features=features) as recorder:
        for episode in range(10):
            for observation, action in teleoperate():
                recorder.add_frame({**observation, "action": action}, task="Fold the towel")
            recorder.save_episode()

With `language=True`, frames can have a subtask and questions about their pictures (see `language`):

    recorder.add_frame(frame, task, subtask="grasp the corner", questions=[Question(…)])

After every `save_episode` the set on disk is complete and readable, whatever happens to the process
(see `writer`). Frames that were not saved are not part of the set. A thread per camera encodes
while the robot moves; if it cannot keep up, `add_frame` waits instead of filling memory.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import av
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from piston.data.features import (
    FrameError,
    check_frame,
    check_labels,
    declare_features,
    frame_histogram,
    image_stats,
    sampled_frames,
)
from piston.data.format import CAMERA_DTYPES, INFO, LANGUAGE, keys_of, read_features, read_info
from piston.data.language import Question, label_cells
from piston.data.writer import RECORDING, DatasetWriter, NewEpisode, new_info

logger = logging.getLogger(__name__)

ENCODERS = {"av1": "libsvtav1", "h264": "libx264"}
QUEUE_FRAMES = 32
_THREADS = Path("/proc/self/task")

Images = Iterator[UInt8[np.ndarray, "h w 3"]]


@dataclasses.dataclass(frozen=True)
class VideoEncoding:
    """How videos are compressed; `VideoEncoding()` is LeRobot's default.

    A key frame every `g` frames makes random access fast.
    """

    codec: str = "av1"
    g: int = 2
    crf: int = 30
    preset: int | str = 12
    pix_fmt: str = "yuv420p"

    @classmethod
    def choose(cls, codec: "str | VideoEncoding | None") -> "VideoEncoding":
        """Return the usual settings of "av1" (small files) or "h264" (least CPU time).

        The default is AV1, or H.264 with a warning if PyAV cannot encode AV1.
        """
        if isinstance(codec, VideoEncoding):
            return codec
        if codec is None and ENCODERS["av1"] not in av.codecs_available:
            logger.warning("this build of PyAV has no AV1 encoder: videos will be H.264")
            codec = "h264"
        return cls("h264", crf=20, preset="ultrafast") if codec == "h264" else cls(codec or "av1")

    def check(self, camera: str, height: int, width: int) -> None:
        """Raise ValueError if PyAV lacks the encoder or images of this size cannot be encoded."""
        if self.codec not in ENCODERS:
            raise ValueError(f"codec {self.codec!r} is not one of {', '.join(ENCODERS)}")
        if ENCODERS[self.codec] not in av.codecs_available:
            raise ValueError(
                f"codec {self.codec!r}: this build of PyAV has no {ENCODERS[self.codec]} encoder. "
                "Choose the other of av1 and h264, or install PyAV from its binary wheels"
            )
        if "420" in self.pix_fmt and (height % 2 or width % 2):
            raise ValueError(
                f"{camera!r}: {self.pix_fmt} video needs an even height and width, found "
                f'{height}x{width}. Crop or pad by one pixel, or record with dtype "image"'
            )

    def describe(self) -> dict[str, Any]:
        """Return the encoder's part of a video feature's "info", as LeRobot v3.0 writes it."""
        return {
            "video.g": self.g,
            "video.crf": self.crf,
            "video.preset": self.preset,
            "video.fast_decode": 0,
            "video.video_backend": "pyav",
            "video.extra_options": {},
        }


def encode_png(images: Images) -> list[bytes]:
    """Encode losslessly, for features stored inside the data files."""
    encoded = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
        encoded.append(buffer.getvalue())
    return encoded


def encode_video(images: Images, path: Path, fps: float, encoding: VideoEncoding) -> Path:
    """Write one mp4, frame i at exactly i / fps seconds, and return its path."""
    # SVT-AV1 prints two dozen lines per file unless this variable says otherwise.
    os.environ.setdefault("SVT_LOG", "1")
    rate = Fraction(fps).limit_denominator(10_000)  # encoders take a fraction
    options = {name: str(getattr(encoding, name)) for name in ("g", "crf", "preset")}
    if encoding.codec == "h264":
        options["bf"] = "0"  # without B-frames, x264 returns frames in the order of their times
    first = next(images)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(ENCODERS[encoding.codec], rate=rate, options=options)
        assert isinstance(stream, av.VideoStream)  # for mypy: both encoders make video
        stream.height, stream.width = first.shape[:2]
        stream.pix_fmt = encoding.pix_fmt
        stream.codec_context.time_base = 1 / rate
        for number, image in enumerate(itertools.chain([first], images)):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            with priority_kept() if number == 0 else contextlib.nullcontext():
                container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@contextlib.contextmanager
def priority_kept() -> Iterator[None]:
    """Keep this thread, and those that it starts meanwhile, from becoming real-time threads.

    For the user root, SVT-AV1 gives its threads and its caller the highest real-time priority of
    the machine when it opens: a robot's control loop would have to wait for a video encoder.
    """
    if not _THREADS.is_dir():  # SVT-AV1 does this on Linux only
        yield
        return
    before = {int(thread.name) for thread in _THREADS.iterdir()} - {threading.get_native_id()}
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    highest = os.sched_get_priority_max(os.SCHED_FIFO)
    try:
        yield
    finally:
        for thread in {int(thread.name) for thread in _THREADS.iterdir()} - before:
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                if os.sched_getparam(thread).sched_priority == highest:
                    os.sched_setscheduler(thread, policy, parameters)


class CameraThread:
    """Runs `encode` on the frames of one camera during one episode and counts their histograms.

    An error inside the thread is raised by the next `add` or by `finish`.
    """

    def __init__(self, name: str, encode: Callable[[Images], Any]) -> None:
        self.histograms: list[np.ndarray] = []
        self._encode = encode
        self._encoded: Future[Any] = Future()
        self._queue: queue.Queue[np.ndarray | None] = queue.Queue(maxsize=QUEUE_FRAMES)
        self._cancelled = self._ended = False
        # A daemon: a program that exits without saving must not wait for the queue.
        self._thread = threading.Thread(target=self._run, name=f"camera {name}", daemon=True)
        self._thread.start()

    def add(self, image: UInt8[np.ndarray, "h w 3"]) -> None:
        if self._encoded.done():
            self._encoded.result()
        self._queue.put(image)

    def finish(self) -> Any:
        """Wait until every frame is encoded, and return what `encode` returned."""
        self._queue.put(None)
        self._thread.join()
        return self._encoded.result()

    def cancel(self) -> None:
        """Stop without encoding the frames that are waiting."""
        self._cancelled = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._encoded.set_result(self._encode(self._images()))
        except CancelledError:
            pass
        except BaseException as error:
            self._encoded.set_exception(error)
            # Keep taking frames, or the recording loop would wait for ever on a full queue. There
            # are none if the error came at the end of the video.
            while not self._ended and self._queue.get() is not None:
                pass

    def _images(self) -> Images:
        while (image := self._queue.get()) is not None:
            if not self._cancelled:
                yield image
                self.histograms.append(frame_histogram(image))
        self._ended = True
        if self._cancelled:
            raise CancelledError


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
    def open(cls, root: str | Path, codec: str | VideoEncoding | None = None) -> "Recorder":
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
