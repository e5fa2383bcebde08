"""Writing a safetensors file tensor by tensor: only one of them is in memory at a time.

Knows nothing of where the file will lie or of what the names mean; `tensor_file` reads it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from piston.weights.errors import Shape
from piston.weights.tensor_file import CHECKSUMS, CHUNK, DTYPES, bytes_of

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
    per_chunk = CHUNK // expected.dtype.itemsize
    crc = 0
    for start in range(0, flat.numel(), per_chunk):
        view = bytes_of(flat[start : start + per_chunk].cpu())
        file.write(view)
        crc = zlib.crc32(view, crc)
    return crc


def _make_header(
    tensors: Mapping[str, TensorToWrite],
    metadata: Mapping[str, str],
    checksums: Mapping[str, int],
) -> bytes:
    checks = " ".join(f"{checksums[name]:08x}" for name in tensors)  # in the order of the file
    header: dict[str, Any] = {"__metadata__": {**metadata, CHECKSUMS: checks}}
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
