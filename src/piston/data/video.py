"""Frames of a video file at given times: seek to the nearest key frame, decode, convert once.

A frame is returned only if its own time is the requested time, within a tolerance, and if nothing
that had to be decoded before it was damaged. Decoders stay open in `VideoReaders`; each is used by
one thread at a time, and several files are decoded at once because decoding releases the GIL.

Each decoder uses one thread. Threads inside a decoder help only if frames are read in order: after
a seek they decode frames ahead that are not needed (measured on AV1 with a key frame every second
frame: 12.0 ms of CPU time per frame, 8.9 ms with one thread).

`read_header` looks at an mp4 file without a decoder: whether it is complete, and its frame count.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

TOLERANCE_S = 1e-4  # between the time asked for and a frame's own
# Open readers per process. Recorded sets have a file per episode and camera. Opening one costs as
# much as decoding a small frame; an open reader takes 1 to 3 MB.
MAX_READERS = 128
# A seek restarts the decoder: decoding on is cheaper if the key frame is at most so many frames on.
SEEK_FRAMES = 2
# Decoders that apply `skip_frame` to the current packet (dav1d applies it some packets later).
SKIPS_AT_ONCE = ("h264", "hevc", "mpeg4")


class VideoError(ValueError):
    """A frame cannot be read; the message has the file and the time."""


def _require_decoder(stream: VideoStream, path: str | os.PathLike[str]) -> None:
    if getattr(stream, "codec_context", None) is None:  # PyAV has none for an unknown tag
        raise VideoError(
            f"{path} has video of a codec that this build of PyAV does not know. The file is "
            "damaged, or has to be encoded anew."
        )


class VideoReader:
    """One open file, for one thread at a time; see `VideoReaders`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._container: InputContainer = av.open(str(path))
        except (av.error.FFmpegError, OSError) as error:
            raise VideoError(f"{path} cannot be opened as a video: {error}") from None
        if not self._container.streams.video:
            self._container.close()
            raise VideoError(f"{path} has no video stream.")
        self._stream: VideoStream = self._container.streams.video[0]
        try:
            _require_decoder(self._stream, path)
        except VideoError:
            self._container.close()
            raise
        self._stream.thread_type = "NONE"
        self._stream.codec_context.thread_count = 1
        self.size = self._stream.height, self._stream.width  # as the header says
        # Damaged data must raise an error, not return a plausible image: every error that FFmpeg
        # finds counts, with the checksums that HEVC may have; dav1d (AV1) reports all that breaks
        # the standard; a frame that claims to be far larger than the header says is not decoded.
        self._stream.codec_context.options = {
            "err_detect": "crccheck+explode",
            "max_pixels": str(2**20 + 4 * math.prod(self.size)),
            **({"strict": "strict"} if self.codec == "av1" else {}),
        }
        self._time_base = float(self._stream.time_base or 0)
        # In decode order, as the file's header says: all frames' times, and which are key frames.
        entries = list(self._stream.index_entries)
        self._decode_times = [entry.timestamp for entry in entries]
        self._keys = [position for position, entry in enumerate(entries) if entry.is_keyframe]
        self._reformatter = VideoReformatter()  # kept: creating one costs as much as a conversion
        self._frames: Iterator[VideoFrame] = iter(())
        self._current: VideoFrame | None = None
        self._wanted = 0  # in the stream's own time units
        self._skipping = False
        self._can_skip = self.codec in SKIPS_AT_ONCE

    @property
    def codec(self) -> str:
        """The name that data sets use: h264, av1, mpeg4, …"""
        name = self._stream.codec_context.codec.canonical_name
        return {"libdav1d": "av1"}.get(name, name)

    def frames_at(self, timestamps: Sequence[float]) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the RGB frames at these seconds, in the given order."""
        images = np.empty((len(timestamps), *self.size, 3), np.uint8)
        for position in np.argsort(timestamps, kind="stable").tolist():
            frame = self._frame_at(float(timestamps[position]))
            rgb = self._reformatter.reformat(frame, format="rgb24", threads=1)
            images[position] = rgb.to_ndarray()
        return images

    def brightness(self, timestamps: Iterable[float]) -> Iterator[UInt8[np.ndarray, "h w"]]:
        """Yield the frames in gray, which shows that each can be decoded and is not black."""
        gray = VideoReformatter()
        for time in timestamps:
            yield gray.reformat(self._frame_at(time), format="gray", threads=1).to_ndarray()

    def close(self) -> None:
        self._frames, self._current = iter(()), None
        self._container.close()

    def _frame_at(self, time: float) -> VideoFrame:
        self._wanted = math.floor((time - TOLERANCE_S) / self._time_base)
        seek = self._current is None or time < self._time(self._current) - TOLERANCE_S
        if self._current is not None and self._keys:
            position = self._position(self._time(self._current))
            seek |= self._keys[self._key_before(time)] > position + SEEK_FRAMES
        if seek:
            self._seek_before(time)
        frame = self._current
        while frame is None or self._time(frame) < time - TOLERANCE_S:
            frame = self._advance()
            if frame is None:
                raise VideoError(f"{self.path}: no frame at {time:.6f} s: the video ends before.")
        found = self._time(frame)
        if found > time + TOLERANCE_S:
            raise VideoError(
                f"{self.path}: no frame at {time:.6f} s: the next frame is at {found:.6f} s."
            )
        return frame

    def _seek_before(self, time: float) -> None:
        """Decode a frame at or before `time`, or the first one."""
        if not self._keys:  # a file without an index: let the library search
            self._seek_to(round(time / self._time_base))
            frame = self._advance()
            if frame is None or self._time(frame) > time + TOLERANCE_S:
                self._seek_to(None)
            return
        number = self._key_before(time)
        while True:
            self._seek_to(self._decode_times[self._keys[number]])
            try:
                frame = self._advance()
            except VideoError:
                if number == 0:
                    raise
                # Decoding cannot begin here (an open group of pictures refers to earlier frames).
                # If the data is damaged instead, decoding from the key frame before finds that too.
                del self._keys[number]
            else:
                # Frames that follow a key frame in the file may precede it in time.
                if number == 0 or frame is None or self._time(frame) <= time + TOLERANCE_S:
                    return
            number -= 1

    def _seek_to(self, timestamp: int | None) -> None:
        """Go to a time in the stream's units; None is the beginning."""
        if timestamp is None:
            timestamp = min([self._stream.start_time or 0, *self._decode_times[:1]])
        try:
            self._container.seek(timestamp, stream=self._stream, backward=True)
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
                # Frames before the wanted one that no other frame refers to are not decoded.
                skip = self._can_skip and packet.pts is not None and packet.pts < self._wanted
                if skip != self._skipping:
                    self._stream.codec_context.skip_frame = "NONREF" if skip else "DEFAULT"
                    self._skipping = skip
                yield from packet.decode()

    def _advance(self) -> VideoFrame | None:
        """Decode the next frame; None at the end."""
        before, self._current = self._current, None
        try:
            frame = next(self._frames, None)
        except av.error.FFmpegError as error:
            where = f"after {self._time(before):.6f} s" if before is not None else "after a seek"
            raise VideoError(f"{self.path}: damaged {where}: {error}") from None
        if frame is not None:
            self._check(frame, before)
        self._current = frame
        return frame

    def _check(self, frame: VideoFrame, before: VideoFrame | None) -> None:
        where = f"{self.path}: damaged at {self._time(frame):.6f} s"
        if frame.is_corrupt:
            raise VideoError(where + ".")
        if (frame.height, frame.width) != self.size:
            found, expected = f"{frame.width}×{frame.height}", "{1}×{0}".format(*self.size)
            raise VideoError(f"{where}: the frame has {found} pixels, the video {expected}.")
        if before is not None and self._time(frame) <= self._time(before):
            raise VideoError(f"{where}: the frame before it is at {self._time(before):.6f} s.")

    def _time(self, frame: VideoFrame) -> float:
        if frame.pts is None:
            raise VideoError(f"{self.path}: its frames have no times; encode it again as mp4.")
        return frame.pts * self._time_base

    def _position(self, time: float) -> int:
        """Return about which frame of the file is decoded at `time`."""
        return bisect.bisect_right(self._decode_times, round(time / self._time_base)) - 1

    def _key_before(self, time: float) -> int:
        """Return the number of the last key frame that is decoded by `time`, or of the first."""
        return max(bisect.bisect_right(self._keys, self._position(time)) - 1, 0)


def num_usable_cpus() -> int:
    """Return how many CPUs this process may use: in a container, fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class VideoReaders:
    """Open readers; the least recently used is closed first. Safe for threads, forks, pickling."""

    def __init__(self) -> None:
        # By process, since a forked one must neither use the readers of its parent, which share
        # file positions, nor close them, which can wait for threads that it does not have.
        self._by_process: dict[int, tuple[threading.Lock, list[VideoReader]]] = {}

    def _own(self) -> tuple[threading.Lock, list[VideoReader]]:
        """Return the idle readers of this process, the most recently used last, and their lock."""
        return self._by_process.setdefault(os.getpid(), (threading.Lock(), []))

    def frames_at(self, path: Path, timestamps: Sequence[float]) -> UInt8[np.ndarray, "n h w 3"]:
        """Read frames of a file. Two threads on the same file get a reader each."""
        lock, idle = self._own()
        with lock:
            reader = next((one for one in reversed(idle) if one.path == path), None)
            if reader is not None:
                idle.remove(reader)
        reader = reader or VideoReader(path)
        try:
            frames = reader.frames_at(timestamps)
        except BaseException:
            reader.close()  # its position is unknown
            raise
        with lock:
            idle.append(reader)
        self.close(keep=MAX_READERS)
        return frames

    def close(self, keep: int = 0) -> None:
        """Close the idle readers, except the ones used last."""
        lock, idle = self._own()
        with lock:
            surplus = idle[: max(len(idle) - keep, 0)]
            del idle[: len(surplus)]
        for reader in surplus:
            reader.close()

    def __reduce__(self) -> tuple[type[VideoReaders], tuple[()]]:
        return VideoReaders, ()


def probe_video(path: Path, fps: float) -> tuple[dict[str, Any], Float[np.ndarray, " n"]]:
    """Return a video feature's "info" as LeRobot writes it and the times of all frames.

    No frame is decoded. Raise ValueError naming the file if its index is damaged.
    """
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            _require_decoder(stream, path)
            context = stream.codec_context
            times = [packet.pts for packet in container.demux(stream) if packet.dts is not None]
            if stream.time_base is None or not times:
                raise ValueError(f"{path} holds no video frames")
            if None in times:
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
            return info, np.sort(np.array(times, np.float64)) * float(stream.time_base)
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} is not a readable video: {error}") from error


@dataclasses.dataclass(frozen=True)
class VideoHeader:
    """`spacing`: the most frequent seconds between frames, `resolution`: its error (0 if exact)."""

    num_frames: int
    spacing: float | None
    resolution: float


# A text says what is wrong with the file; None: it is of another format, or fragmented.
Header = VideoHeader | str | None

_MP4_BOXES = {
    *(b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"uuid", b"styp", b"sidx", b"moof")
}


def read_header(path: Path) -> Header:
    """Return what an mp4 file's header says. This takes 0.1 ms, opening a decoder 1 to 10 ms.

    ftyp │ mdat (the frames) │ moov ─ trak ─ mdia ─┬ hdlr "vide"
                                                   ├ mdhd: units of time per second
                                                   └ minf ─ stbl ─┬ stsz: number of frames
                                                                  └ stts: units between frames
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return "is empty"
            boxes = list(_boxes(file, 0, size))
            if not boxes or boxes[0][0] not in _MP4_BOXES:
                return None
            if boxes[-1][2] > size:
                return f"is cut: {boxes[-1][2] - size:,} bytes are missing"
            for kind, start, end in boxes:
                if kind == b"moov":
                    return _video_header(file, list(_boxes(file, start, end)))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "is cut: its header (moov) was never written"


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of each box's content; the last may end beyond `end`."""
    while start + 8 <= end:
        file.seek(start)
        data, skip = file.read(16), 8
        if len(data) < 8:
            return
        length, kind = struct.unpack_from(">I4s", data)
        if length == 1 and len(data) == 16:  # too large for 32 bits
            skip, length = 16, struct.unpack_from(">Q", data, 8)[0]
        length = length or end - start  # 0: to the end
        if length < skip:
            return  # not this format
        yield kind, start + skip, start + length
        start += length


def _video_header(file: BinaryIO, moov: list[tuple[bytes, int, int]]) -> VideoHeader | None:
    def read(start: int, end: int, *kinds: bytes) -> bytes:
        """Return the content of the first box on this path; empty if there is none."""
        for kind in kinds:
            boxes = _boxes(file, start, end)
            start, end = next(((s, e) for found, s, e in boxes if found == kind), (0, 0))
        file.seek(start)
        return file.read(end - start)

    if any(kind == b"mvex" for kind, *_ in moov):  # fragments: the count is spread over the file
        return None
    for track in ((start, end) for kind, start, end in moov if kind == b"trak"):
        sizes = read(*track, b"mdia", b"minf", b"stbl", b"stsz")
        if read(*track, b"mdia", b"hdlr")[8:12] == b"vide" and len(sizes) >= 12:
            times = read(*track, b"mdia", b"minf", b"stbl", b"stts")
            count = int.from_bytes(sizes[8:12], "big")
            return VideoHeader(count, *_spacing(read(*track, b"mdia", b"mdhd"), times, count))
    return None


def _spacing(media: bytes, times: bytes, num_frames: int) -> tuple[float | None, float]:
    # Version 1 has dates of 64 bits before the time scale.
    place = 20 if media[:1] == b"\1" else 12
    units = int.from_bytes(media[place : place + 4], "big")
    entries = [struct.unpack_from(">II", times, at) for at in range(8, len(times) - 7, 8)]
    counts: collections.Counter[int] = collections.Counter()
    for count, distance in entries:
        counts[distance] += count
    if entries and num_frames > 1:
        counts[entries[-1][1]] -= 1  # how long the last frame is shown is not a distance
    distances = [distance for distance, count in counts.most_common() if count > 0]
    if not distances or not units:
        return None, 0.0
    return distances[0] / units, (1 / units if len(distances) > 1 else 0.0)
