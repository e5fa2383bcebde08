"""From frames to an mp4 (or PNGs), while the robot moves.

Knows codecs and one background thread per camera. Knows nothing of episodes, features or where
files end up. The queue between the recording loop and a thread is bounded: when encoding cannot
keep up, `add` waits instead of filling memory.
"""

import abc
import contextlib
import dataclasses
import io
import os
import queue
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from piston.data.episode_stats import frame_histogram

ENCODERS = {"av1": "libsvtav1", "h264": "libx264"}
QUEUE_FRAMES = 32
_THREADS = Path("/proc/self/task")


@dataclasses.dataclass(frozen=True)
class VideoEncoding:
    """How videos are compressed. `VideoEncoding()` is LeRobot's default.

    A key frame every `g` frames makes random access fast. `h264` with preset "ultrafast" takes the
    least CPU time.
    """

    codec: str = "av1"
    g: int = 2
    crf: int = 30
    preset: int | str = 12
    pix_fmt: str = "yuv420p"

    @staticmethod
    def named(codec: "str | VideoEncoding") -> "VideoEncoding":
        """Good settings for a codec by name: "av1" (small files) or "h264" (little CPU time)."""
        if isinstance(codec, VideoEncoding):
            return codec
        if codec == "h264":
            return VideoEncoding("h264", crf=20, preset="ultrafast")
        return VideoEncoding(codec)

    def check(self, camera: str, height: int, width: int) -> None:
        """Raises when this installation or this image size cannot be encoded so."""
        if self.codec not in ENCODERS:
            raise ValueError(f"codec {self.codec!r} is not one of {', '.join(ENCODERS)}")
        if not encoder_available(self.codec):
            raise ValueError(
                f"codec {self.codec!r}: this build of PyAV has no {ENCODERS[self.codec]} encoder. "
                "Choose the other of av1 and h264, or install PyAV from its binary wheels"
            )
        if "420" in self.pix_fmt and (height % 2 or width % 2):
            raise ValueError(
                f"{camera!r}: {self.pix_fmt} video needs an even height and width, found "
                f'{height}x{width}. Crop or pad by one pixel, or record with dtype "image"'
            )

    def options(self) -> dict[str, str]:
        """What the encoder is told."""
        options = {"g": str(self.g), "crf": str(self.crf), "preset": str(self.preset)}
        # Frames leave x264 in the order in which they came, so that times stay simple.
        return options | ({"bf": "0"} if self.codec == "h264" else {})

    def describe(self) -> dict[str, Any]:
        """The encoder's part of a video feature's info, as LeRobot v3.0 writes it."""
        return {
            "video.g": self.g,
            "video.crf": self.crf,
            "video.preset": self.preset,
            "video.fast_decode": 0,
            "video.video_backend": "pyav",
            "video.extra_options": {},
        }


def encoder_available(codec: str) -> bool:
    return ENCODERS[codec] in av.codecs_available


class CameraThread(abc.ABC):
    """Takes the frames of one camera and one episode; `finish` gives their histograms.

    An error inside the thread is raised by the next `add` or by `finish`.
    """

    def __init__(self, name: str) -> None:
        self.histograms: list[np.ndarray] = []
        self._queue: queue.Queue[np.ndarray | None] = queue.Queue(maxsize=QUEUE_FRAMES)
        self._error: BaseException | None = None
        self._cancelled = False
        # A daemon: a program that dies without saving must not hang on a half-filled queue.
        self._thread = threading.Thread(target=self._run, name=f"camera {name}", daemon=True)
        self._thread.start()

    def add(self, image: UInt8[np.ndarray, "h w 3"]) -> None:
        self._raise_error()
        self._queue.put(image)

    def finish(self) -> None:
        """Waits until every frame is written."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def cancel(self) -> None:
        """Stops without keeping anything."""
        self._cancelled = True
        self._queue.put(None)
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._open()
            while (image := self._queue.get()) is not None:
                if not self._cancelled:
                    self._write(image)
                    self.histograms.append(frame_histogram(image))
            self._close()
        except BaseException as error:
            self._error = error
            # Keep taking frames, or the recording loop would wait for ever on a full queue.
            while self._queue.get() is not None:
                pass

    @abc.abstractmethod
    def _write(self, image: UInt8[np.ndarray, "h w 3"]) -> None: ...

    def _open(self) -> None:  # noqa: B027, not every kind of file has something to open
        pass

    def _close(self) -> None:  # noqa: B027
        pass


class PngThread(CameraThread):
    """Frames as PNG bytes, for features stored inside the data files. Loses nothing."""

    def __init__(self, name: str) -> None:
        self.images: list[bytes] = []
        super().__init__(name)

    def _write(self, image: UInt8[np.ndarray, "h w 3"]) -> None:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
        self.images.append(buffer.getvalue())


class VideoThread(CameraThread):
    """Frames into one mp4 at `path`, frame i at exactly i / fps seconds."""

    def __init__(
        self, name: str, path: Path, fps: float, shape: list[int], encoding: VideoEncoding
    ) -> None:
        self.path = path
        self._fps = as_fraction(fps)
        self._height, self._width = shape[:2]
        self._encoding = encoding
        super().__init__(name)

    def _open(self) -> None:
        # SVT-AV1 prints two dozen lines for every file unless told otherwise, and only listens to
        # this variable.
        os.environ.setdefault("SVT_LOG", "1")
        self._num_frames = 0
        self._container = av.open(str(self.path), "w", format="mp4")
        name, options = ENCODERS[self._encoding.codec], self._encoding.options()
        stream = self._container.add_stream(name, rate=self._fps, options=options)
        assert isinstance(stream, av.VideoStream)  # both encoders make video; says so to mypy
        stream.height, stream.width = self._height, self._width
        stream.pix_fmt = self._encoding.pix_fmt
        stream.codec_context.time_base = 1 / self._fps
        self._stream = stream

    def _write(self, image: UInt8[np.ndarray, "h w 3"]) -> None:
        frame = av.VideoFrame.from_ndarray(image, format="rgb24")
        frame.pts, frame.time_base = self._num_frames, 1 / self._fps
        with priority_kept() if self._num_frames == 0 else contextlib.nullcontext():
            self._container.mux(self._stream.encode(frame))
        self._num_frames += 1

    def _close(self) -> None:
        try:
            if not self._cancelled:
                self._container.mux(self._stream.encode(None))
        finally:
            self._container.close()


@contextlib.contextmanager
def priority_kept() -> Iterator[None]:
    """This thread, and those that it starts meanwhile, do not become real-time threads.

    Where the user is root, SVT-AV1 gives its threads and its caller the highest real-time priority
    of the machine when it opens: a robot's control loop would wait for a video encoder.
    """
    if not _THREADS.is_dir():  # only Linux changes threads so
        yield
        return
    before = {int(thread.name) for thread in _THREADS.iterdir()} - {threading.get_native_id()}
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    highest = os.sched_get_priority_max(os.SCHED_FIFO)
    try:
        yield
    finally:
        for thread in {int(thread.name) for thread in _THREADS.iterdir()} - before:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                if os.sched_getparam(thread).sched_priority == highest:
                    os.sched_setscheduler(thread, policy, parameters)


def as_fraction(fps: float) -> Fraction:
    """Frames per second as encoders want them; 30000 / 1001 stays exact."""
    return Fraction(fps).limit_denominator(10_000)
