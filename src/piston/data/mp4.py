"""What an mp4 file's boxes say, without a decoder: is the file whole, how many frames has it.

A few small reads per file, so that a whole data set can be looked over when it is opened. Knows
nothing of codecs; whether each frame can be decoded only `check` finds out.

    ftyp │ mdat (the frames) │ moov ─ trak ─ mdia ─┬ hdlr "vide"
                                                   └ minf ─ stbl ─ stsz: number of frames
"""

from __future__ import annotations

import dataclasses
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


def count_frames(path: Path) -> int | None:
    """Video frames by the header; None where it does not say (another format, fragments)."""
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
        return _video_frames(file, moov)


def _video_frames(file: BinaryIO, moov: _Box) -> int | None:
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
            return int.from_bytes(_read(file, sizes.body + 8, 4), "big")
    return None


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
