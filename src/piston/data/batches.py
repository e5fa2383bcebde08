"""Samples into a batch: one piece of memory, with a tensor for every array of the samples.

One piece, so that a batch passes between processes in one copy, straight into pinned memory where
there is a GPU. Knows nothing of where samples come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piston.transforms.keys import flatten_dict, unflatten_dict

Sample = Mapping[str, Any]
Batch = dict[str, Any]  # tensors, in nested dictionaries as the samples are

_ALIGNMENT = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Part:
    """Where in a batch's memory one array is."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parts of a batch by their flat names, and how many bytes they take."""

    parts: Mapping[str, Part]
    num_bytes: int


def arrange(samples: Sequence[Sample]) -> tuple[list[dict[str, np.ndarray]], Layout]:
    """The samples' arrays by flat names, and where they will be; refuses samples that differ."""
    rows = [_arrays(sample) for sample in samples]
    first, parts, offset = rows[0], {}, 0
    for number, row in enumerate(rows[1:], start=1):
        _check_alike(first, row, number)
    for name, array in first.items():
        parts[name] = Part(array.dtype.str, (len(rows), *array.shape), offset)
        offset += -(-parts[name].num_bytes // _ALIGNMENT) * _ALIGNMENT
    return rows, Layout(parts, max(offset, 1))


def _arrays(sample: Sample) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(value) for name, value in flatten_dict(sample).items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name!r} is of {array.dtype}; a batch holds only numbers.")
    return arrays


def _check_alike(first: dict[str, np.ndarray], other: dict[str, np.ndarray], number: int) -> None:
    if first.keys() != other.keys():
        raise ValueError(
            f"Samples of one batch have different keys: sample 0 has {sorted(first)}, sample "
            f"{number} has {sorted(other)}."
        )
    for name, array in first.items():
        found = other[name]
        if found.shape != array.shape or found.dtype != array.dtype:
            raise ValueError(
                f"{name!r} is {array.dtype}{list(array.shape)} in sample 0 of a batch and "
                f"{found.dtype}{list(found.shape)} in sample {number}; they must be alike."
            )


def fill(memory: Any, rows: Sequence[Mapping[str, np.ndarray]], layout: Layout) -> None:
    """Write the samples' arrays to their places in writable memory."""
    for name, part in layout.parts.items():
        target: np.ndarray = np.ndarray(part.shape, part.dtype, buffer=memory, offset=part.offset)
        for number, row in enumerate(rows):
            target[number] = row[name]


def view(memory: Tensor, layout: Layout) -> Batch:
    """The batch that lies in this memory, without a copy."""
    flat = {}
    for name, part in layout.parts.items():
        piece = memory[part.offset : part.offset + part.num_bytes]
        flat[name] = piece.view(_torch_dtype(part.dtype)).reshape(part.shape)
    return unflatten_dict(flat)


def allocate(layout: Layout, *, pin: bool = False) -> Tensor:
    return torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=pin)


def collate(samples: Sequence[Sample], *, pin_memory: bool = False) -> Batch:
    """The batch of these samples, in this process."""
    rows, layout = arrange(samples)
    memory = allocate(layout, pin=pin_memory)
    fill(memory.numpy(), rows, layout)
    return view(memory, layout)


def _torch_dtype(name: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, name)).dtype
