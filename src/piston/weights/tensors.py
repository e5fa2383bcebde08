"""Safetensors files: read into memory of the process, written one tensor at a time.

The library `safetensors` checks a file's header when it is opened. Tensors are then read into
memory that torch allocated: it is aligned, and products with it are as fast as with weights made in
memory, which does not hold for mapped pages on every machine. The library writes only tensors that
are all in memory; conversion holds one at a time, so the writer is here.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from piston.files import read_json_object
from piston.progress import Progress, no_progress

Shape = tuple[int, ...]

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
CHUNK = 2**24  # bytes that are read or written at once
_ALIGNMENT = 64  # of the first tensor, for readers that map the file


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is none."""


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; anything else is a CheckpointError that names the file."""
    try:
        return read_json_object(path)
    except ValueError as error:
        found = str(error).removesuffix(".")
        raise CheckpointError(f"{found}. It is damaged; fetch or write it again.") from error


@dataclasses.dataclass(frozen=True)
class Entry(abc.ABC):
    """One tensor of a checkpoint, which is read on demand."""

    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @abc.abstractmethod
    def read_into(self, destination: Tensor) -> None:
        """Fill a tensor of this shape, on any device and of any dtype."""

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(self.shape, dtype=dtype or self.dtype)
        self.read_into(tensor)
        return tensor


class _File:
    """A file that stays open: if it is replaced, this is still the one whose header was read."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def read_into(self, view: memoryview, offset: int) -> None:
        while len(view):  # one call reads at most 2 GiB
            count = os.preadv(self.descriptor, [view], offset)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} became shorter while it was read. Fetch or write it again."
                )
            view, offset = view[count:], offset + count


@dataclasses.dataclass(frozen=True)
class FileEntry(Entry):
    """A tensor of a safetensors file. Several threads may read at once."""

    file: _File
    begin: int
    # The name and the entry of another tensor that must hold the same values.
    twin: tuple[str, FileEntry] | None = None

    def read_into(self, destination: Tensor) -> None:
        if self.twin is not None:
            name, other = self.twin
            same = (self.shape, self.dtype) == (other.shape, other.dtype)
            if not same or not all(map(torch.equal, self.chunks(), other.chunks())):
                raise CheckpointError(
                    f"{name} differs from the embedding table, but the output head of a model that "
                    "writes tokens is the embedding table itself. The file is not of this model."
                )
        if not destination.is_contiguous():
            destination.copy_(self.read())
            return
        flat = destination.detach().view(-1)
        if flat.dtype == self.dtype and flat.device.type == "cpu":
            self.file.read_into(_bytes_of(flat), self.begin)
            return
        start = 0
        for chunk in self.chunks():
            flat[start : start + len(chunk)].copy_(chunk)
            start += len(chunk)

    def chunks(self) -> Iterator[Tensor]:
        """Yield the flat values, piece by piece in the same memory."""
        count, step = math.prod(self.shape), CHUNK // self.dtype.itemsize
        buffer = torch.empty(min(count, step), dtype=self.dtype)
        for start in range(0, count, step):
            chunk = buffer[: count - start]
            self.file.read_into(_bytes_of(chunk), self.begin + start * self.dtype.itemsize)
            yield chunk


def read_tensor_file(path: Path) -> dict[str, FileEntry]:
    """Return the tensors of a safetensors file in their order; only the header is read."""
    file = _File(path)
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file: {error}. The file is damaged or was not "
            "copied completely; fetch or write it again."
        ) from error
    length = int.from_bytes(os.pread(file.descriptor, 8, 0), "little")
    header = json.loads(os.pread(file.descriptor, length, 8))
    header.pop("__metadata__", None)
    entries = {}
    for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if row["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{name} in {path} has dtype {row['dtype']}; expected one of {', '.join(DTYPES)}."
            )
        begin = 8 + length + row["data_offsets"][0]
        entries[name] = FileEntry(tuple(row["shape"]), DTYPES[row["dtype"]], file, begin)
    return entries


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor] | None = None,
    progress: Progress = no_progress,
) -> None:
    """Write tensors in their order; `progress` counts bytes.

    With `read`, `tensors` only tell shapes and dtypes (they may be on the meta device), and the
    values are those that it returns for each name, one at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; expected one of {', '.join(map(str, _NAMES))}."
            )
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [total, total + tensor.nbytes],
        }
        total += tensor.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            values = (tensor if read is None else read(name)).detach().contiguous().view(-1)
            for part in values.split(CHUNK // tensor.dtype.itemsize):
                file.write(_bytes_of(part.cpu()))
            progress(header[name]["data_offsets"][1], total, name)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
