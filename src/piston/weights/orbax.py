"""Checkpoints of openpi's JAX trainer (Orbax), read with `tensorstore` and without JAX.

Knows the files; `jax_names` knows what the arrays mean. Layers are stacked in one array, often in
one compressed chunk of several gigabytes, so each array is decoded once and its layers are read
from it while it is in memory; the next array takes its place.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piston.weights import jax_names
from piston.weights.declared import read_declared
from piston.weights.errors import CheckpointError, Shape
from piston.weights.source import Entry, Source

_MANIFEST = "manifest.ocdbt"
_METADATA_FILES = {".zarray": "zarr", "zarr.json": "zarr3"}
_ROWS = 2**26  # bytes of a large array that are copied at once
_DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}


def find_params(folder: Path) -> Path | None:
    """The folder with the arrays: this one, or its `params` as in a trainer's step folder."""
    for candidate in (folder, folder / "params"):
        if (candidate / _MANIFEST).is_file() or any(candidate.glob("*/.zarray")):
            return candidate
    return None


def read_orbax(folder: Path) -> Source:
    """Everything under `folder`, which `find_params` found."""
    store = _ArrayStore(folder)
    shapes = {path: store.shape(path) for path in store.paths}
    entries: dict[str, Entry] = {}
    unknown: dict[str, Shape] = {}
    for path, shape in shapes.items():
        found = jax_names.slices(path, shape)
        if found is None:
            unknown[path] = shape
            continue
        for one in found:
            if one.name in entries:
                raise CheckpointError(
                    f"{folder} holds {one.name} twice, once in {path}. It is not a checkpoint of "
                    "one model; write it again into an empty folder."
                )
            entries[one.name] = Entry(one.shape, store.dtype(path), _Reader(store, path, one))
    # The trainer's arrays lie in `params`; what describes the model lies beside that folder.
    declared = read_declared(folder.parent if folder.name == "params" else folder)
    heads = jax_names.heads_of(shapes)
    return Source("jax", entries, unknown=unknown, heads=heads, declared=declared)


class _Reader:
    """Fills memory with one slice of one array."""

    def __init__(self, store: _ArrayStore, path: str, where: jax_names.Slice) -> None:
        self._store, self._path, self._where = store, path, where

    def __call__(self, destination: Tensor) -> None:
        index, convert, shape = self._where.index, self._where.convert, self._where.shape
        size = math.prod(shape) * self._store.dtype(self._path).itemsize
        if index or size <= _ROWS or convert is not jax_names.same:
            destination.copy_(convert(self._store.read(self._path, index)))
            return
        rows = max(1, _ROWS * shape[0] // size)
        for start in range(0, shape[0], rows):
            block = slice(start, min(start + rows, shape[0]))
            destination[block].copy_(self._store.read(self._path, (block,)))


class _ArrayStore:
    """The arrays of one checkpoint by path. Keeps the array read last, decoded."""

    def __init__(self, folder: Path) -> None:
        self._tensorstore = _import_tensorstore()
        self._folder = folder
        self._metadata: dict[str, tuple[Shape, str]] = {}  # path → shape, name of the dtype
        self._drivers: dict[str, tuple[str, str]] = {}  # path → driver, key in the store
        base = {"driver": "file", "path": f"{folder.resolve()}/"}
        is_database = (folder / _MANIFEST).is_file()
        self._keys = {"driver": "ocdbt", "base": base} if is_database else base
        try:
            self._list()
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{folder} cannot be read as an Orbax checkpoint: {error}. Some of its files are "
                "damaged or were not copied; fetch all of them again."
            ) from error
        self._open_path: str | None = None
        self._open_array: Any = None

    @property
    def paths(self) -> list[str]:
        return sorted(self._metadata)

    def shape(self, path: str) -> Shape:
        return self._metadata[path][0]

    def dtype(self, path: str) -> torch.dtype:
        name = self._metadata[path][1]
        if name not in _DTYPES:
            raise CheckpointError(
                f"{path} in {self._folder} has dtype {name}; expected one of {', '.join(_DTYPES)}."
            )
        return _DTYPES[name]

    def read(self, path: str, index: tuple[int | slice, ...]) -> Tensor:
        try:
            array = self._array(path)
            values = (array[index] if index else array).read().result()
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{path} in {self._folder} cannot be read: {error}. Some files of the checkpoint "
                "are damaged or were not copied; fetch all of them again."
            ) from error
        values = np.ascontiguousarray(values)
        if self.dtype(path) == torch.bfloat16:  # which numpy itself does not know
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    def _array(self, path: str) -> Any:
        if path == self._open_path:
            return self._open_array
        self._open_path = self._open_array = None  # gives back its memory first
        driver, key = self._drivers[path]
        size = math.prod(self.shape(path)) * self.dtype(path).itemsize
        self._open_array = self._tensorstore.open(
            {"driver": driver, "kvstore": {**self._keys, "path": self._path_of(key)}},
            read=True,
            open=True,
            context=self._tensorstore.Context(
                {
                    # Room for the whole array: its chunks are decoded only once.
                    "cache_pool": {"total_bytes_limit": 2 * size},
                    # The compressed bytes stay in the file.
                    "file_io_mode": {"mode": "memmap"},
                }
            ),
            recheck_cached_data=False,
            recheck_cached_metadata=False,
        ).result()
        self._open_path = path
        return self._open_array

    def _path_of(self, key: str) -> str:
        base = "" if self._keys["driver"] == "ocdbt" else self._keys["path"]
        return f"{base}{key}/"

    def _list(self) -> None:
        store = self._tensorstore.KvStore.open(self._keys).result()
        for raw in store.list().result():
            key, _, file = raw.decode().rpartition("/")
            if file in _METADATA_FILES:
                path = jax_names.plain_path(key.replace(".", "/"))
                if path in self._drivers:
                    raise ValueError(f"{self._drivers[path][1]} and {key} are the same array")
                self._drivers[path] = (_METADATA_FILES[file], key)
                self._metadata[path] = _parse_metadata(key, store.read(raw).result().value)


def _parse_metadata(key: str, text: bytes) -> tuple[Shape, str]:
    """An array's shape and numpy's name of its dtype, which zarr 2 writes as `<f4`."""
    try:
        data = json.loads(text)
        shape, dtype = tuple(data["shape"]), data.get("dtype") or data["data_type"]
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"shape {shape}")
        return shape, np.dtype(dtype).name if dtype.startswith(("<", "|")) else dtype
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the description of array {key} is malformed ({error!r})") from error


def _import_tensorstore() -> ModuleType:
    try:
        import tensorstore
    except ImportError as error:
        raise ImportError(
            "Checkpoints of the JAX trainer are read with tensorstore, which is not installed. "
            "Run: pip install 'piston[jax-weights]'"
        ) from error
    return tensorstore
