"""Encoding while the robot moves: a thread per camera makes a video, or PNG images."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from PIL import Image

from piston.data.record.columns import frame_histogram

if TYPE_CHECKING:
    from jaxtyping import UInt8

logger = logging.getLogger(__name__)

ENCODERS = {"av1": "libsvtav1", "h264": "libx264"}
QUEUE_FRAMES = 32
_THREADS = Path("/proc/self/task")

Images = Iterator[np.ndarray]  # uint8 (h, w, 3)


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
    def choose(cls, codec: str | VideoEncoding | None) -> VideoEncoding:
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
