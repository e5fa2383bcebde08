"""Frames of a video file at given times: seek to the nearest key frame, decode, convert once.

A frame is only handed out if its own time is the time that was asked for, within a tolerance, and
if nothing on the way to it was damaged. Knows nothing of data sets. Decoders stay open in
`VideoReaders`; each is used by one thread at a time, and several files decode at once because
decoding releases Python's lock.

Each decoder uses one thread. Threads inside a decoder only help when frames are read in order:
after a seek they decode frames ahead that nobody wants (measured on AV1 with a key frame every
second frame: 12.0 ms of processor time per frame, 8.9 ms with one thread).
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from jaxtyping import UInt8

TOLERANCE_S = 1e-4
# Seeking restarts the decoder: going on is cheaper up to this many frames before the key frame.
SEEK_FRAMES = 2
# Decoders that take the wish to skip a frame for the packet at hand (dav1d takes it some later).
SKIPS_AT_ONCE = ("h264", "hevc", "mpeg4")


class VideoError(ValueError):
    """A frame that cannot be had; names the file and the time."""


class VideoReader:
    """One open file. Not for two threads at once; see `VideoReaders`."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self._container: InputContainer = av.open(str(path))
        except (av.error.FFmpegError, OSError) as error:
            raise VideoError(f"{path} cannot be opened as a video: {error}") from None
        if not self._container.streams.video:
            self._container.close()
            raise VideoError(f"{path} holds no video stream.")
        self._stream: VideoStream = self._container.streams.video[0]
        self._stream.thread_type = "NONE"
        self._stream.codec_context.thread_count = 1
        # Damaged data must be an error, not a plausible picture.
        self._stream.codec_context.options = {"err_detect": "explode"}
        self._time_base = float(self._stream.time_base or 0)
        self._decode_times, self._keys = _index(self._stream)
        self._reformatter = VideoReformatter()  # kept: setting up a conversion costs as much as one
        self._frames: Iterator[VideoFrame] = iter(())
        self._current: VideoFrame | None = None
        self._wanted = 0  # in the stream's own time units
        self._skipping = False
        self._can_skip = self.codec in SKIPS_AT_ONCE

    @property
    def codec(self) -> str:
        """As data sets name it: h264, av1, mpeg4, …"""
        name = self._stream.codec_context.codec.canonical_name
        return {"libdav1d": "av1"}.get(name, name)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self._stream.height, self._stream.width

    @property
    def fps(self) -> float | None:
        return float(self._stream.average_rate) if self._stream.average_rate else None

    def frames_at(
        self, timestamps: Sequence[float], tolerance: float = TOLERANCE_S
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """RGB frames at these seconds, in the order asked for; decoded in the order of time."""
        images: list[np.ndarray | None] = [None] * len(timestamps)
        for position in sorted(range(len(timestamps)), key=lambda i: timestamps[i]):
            images[position] = self._rgb(self._frame_at(float(timestamps[position]), tolerance))
        if not images:
            return np.empty((0, *self.size, 3), np.uint8)
        return np.stack([image for image in images if image is not None])

    def brightness(
        self, timestamps: Iterable[float], tolerance: float = TOLERANCE_S
    ) -> Iterator[UInt8[np.ndarray, "h w"]]:
        """The frames in gray, one after another: enough to see that each is there and not black."""
        gray = VideoReformatter()
        for time in timestamps:
            frame = self._frame_at(time, tolerance)
            yield gray.reformat(frame, format="gray", threads=1).to_ndarray()

    def close(self) -> None:
        self._frames, self._current = iter(()), None
        self._container.close()

    def _rgb(self, frame: VideoFrame) -> UInt8[np.ndarray, "h w 3"]:
        return self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()

    def _frame_at(self, time: float, tolerance: float) -> VideoFrame:
        self._wanted = math.floor((time - tolerance) / self._time_base)
        if self._should_seek(time, tolerance):
            self._seek_before(time, tolerance)
        frame = self._current
        while frame is None or self._time(frame) < time - tolerance:
            frame = self._advance()
            if frame is None:
                raise self._error(time, "the video ends before")
        found = self._time(frame)
        if found > time + tolerance:
            raise self._error(time, f"the next frame is at {found:.6f} s")
        return frame

    def _should_seek(self, time: float, tolerance: float) -> bool:
        if self._current is None:
            return True
        now = self._time(self._current)
        if time < now - tolerance:
            return True
        key = self._key_before(time)
        return key is not None and key > self._position(now) + SEEK_FRAMES

    def _seek_before(self, time: float, tolerance: float) -> None:
        """Stand on a frame at or before `time`, or on the first one."""
        key = self._key_before(time)
        if key is None:
            self._begin_at(time, tolerance)
            return
        number = bisect.bisect_right(self._keys, key) - 1
        while True:
            self._seek_to(self._decode_times[self._keys[number]])
            try:
                frame = self._advance()
            except VideoError:
                if number == 0:
                    raise
                # Not a place to begin (an open group of pictures refers to frames before it).
                # Where the data is damaged instead, the way from the key frame before meets it too.
                del self._keys[number]
            else:
                # Frames that follow a key frame in the file may precede it in time.
                if number == 0 or frame is None or self._time(frame) <= time + tolerance:
                    return
            number -= 1

    def _begin_at(self, time: float, tolerance: float) -> None:
        """Files without an index: let the library search, else read from the start."""
        self._seek_to(round(time / self._time_base))
        frame = self._advance()
        if frame is None or self._time(frame) > time + tolerance:
            self._seek_to(None)

    def _seek_to(self, timestamp: int | None) -> None:
        start = self._stream.start_time or 0
        first = min(start, self._decode_times[0]) if self._decode_times else start
        try:
            self._container.seek(
                first if timestamp is None else timestamp, stream=self._stream, backward=True
            )
        except av.error.FFmpegError as error:
            raise VideoError(f"{self.path}: cannot seek: {error}") from None
        self._frames, self._current = self._decode(), None

    def _decode(self) -> Iterator[VideoFrame]:
        first: int | None = None
        for packet in self._container.demux(self._stream):
            if first is None:
                first = packet.pts
            # After a seek, frames that precede the key frame in time lack what they refer to.
            if first is None or packet.pts is None or packet.pts >= first:
                self._skip_unneeded(packet.pts)
                yield from packet.decode()

    def _skip_unneeded(self, pts: int | None) -> None:
        """On the way to a frame, those that no other refers to need not be decoded."""
        skip = self._can_skip and pts is not None and pts < self._wanted
        if skip != self._skipping:
            self._stream.codec_context.skip_frame = "NONREF" if skip else "DEFAULT"
            self._skipping = skip

    def _advance(self) -> VideoFrame | None:
        """On to the next frame; None at the end."""
        before, self._current = self._current, None
        try:
            frame = next(self._frames, None)
        except av.error.FFmpegError as error:
            where = f"after {self._time(before):.6f} s" if before is not None else "after a seek"
            raise VideoError(f"{self.path}: damaged {where}: {error}") from None
        if frame is not None and frame.is_corrupt:
            raise VideoError(f"{self.path}: damaged at {self._time(frame):.6f} s.")
        self._current = frame
        return frame

    def _time(self, frame: VideoFrame) -> float:
        if frame.pts is None:
            raise VideoError(f"{self.path}: its frames carry no times; re-encode it as mp4.")
        return frame.pts * self._time_base

    def _position(self, time: float) -> int:
        """About the how-maniest frame of the file, in decode order."""
        return bisect.bisect_right(self._decode_times, round(time / self._time_base)) - 1

    def _key_before(self, time: float) -> int | None:
        """Position of the last key frame that is decoded by `time`; None without an index."""
        if not self._keys:
            return None
        number = bisect.bisect_right(self._keys, self._position(time)) - 1
        return self._keys[max(number, 0)]

    def _error(self, time: float, what: str) -> VideoError:
        return VideoError(f"{self.path}: no frame at {time:.6f} s: {what}.")


def _index(stream: VideoStream) -> tuple[list[int], list[int]]:
    """Decode times of all frames, and which of them are key frames, as the file's header says."""
    times, keys = [], []
    for position, entry in enumerate(stream.index_entries):
        times.append(entry.timestamp)
        if entry.is_keyframe:
            keys.append(position)
    return times, keys


class VideoReaders:
    """Readers kept open, least recently used closed first. Safe for threads, forks and pickling."""

    def __init__(self, capacity: int = 32):
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; at least one reader has to be kept.")
        self.capacity = capacity
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[VideoReader] = []  # the most recently used last

    def frames_at(
        self, path: Path, timestamps: Sequence[float], tolerance: float = TOLERANCE_S
    ) -> UInt8[np.ndarray, "n h w 3"]:
        with self.reading(path) as reader:
            return reader.frames_at(timestamps, tolerance)

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[VideoReader]:
        """A reader for this thread alone; a second thread on the same file gets another one."""
        reader = self._take(path) or VideoReader(path)
        try:
            yield reader
        except BaseException:
            reader.close()  # where it stands is unknown
            raise
        self._give_back(reader)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for reader in idle:
            reader.close()

    def _take(self, path: Path) -> VideoReader | None:
        if self._process != os.getpid():
            # Forked: the parent's decoders share its file positions, and closing them can wait for
            # threads that exist only in the parent. They are kept and never touched.
            _inherited.append(self._idle)
            self._start()
        with self._lock:
            for number in range(len(self._idle) - 1, -1, -1):
                if self._idle[number].path == path:
                    return self._idle.pop(number)
        return None

    def _give_back(self, reader: VideoReader) -> None:
        with self._lock:
            self._idle.append(reader)
            surplus = self._idle[: -self.capacity]
            self._idle = self._idle[-self.capacity :]
        for old in surplus:
            old.close()

    def __getstate__(self) -> dict[str, int]:
        return {"capacity": self.capacity}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.capacity = state["capacity"]
        self._start()


_inherited: list[list[VideoReader]] = []
