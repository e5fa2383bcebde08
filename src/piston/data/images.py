"""Image features: pictures stored in the rows of a data file, as bytes or as the name of a file.

Parquet cannot fetch a single row, so the row groups used last are kept, up to a number of bytes.
Pickled without them.
"""

from __future__ import annotations

import collections
import io
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import UInt8

# What Pillow turns into RGB without loss of range.
_MODES = ("RGB", "RGBA", "L", "P", "1")


class ImageRows:
    """`images[path, key, row]`; safe for threads."""

    def __init__(self, root: Path, max_bytes: int = 256 * 2**20):
        self._root = root
        self._max_bytes = max_bytes
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._starts: dict[str, np.ndarray] = {}  # path → first row of each row group
        self._groups: collections.OrderedDict[tuple[str, str, int], pa.ChunkedArray]
        self._groups = collections.OrderedDict()

    def read(self, path: str, key: str, row: int) -> UInt8[np.ndarray, "h w 3"]:
        """Raises ValueError where the picture is missing or damaged."""
        starts = self._group_starts(path)
        group = int(np.searchsorted(starts, row, side="right")) - 1
        cell = self._group(path, key, group)[row - int(starts[group])].as_py()
        return decode(cell, self._root)

    def _group_starts(self, path: str) -> np.ndarray:
        if path not in self._starts:
            try:
                file = pq.read_metadata(self._root / path)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            sizes = [file.row_group(number).num_rows for number in range(file.num_row_groups)]
            self._starts[path] = np.cumsum([0, *sizes[:-1]])
        return self._starts[path]

    def _group(self, path: str, key: str, group: int) -> pa.ChunkedArray:
        name = (path, key, group)
        with self._lock:
            if name in self._groups:
                self._groups.move_to_end(name)
                return self._groups[name]
        try:
            # A file object of its own: they are not for two threads at once.
            with pq.ParquetFile(self._root / path) as file:
                column = file.read_row_group(group, columns=[key], use_threads=False)[key]
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ValueError(f"{path}, column {key}: cannot be read: {error}") from None
        with self._lock:
            self._groups[name] = column
            while len(self._groups) > 1 and self._size() > self._max_bytes:
                self._groups.popitem(last=False)
        return column

    def _size(self) -> int:
        return sum(column.nbytes for column in self._groups.values())

    def __getstate__(self) -> dict[str, Any]:
        return {"_root": self._root, "_max_bytes": self._max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def decode(cell: Any, root: Path) -> UInt8[np.ndarray, "h w 3"]:
    """A cell as the Hugging Face libraries write it: {bytes, path}, either of them may be empty."""
    if isinstance(cell, Mapping):
        data, name = cell.get("bytes"), cell.get("path")
    else:
        data, name = cell, None
    if data is None and name is not None:
        try:
            data = (root / name).read_bytes()
        except OSError as error:
            raise ValueError(f"the picture {name} cannot be read: {error.strerror}") from None
    if data is None:
        raise ValueError("the row holds no picture")
    try:
        with PIL.Image.open(io.BytesIO(data)) as picture:
            if picture.mode not in _MODES:
                raise ValueError(f"the picture has mode {picture.mode}; 8-bit RGB is expected")
            return np.array(picture.convert("RGB"))
    except (PIL.UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"the picture cannot be decoded: {error}") from None
