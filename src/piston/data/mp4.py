"""Reading an mp4 file's header without a decoder: is it complete, how many frames, how far apart.

This takes a few small reads per file, so that all videos of a data set can be looked at when it is
opened. Whether every frame can be decoded is left to `check`.

    ftyp │ mdat (the frames) │ moov ─ trak ─ mdia ─┬ hdlr "vide"
                                                   ├ mdhd: units of time per second
                                                   └ minf ─ stbl ─┬ stsz: number of frames
                                                                  └ stts: units between frames
"""

from __future__ import annotations

import collections
import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_TOP = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"uuid", b"styp", b"sidx", b"moof"}


class CutFileError(ValueError):
    """The file ends before its content does."""


@dataclasses.dataclass(frozen=True)
class VideoHeader:
    """`spacing`: the most frequent seconds between frames, `resolution`: its error (0 if exact)."""

    num_frames: int
    spacing: float | None
    resolution: float

    def drift(self, fps: float, num_frames: int) -> float:
        """Return the least error of the last frame's time, in seconds, if `fps` were the rate."""
        if self.spacing is None:
            return 0.0
        return (num_frames - 1) * max(0.0, abs(self.spacing - 1 / fps) - self.resolution)


def read_header(path: Path) -> VideoHeader | None:
    """Return what the header says, or None for other formats and fragmented files.

    Raise CutFileError if the file is incomplete.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size == 0:
            raise CutFileError("the file is empty")
        boxes = list(_top_boxes(file, size))
        if not boxes or boxes[0][0] not in _TOP:
            return None
        if boxes[-1][2] > size:
            raise CutFileError(f"the file is cut: {boxes[-1][2] - size:,} bytes are missing")
        for kind, start, end in boxes:
            if kind == b"moov":
                file.seek(start)
                return _video_header(file.read(end - start))
    raise CutFileError("the file is cut: its header (moov) was never written")


def _top_boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start of the content and end of each box; the last may end beyond the file."""
    start = 0
    while start + 8 <= size:
        file.seek(start)
        kind, skip, length = _box(file.read(16), size - start)
        if length < skip:
            return  # not this format
        yield kind, start + skip, start + length
        start += length


def _box(data: bytes, rest: int) -> tuple[bytes, int, int]:
    """Return a box's kind, the length of its own header, and its length."""
    length, kind = struct.unpack_from(">I4s", data)
    if length == 1 and len(data) >= 16:  # too large for 32 bits
        return kind, 16, struct.unpack_from(">Q", data, 8)[0]
    return kind, 8, length or rest  # 0: to the end


def _children(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    while len(data) >= 8:
        kind, skip, length = _box(data[:16], len(data))
        if length < skip:
            return
        yield kind, data[skip:length]
        data = data[length:]


def _child(data: bytes, *kinds: bytes) -> bytes:
    """Return the content of the first box on this path; empty if there is none."""
    for kind in kinds:
        data = next((body for found, body in _children(data) if found == kind), b"")
    return data


def _video_header(moov: bytes) -> VideoHeader | None:
    boxes = list(_children(moov))
    if any(kind == b"mvex" for kind, _ in boxes):  # fragments: the count is spread over the file
        return None
    for media in (_child(body, b"mdia") for kind, body in boxes if kind == b"trak"):
        table = _child(media, b"minf", b"stbl")
        sizes = _child(table, b"stsz")
        if _child(media, b"hdlr")[8:12] == b"vide" and len(sizes) >= 12:
            count = int.from_bytes(sizes[8:12], "big")
            return VideoHeader(
                count, *_spacing(_child(media, b"mdhd"), _child(table, b"stts"), count)
            )
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
