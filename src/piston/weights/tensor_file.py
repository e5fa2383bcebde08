"""One safetensors file: its header checked before anything is read, its tensors one by one.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": …}
    the rest  the tensors' bytes, back to back

Tensors are read straight into the memory they will live in: no mapping and no second copy. Files
written here carry a CRC-32 per tensor in their metadata, so that damage to the data is found too.
Knows nothing of models or of what names mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 2**24  # bytes read or written at once: all the memory that a change of dtype needs
_MAX_HEADER = 100_000_000  # as the public readers have it
_CHECKSUMS = "piston.crc32"


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
        per_chunk = _CHUNK // info.dtype.itemsize
        buffer = flat if direct else torch.empty(min(per_chunk, flat.numel()), dtype=info.dtype)
        crc = 0
        for start in range(0, flat.numel(), per_chunk):
            stop = min(start + per_chunk, flat.numel())
            chunk = flat[start:stop] if direct else buffer[: stop - start]
            view = _bytes_of(chunk)
            self._fill(view, info.begin + start * info.dtype.itemsize, name)
            if info.crc32 is not None:
                crc = zlib.crc32(view, crc)
            if not direct:
                flat[start:stop].copy_(chunk)
        if info.crc32 is not None and crc != info.crc32:
            raise CheckpointError(
                f"{name} in {self.path} is damaged: its checksum is {crc:08x}, written was "
                f"{info.crc32:08x}. Fetch or write the file again."
            )

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor's bytes, a few at a time, in memory that each chunk takes over from the last."""
        info = self.tensors[name]
        buffer = torch.empty(min(_CHUNK, info.end - info.begin), dtype=torch.uint8)
        for start in range(info.begin, info.end, _CHUNK):
            chunk = buffer[: min(_CHUNK, info.end - start)]
            self._fill(_bytes_of(chunk), start, name)
            yield chunk

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


@dataclasses.dataclass(frozen=True)
class TensorToWrite:
    """What the file will hold, and who fills it when its turn comes."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorToWrite:
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, TensorToWrite],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Write tensor by tensor, holding one at a time; complete on the disk on return.

    `progress` hears each name with its number of bytes. The header's checksums are known last, so
    the header is written twice, with the same length.
    """
    checksums = dict.fromkeys(tensors, 0)
    header = _make_header(tensors, metadata or {}, checksums)
    with path.open("wb") as file:
        file.write(header)
        for name, tensor in tensors.items():
            checksums[name] = _write_tensor(file, name, tensor)
            if progress is not None:
                progress(name, tensor.num_bytes)
        file.seek(0)
        file.write(_make_header(tensors, metadata or {}, checksums))
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, name: str, expected: TensorToWrite) -> int:
    tensor = expected.read().detach()
    if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
        raise ValueError(
            f"{name} was announced as {expected.dtype} {expected.shape} and is {tensor.dtype} "
            f"{tuple(tensor.shape)}."
        )
    flat = tensor.contiguous().view(-1)
    per_chunk = _CHUNK // expected.dtype.itemsize
    crc = 0
    for start in range(0, flat.numel(), per_chunk):
        view = _bytes_of(flat[start : start + per_chunk].cpu())
        file.write(view)
        crc = zlib.crc32(view, crc)
    return crc


def _make_header(
    tensors: Mapping[str, TensorToWrite],
    metadata: Mapping[str, str],
    checksums: Mapping[str, int],
) -> bytes:
    checks = " ".join(f"{checksums[name]:08x}" for name in tensors)  # in the order of the file
    header: dict[str, Any] = {"__metadata__": {**metadata, _CHECKSUMS: checks}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files do not hold here.")
        end = offset + tensor.num_bytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # aligned data, for readers that map the file
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
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
    if _CHECKSUMS not in metadata:
        return tensors
    try:
        checksums = [int(word, 16) for word in metadata[_CHECKSUMS].split()]
        pairs = zip(tensors.items(), checksums, strict=True)
        return {name: dataclasses.replace(info, crc32=crc) for (name, info), crc in pairs}
    except ValueError as error:
        raise _BadHeader(f"its checksums are malformed ({error})") from error
