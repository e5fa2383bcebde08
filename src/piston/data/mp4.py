"""What an mp4 file's boxes say, without a decoder: is it whole, how many frames, how far apart.

A few small reads per file, so that a whole data set can be looked over when it is opened. Knows
nothing of codecs; whether each frame can be decoded only `check` finds out.

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
class _Box:
    kind: bytes
    body: int  # where its content begins
    end: int


@dataclasses.dataclass(frozen=True)
class VideoHeader:
    """`spacing`: the usual seconds from frame to frame, known to `resolution` (0: all alike)."""

    num_frames: int
    spacing: float | None
    resolution: float

    def drift(self, fps: float, num_frames: int) -> float:
        """Seconds by which the last of so many frames is not where this rate puts it, at least."""
        if self.spacing is None:
            return 0.0
        return (num_frames - 1) * max(0.0, abs(self.spacing - 1 / fps) - self.resolution)


def read_header(path: Path) -> VideoHeader | None:
    """What the header says; None where it does not (another format, fragments)."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size == 0:
            raise CutFileError("the file is empty")
        boxes = list(_boxes(file, 0, size))
        if not boxes or boxes[0].kind not in _TOP:
            return None
        if boxes[-1].end > size:
            raise CutFileError(f"the file is cut: {boxes[-1].end - size:,} bytes are missing")
        moov = next((box for box in boxes if box.kind == b"moov"), None)
        if moov is None:
            raise CutFileError("the file is cut: its header (moov) was never written")
        return _video_header(file, moov)


def _video_header(file: BinaryIO, moov: _Box) -> VideoHeader | None:
    inside = list(_boxes(file, moov.body, moov.end))
    if any(box.kind == b"mvex" for box in inside):  # fragments: the count is spread over the file
        return None
    for track in (box for box in inside if box.kind == b"trak"):
        media = _child(file, track, b"mdia")
        handler = _child(file, media, b"hdlr")
        if handler is None or _read(file, handler.body + 8, 4) != b"vide":
            continue
        table = _child(file, _child(file, media, b"minf"), b"stbl")
        sizes = _child(file, table, b"stsz")
        if sizes is not None:
            count = int.from_bytes(_read(file, sizes.body + 8, 4), "big")
            times = _child(file, table, b"stts")
            return VideoHeader(count, *_spacing(file, _child(file, media, b"mdhd"), times, count))
    return None


def _spacing(
    file: BinaryIO, media: _Box | None, times: _Box | None, num_frames: int
) -> tuple[float | None, float]:
    if media is None or times is None:
        return None, 0.0
    # Version 1 has dates of 64 bits before the time scale.
    place = media.body + (20 if _read(file, media.body, 1) == b"\1" else 12)
    units = int.from_bytes(_read(file, place, 4), "big")
    runs = _read(file, times.body + 8, times.end - times.body - 8)
    entries = [struct.unpack_from(">II", runs, at) for at in range(0, len(runs) - 7, 8)]
    counts: collections.Counter[int] = collections.Counter()
    for count, distance in entries:
        counts[distance] += count
    if entries and num_frames > 1:
        counts[entries[-1][1]] -= 1  # how long the last frame is shown is nobody's distance
    distances = [distance for distance, count in counts.most_common() if count > 0]
    if not distances or not units:
        return None, 0.0
    return distances[0] / units, (1 / units if len(distances) > 1 else 0.0)


def _child(file: BinaryIO, box: _Box | None, kind: bytes) -> _Box | None:
    if box is None:
        return None
    return next((inner for inner in _boxes(file, box.body, box.end) if inner.kind == kind), None)


def _boxes(file: BinaryIO, start: int, stop: int) -> Iterator[_Box]:
    """The boxes between two positions; the last one may claim to go on beyond."""
    while start + 8 <= stop:
        head = _read(file, start, 16)
        size, kind, body = int.from_bytes(head[:4], "big"), head[4:8], start + 8
        if size == 1:  # too large for 32 bits
            size, body = int.from_bytes(head[8:16], "big"), start + 16
        elif size == 0:  # to the end
            size = stop - start
        if size < body - start:
            return  # nonsense: not this format
        yield _Box(kind, body, start + size)
        start += size


def _read(file: BinaryIO, position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)
