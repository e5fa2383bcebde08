"""Safetensors files: read into memory of the process, written one tensor at a time.

The library `safetensors` checks a file's header when it is opened. Tensors are then read into
memory that torch allocated: it is aligned, and products with it are as fast as with weights made in
memory, which does not hold for mapped pages on every machine. The library writes only tensors that
are all in memory; conversion holds one at a time, so the writer is here.
"""

from __future__ import annotations

import dataclasses
import functools
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

from piston.progress import Progress, no_progress
from piston.weights.expected import CheckpointError, Shape

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


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, which is read on demand."""

    shape: Shape
    dtype: torch.dtype
    # Fills a tensor of this shape, on any device and of any dtype.
    read_into: Callable[[Tensor], None]
    # Yields the flat values piece by piece in memory that is used again, for files that allow it.
    chunks: Callable[[], Iterator[Tensor]] = lambda: iter(())

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(self.shape, dtype=dtype or self.dtype)
        self.read_into(tensor)
        return tensor


class TensorFile:
    """A safetensors file whose header was checked. Several threads may read at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Stays open: if the file is replaced, this is still the one whose header was read.
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._descriptor)
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a whole safetensors file: {error}. The file is damaged or was not "
                "copied completely; fetch or write it again."
            ) from error
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        header = json.loads(os.pread(self._descriptor, length, 8))
        header.pop("__metadata__", None)
        self._begins = {name: 8 + length + row["data_offsets"][0] for name, row in header.items()}
        ordered = sorted(header, key=lambda name: self._begins[name])
        self.entries = {name: self._entry(name, header[name]) for name in ordered}

    def _entry(self, name: str, row: Mapping[str, Any]) -> Entry:
        if row["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{name} in {self.path} has dtype {row['dtype']}; expected one of "
                f"{', '.join(DTYPES)}."
            )
        return Entry(
            tuple(row["shape"]),
            DTYPES[row["dtype"]],
            functools.partial(self._read_into, name),
            functools.partial(self._chunks, name),
        )

    def _read_into(self, name: str, destination: Tensor) -> None:
        entry = self.entries[name]
        if not destination.is_contiguous():
            destination.copy_(entry.read())
            return
        flat = destination.detach().view(-1)
        if flat.dtype == entry.dtype and flat.device.type == "cpu":
            self._fill(flat, self._begins[name])
            return
        start = 0
        for chunk in entry.chunks():
            flat[start : start + len(chunk)].copy_(chunk)
            start += len(chunk)

    def _chunks(self, name: str) -> Iterator[Tensor]:
        """Yield the flat values, piece by piece in the same memory."""
        entry = self.entries[name]
        count, step = math.prod(entry.shape), CHUNK // entry.dtype.itemsize
        buffer = torch.empty(min(count, step), dtype=entry.dtype)
        for start in range(0, count, step):
            chunk = buffer[: count - start]
            self._fill(chunk, self._begins[name] + start * entry.dtype.itemsize)
            yield chunk

    def _fill(self, flat: Tensor, offset: int) -> None:
        view, done = _bytes_of(flat), 0
        while done < len(view):  # one call reads at most 2 GiB
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} became shorter while it was read. Fetch or write it again."
                )
            done += count


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
    total = sum(tensor.nbytes for tensor in tensors.values())
    done = 0
    with path.open("wb") as file:
        file.write(_make_header(tensors))
        for name, tensor in tensors.items():
            values = (tensor if read is None else read(name)).detach().contiguous().view(-1)
            for part in values.split(CHUNK // tensor.dtype.itemsize):
                file.write(_bytes_of(part.cpu()))
            done += tensor.nbytes
            progress(done, total, name)


def _make_header(tensors: Mapping[str, Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; expected one of {', '.join(map(str, _NAMES))}."
            )
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
