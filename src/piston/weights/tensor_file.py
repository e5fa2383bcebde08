"""One safetensors file: its header checked before anything is read, its tensors one by one.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": …}
    the rest  the tensors' bytes, back to back

Tensors are used where they lie in the mapped file, or read straight into the memory they will live
in: there is no second copy. Files written here carry a CRC-32 per tensor in their metadata, so that
damage to the data is found too.
Knows nothing of models or of what names mean.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import mmap
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from piston.weights.errors import CheckpointError, Shape

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CHUNK = 2**24  # bytes read or written at once: all that a change of dtype needs
_MAX_HEADER = 100_000_000  # as the public readers have it
CHECKSUMS = "piston.crc32"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    shape: Shape
    dtype: torch.dtype
    begin: int  # in the file
    end: int
    crc32: int | None = None


class TensorFile:
    """A checked safetensors file. `read_into` may be called from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Kept open: a file that is replaced meanwhile is still the one whose header was read.
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._descriptor)
        try:
            with open(self._descriptor, "rb", closefd=False) as file:
                header = _read_header(file, os.fstat(self._descriptor).st_size)
        except _BadHeader as error:
            raise CheckpointError(
                f"{path} is not a whole safetensors file: {error}. The file is damaged or was not "
                "copied completely; fetch or write it again."
            ) from error
        self.metadata, self.tensors = header

    def read_into(self, name: str, destination: Tensor) -> None:
        """Fill a tensor of the same shape, on any device and of any dtype."""
        info = self.tensors[name]
        if tuple(destination.shape) != info.shape:
            raise ValueError(
                f"{name} has shape {info.shape}, destination {tuple(destination.shape)}."
            )
        direct = (
            destination.dtype == info.dtype
            and destination.device.type == "cpu"
            and destination.is_contiguous()
        )
        if not (direct or destination.is_contiguous()):
            whole = torch.empty(info.shape, dtype=info.dtype)
            self.read_into(name, whole)
            destination.copy_(whole)
            return
        flat = destination.detach().view(-1)
        per_chunk = CHUNK // info.dtype.itemsize
        buffer = flat if direct else torch.empty(min(per_chunk, flat.numel()), dtype=info.dtype)
        crc = 0
        for start in range(0, flat.numel(), per_chunk):
            stop = min(start + per_chunk, flat.numel())
            chunk = flat[start:stop] if direct else buffer[: stop - start]
            view = bytes_of(chunk)
            self._fill(view, info.begin + start * info.dtype.itemsize, name)
            if info.crc32 is not None:
                crc = zlib.crc32(view, crc)
            if not direct:
                flat[start:stop].copy_(chunk)
        if info.crc32 is not None:
            self._check(name, crc)

    def map(self, name: str) -> Tensor | None:
        """The tensor where it lies in the file, without a copy; None where it lies unaligned.

        Writing to it changes memory of this process only, never the file.
        """
        info = self.tensors[name]
        count = math.prod(info.shape)
        if info.begin % info.dtype.itemsize or not count:
            return None
        flat = torch.frombuffer(self._mapping, dtype=info.dtype, count=count, offset=info.begin)
        if info.crc32 is not None:
            self._check(name, zlib.crc32(bytes_of(flat)))
        return flat.view(info.shape)

    @functools.cached_property
    def _mapping(self) -> mmap.mmap:
        mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_WILLNEED"):
            mapping.madvise(mmap.MADV_WILLNEED)  # starts reading a file that is not in memory yet
        return mapping

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor's bytes, a few at a time, in memory that each chunk takes over from the last."""
        info = self.tensors[name]
        buffer = torch.empty(min(CHUNK, info.end - info.begin), dtype=torch.uint8)
        for start in range(info.begin, info.end, CHUNK):
            chunk = buffer[: min(CHUNK, info.end - start)]
            self._fill(bytes_of(chunk), start, name)
            yield chunk

    def _check(self, name: str, crc: int) -> None:
        if crc != self.tensors[name].crc32:
            raise CheckpointError(
                f"{name} in {self.path} is damaged: its checksum is {crc:08x}, written was "
                f"{self.tensors[name].crc32:08x}. Fetch or write the file again."
            )

    def _fill(self, view: memoryview, offset: int, name: str) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ended within {name}: it became shorter while it was read. "
                    "Fetch or write it again."
                )
            done += count


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


class _BadHeader(Exception):
    pass


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    if size < 8:
        raise _BadHeader(f"it has {size} bytes, fewer than the 8 that say how long its header is")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise _BadHeader(f"it says that its header has {length} bytes, but the file has {size}")
    try:
        raw = json.loads(file.read(length).decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise _BadHeader(f"its header is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise _BadHeader("its header is not a JSON object")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _BadHeader("its metadata is not a table of texts")
    tensors = {name: _parse_entry(name, entry, 8 + length) for name, entry in raw.items()}
    in_file_order = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_layout(in_file_order, 8 + length, size)
    return metadata, _with_checksums(in_file_order, metadata)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _parse_entry(name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in [*shape, begin, end])
    except (TypeError, KeyError, ValueError) as error:
        raise _BadHeader(f"the header's entry of {name} is malformed: {entry}") from error
    if not whole or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _BadHeader(f"the header's entry of {name} is malformed: {entry}")
    if dtype not in DTYPES:
        raise _BadHeader(f"{name} has dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise _BadHeader(
            f"{name} of dtype {dtype} and shape {shape} cannot take the {end - begin} bytes that "
            "the header gives it"
        )
    return TensorInfo(tuple(shape), DTYPES[dtype], data_start + begin, data_start + end)


def _check_layout(tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """The tensors fill the data without gap or overlap: a short file is found here."""
    position = data_start
    for name, info in tensors.items():
        if info.begin != position:
            raise _BadHeader(f"{name} begins at byte {info.begin}, expected {position}")
        position = info.end
    if position != size:
        raise _BadHeader(f"its tensors end at byte {position}, but the file has {size} bytes")


def _with_checksums(
    tensors: dict[str, TensorInfo], metadata: Mapping[str, str]
) -> dict[str, TensorInfo]:
    if CHECKSUMS not in metadata:
        return tensors
    try:
        checksums = [int(word, 16) for word in metadata[CHECKSUMS].split()]
        pairs = zip(tensors.items(), checksums, strict=True)
        return {name: dataclasses.replace(info, crc32=crc) for (name, info), crc in pairs}
    except ValueError as error:
        raise _BadHeader(f"its checksums are malformed ({error})") from error
