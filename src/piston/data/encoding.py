"""Encoding camera frames as mp4 or PNG in background threads while a robot moves.

The queue between the recording loop and a thread is bounded: when encoding cannot keep up, `add`
waits instead of filling memory. Where files end up is left to `writer`.
"""

import abc
import contextlib
import dataclasses
import io
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from piston.data.episode_stats import frame_histogram

ENCODERS = {"av1": "libsvtav1", "h264": "libx264"}
QUEUE_FRAMES = 32
_THREADS = Path("/proc/self/task")


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

    @staticmethod
    def named(codec: "str | VideoEncoding") -> "VideoEncoding":
        """Return the usual settings of "av1" (small files) or "h264" (least CPU time)."""
        if isinstance(codec, VideoEncoding):
            return codec
        if codec == "h264":
            return VideoEncoding("h264", crf=20, preset="ultrafast")
        return VideoEncoding(codec)

    def check(self, camera: str, height: int, width: int) -> None:
        """Raise ValueError if PyAV lacks the encoder or images of this size cannot be encoded."""
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
        """Return the options of the encoder."""
        options = {"g": str(self.g), "crf": str(self.crf), "preset": str(self.preset)}
        # Without B-frames, x264 returns frames in the order of their times.
        return options | ({"bf": "0"} if self.codec == "h264" else {})

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


def encoder_available(codec: str) -> bool:
    return ENCODERS[codec] in av.codecs_available


class CameraThread(abc.ABC):
    """Encodes the frames of one camera during one episode and counts their histograms.

    An error inside the thread is raised by the next `add` or by `finish`.
    """

    def __init__(self, name: str) -> None:
        self.histograms: list[np.ndarray] = []
        self._queue: queue.Queue[np.ndarray | None] = queue.Queue(maxsize=QUEUE_FRAMES)
        self._error: BaseException | None = None
        self._cancelled = False
        # A daemon: a program that exits without saving must not wait for the queue.
        self._thread = threading.Thread(target=self._run, name=f"camera {name}", daemon=True)
        self._thread.start()

    def add(self, image: UInt8[np.ndarray, "h w 3"]) -> None:
        self._raise_error()
        self._queue.put(image)

    def finish(self) -> None:
        """Wait until every frame is written."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def cancel(self) -> None:
        """Stop and keep nothing."""
        self._cancelled = True
        self._queue.put(None)
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
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

    @abc.abstractmethod
    def _close(self) -> None: ...


class PngThread(CameraThread):
    """Encodes frames losslessly as PNG, for features stored inside the data files."""

    def __init__(self, name: str) -> None:
        self.images: list[bytes] = []
        super().__init__(name)

    def _write(self, image: UInt8[np.ndarray, "h w 3"]) -> None:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
        self.images.append(buffer.getvalue())

    def _close(self) -> None:
        pass


class VideoThread(CameraThread):
    """Encodes frames into one mp4 at `path`, frame i at exactly i / fps seconds."""

    def __init__(
        self, name: str, path: Path, fps: float, shape: Sequence[int], encoding: VideoEncoding
    ) -> None:
        self.path = path
        # Encoders take a fraction; 30000 / 1001 stays exact.
        self._fps = Fraction(fps).limit_denominator(10_000)
        self._height, self._width = shape[:2]
        self._encoding = encoding
        self._container: av.container.OutputContainer | None = None
        super().__init__(name)

    def cancel(self) -> None:
        super().cancel()
        self.path.unlink(missing_ok=True)

    def _open(self) -> av.container.OutputContainer:
        # SVT-AV1 prints two dozen lines per file unless this variable says otherwise.
        os.environ.setdefault("SVT_LOG", "1")
        container = av.open(str(self.path), "w", format="mp4")
        name, options = ENCODERS[self._encoding.codec], self._encoding.options()
        stream = container.add_stream(name, rate=self._fps, options=options)
        assert isinstance(stream, av.VideoStream)  # for mypy: both encoders make video
        stream.height, stream.width = self._height, self._width
        stream.pix_fmt = self._encoding.pix_fmt
        stream.codec_context.time_base = 1 / self._fps
        self._container, self._stream = container, stream
        return container

    def _write(self, image: UInt8[np.ndarray, "h w 3"]) -> None:
        frame = av.VideoFrame.from_ndarray(image, format="rgb24")
        frame.pts, frame.time_base = len(self.histograms), 1 / self._fps
        if self._container is not None:
            self._container.mux(self._stream.encode(frame))
        else:
            with priority_kept():
                self._open().mux(self._stream.encode(frame))

    def _close(self) -> None:
        if self._container is not None:
            with contextlib.closing(self._container):
                if not self._cancelled:
                    self._container.mux(self._stream.encode(None))


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


def probe_video(path: Path, fps: float) -> tuple[dict[str, Any], Float[np.ndarray, " n"]]:
    """Return a video feature's "info" as LeRobot writes it and the times of all frames.

    No frame is decoded. Raise ValueError naming the file if its index is damaged.
    """
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            context = stream.codec_context
            packets = [packet for packet in container.demux(stream) if packet.dts is not None]
            if stream.time_base is None or not packets:
                raise ValueError(f"{path} holds no video frames")
            if any(packet.pts is None for packet in packets):
                raise ValueError(f"{path}: its frames have no times")
            info = {
                "video.height": context.height,
                "video.width": context.width,
                "video.codec": context.codec.canonical_name,
                "video.pix_fmt": context.pix_fmt or "unknown",
                "video.fps": fps,
                "video.channels": 3,
                "has_audio": bool(container.streams.audio),
            }
            return info, np.sort([float((p.pts or 0) * stream.time_base) for p in packets])
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} is not a readable video: {error}") from error
