"""What the parquet files of a data set hold: numbers and texts as whole columns, and images.

`read_data_files` opens every file once. `Columns` keeps what was read, in the order of episodes,
and computes columns that the files may lack (`index`, `task_index`, …). Images stay in the files
until `ImageRows` is asked for one. Columns are pickled with what they have read, so that worker
processes share it; images are not.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import UInt8

from piston.data.format import DERIVED, Episode, EpisodeError, Metadata

Rows = dict[str, np.ndarray]  # of one episode, by key

_THREADS = 8  # reading small files is mostly waiting
# Pillow converts these to RGB without changing the range of values.
_IMAGE_MODES = ("RGB", "RGBA", "L", "P", "1")


@dataclasses.dataclass(frozen=True)
class DataFile:
    """The columns of a data file, images excluded, by episode."""

    names: frozenset[str]  # of all columns; empty if the file cannot be read
    rows: dict[int, Rows]
    first_rows: dict[int, int]  # where an episode begins in the file
    unreadable: dict[int, str]  # episode → why its rows are not there


def read_data_files(metadata: Metadata, episodes: Iterable[Episode]) -> dict[str, DataFile]:
    """Read the rows of these episodes from all files that exist."""
    by_file: dict[str, list[Episode]] = collections.defaultdict(list)
    for episode in episodes:
        by_file[episode.data_path].append(episode)
    paths = [path for path in by_file if (metadata.root / path).is_file()]
    if len(paths) < 2:
        return {path: read_data_file(metadata, path, by_file[path]) for path in paths}
    with ThreadPoolExecutor(_THREADS) as pool:
        files = pool.map(lambda path: read_data_file(metadata, path, by_file[path]), paths)
        return dict(zip(paths, files))


def read_data_file(metadata: Metadata, path: str, episodes: Sequence[Episode]) -> DataFile:
    features = metadata.features
    try:
        with pq.ParquetFile(metadata.root / path) as file:
            names = file.schema_arrow.names
            declared = {key for key, feature in features.items() if not feature.is_camera}
            keys = [key for key in names if key in declared or key in DERIVED]
            table = file.read(columns=keys, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        what = f"{path} cannot be read: {str(error).splitlines()[0]}"
        return DataFile(frozenset(), {}, {}, {episode.index: what for episode in episodes})
    places, unreadable = _find_rows(metadata, path, episodes, table)
    shapes = {key: features[key].shape if key in features else () for key in keys}
    rows: dict[int, Rows] = {}
    try:
        arrays = {key: to_array(table[key], shapes[key], path, key) for key in keys}
        for index, place in places.items():
            rows[index] = {key: array[place] for key, array in arrays.items()}
    except ValueError:  # in whose rows?
        for index, place in places.items():
            part = table.slice(place.start, place.stop - place.start)
            try:
                rows[index] = {key: to_array(part[key], shapes[key], path, key) for key in keys}
            except ValueError as error:
                unreadable[index] = str(error)
    first_rows = {index: place.start for index, place in places.items()}
    return DataFile(frozenset(names), rows, first_rows, unreadable)


def _find_rows(
    metadata: Metadata, path: str, episodes: Sequence[Episode], table: pa.Table
) -> tuple[dict[int, slice], dict[int, str]]:
    """Return which rows of a data file belong to which episode, and why others were not found."""
    found: dict[int, tuple[int, int | str]] = {}  # episode → first row, number of rows
    owners = None
    if metadata.version != "v3.0":
        found = {episode.index: (0, table.num_rows) for episode in episodes}
    elif "episode_index" in table.column_names:
        owners = table["episode_index"].to_numpy()
        found = dict(zip(*_unique_starts(owners)))
    else:
        inside = [episode for episode in metadata.episodes if episode.data_path == path]
        complete = sum(episode.length for episode in inside) == table.num_rows
        first = min(episode.start for episode in inside)
        for e in episodes:
            found[e.index] = (e.start - first, e.length if complete else "an unknown number of")
    places, wrong = {}, {}
    for episode in episodes:
        start, count = found.get(episode.index, (0, 0))
        place = slice(start, start + episode.length)
        if count != episode.length:
            wrong[episode.index] = f"{path} has {count} rows of it, listed are {episode.length}"
        elif owners is not None and (owners[place] != episode.index).any():
            wrong[episode.index] = f"{path}: its rows are mixed with those of other episodes"
        else:
            places[episode.index] = place
    return places, wrong


def _unique_starts(owners: np.ndarray) -> tuple[list[int], list[tuple[int, int]]]:
    numbers, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
    return numbers.tolist(), list(zip(firsts.tolist(), counts.tolist()))


def to_array(column: pa.ChunkedArray, shape: tuple[int, ...], path: Any, key: str) -> np.ndarray:
    """Return (rows,) for plain values and (rows, *shape) for lists; ValueError if values lack."""
    values, sizes = column.combine_chunks(), []
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    while any(is_kind(values.type) for is_kind in kinds):
        parents, children = len(values), values.flatten()
        width = len(children) // max(parents, 1)
        lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        if values.null_count or (lengths != width).any():
            raise ValueError(f"{path}: {key} has rows of different lengths or without a value.")
        sizes.append(width)
        values = children
    if values.null_count:
        row = int(np.flatnonzero(np.asarray(values.is_null()))[0]) // max(int(np.prod(sizes)), 1)
        raise ValueError(f"{path}: {key} has no value in row {row}.")
    array = values.to_numpy(zero_copy_only=False)
    if not sizes:
        return array
    # Arrays of more than one axis are sometimes stored flat.
    flat = len(sizes) == 1 and len(shape) > 1 and sizes[0] == np.prod(shape)
    return array.reshape(len(column), *(shape if flat else sizes))


class Columns:
    """`columns[key]` is a whole column of these episodes, read-only. Safe for threads.

    `stored` names the columns to take from the files; derived columns are always available.
    """

    def __init__(
        self,
        metadata: Metadata,
        episodes: Sequence[Episode],
        stored: Collection[str],
        files: Mapping[str, DataFile],
    ) -> None:
        self.metadata = metadata
        self.episodes = tuple(episodes)
        self._stored = frozenset(stored)
        features = metadata.features.values()
        numeric = [f.name for f in features if not f.is_camera and f.name not in DERIVED]
        # Everything but cameras; the derived keys last.
        self.keys = (*(name for name in numeric if name in self._stored), *DERIVED)
        ends = np.cumsum([episode.length for episode in self.episodes])
        self.starts = {e.index: int(end) - e.length for e, end in zip(self.episodes, ends)}
        self._files = files
        self._values: dict[str, np.ndarray] = {}
        self._lock = threading.RLock()

    def __getitem__(self, key: str) -> np.ndarray:
        if key not in self._values:
            with self._lock:
                if key not in self._values:
                    column = self._join(key) if key in self._stored else self._derive(key)
                    column.flags.writeable = False
                    self._values[key] = column
        return self._values[key]

    def first_row(self, episode: Episode) -> int:
        """Return where an episode begins in its data file."""
        return self._files[episode.data_path].first_rows[episode.index]

    def _join(self, key: str) -> np.ndarray:
        rows = [self._files[episode.data_path].rows[episode.index] for episode in self.episodes]
        first = rows[0][key]
        for episode, own in zip(self.episodes, rows):
            found = own[key]
            same_shape = found.shape[1:] == first.shape[1:]
            if not same_shape or not np.can_cast(found.dtype, first.dtype, "same_kind"):
                raise EpisodeError(
                    f"{episode.data_path}: {key} is {found.dtype}{list(found.shape[1:])}, in the "
                    f"files before it is {first.dtype}{list(first.shape[1:])}. Write the file "
                    f"again, or leave out episode {episode.index}.",
                    episode.index,
                )
        # Removed from what was read, so that nothing is in memory twice.
        pieces = [own.pop(key) for own in rows]
        return np.concatenate(pieces, dtype=first.dtype, casting="same_kind")

    def _derive(self, key: str) -> np.ndarray:
        episodes = self.episodes
        lengths = [episode.length for episode in episodes]
        steps = np.concatenate([np.arange(length) for length in lengths])
        if key == "frame_index":
            return steps
        if key == "timestamp":
            return (steps / self.metadata.fps).astype(np.float32)
        if key == "index":
            return steps + np.repeat([episode.start for episode in episodes], lengths)
        if key == "episode_index":
            return np.repeat([episode.index for episode in episodes], lengths)
        if key == "task_index":
            numbers = {text: number for number, text in self.metadata.tasks.items()}
            first = [numbers.get(e.tasks[0], -1) if e.tasks else -1 for e in episodes]
            return np.repeat(first, lengths)
        raise KeyError(f"{self.metadata.root} has no column {key!r}; it has {list(self.keys)}.")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())


class ImageRows:
    """Images stored in the rows of data files, as bytes or as the name of a file.

    Parquet cannot read a single row, so the row groups used last are kept, up to a number of bytes.
    Safe for threads.
    """

    def __init__(self, root: Path, max_bytes: int = 256 * 2**20) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._lock = threading.Lock()
        self._footers: dict[str, tuple[pq.FileMetaData, np.ndarray]] = {}
        self._groups: collections.OrderedDict[tuple[str, str, int], pa.ChunkedArray]
        self._groups = collections.OrderedDict()

    def read(self, path: str, key: str, row: int) -> UInt8[np.ndarray, "h w 3"]:
        """Return one image. Raise ValueError if it is missing or damaged."""
        try:
            footer, starts = self._footer(path)
            group = int(np.searchsorted(starts, row, side="right")) - 1
            cell = self._group(path, key, group, footer)[row - int(starts[group])].as_py()
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ValueError(f"{path}, column {key}: cannot be read: {error}") from None
        return decode_image(cell, self._root)

    def _footer(self, path: str) -> tuple[pq.FileMetaData, np.ndarray]:
        """Return a file's footer and the first row of each of its row groups."""
        if path not in self._footers:
            footer = pq.read_metadata(self._root / path)
            sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
            self._footers[path] = footer, np.cumsum([0, *sizes[:-1]])
        return self._footers[path]

    def _group(self, path: str, key: str, group: int, footer: pq.FileMetaData) -> pa.ChunkedArray:
        name = (path, key, group)
        with self._lock:
            if name in self._groups:
                self._groups.move_to_end(name)
                return self._groups[name]
        # A file object of its own, since two threads must not use the same one.
        with pq.ParquetFile(self._root / path, metadata=footer) as file:
            column = file.read_row_group(group, columns=[key], use_threads=False)[key]
        with self._lock:
            self._groups[name] = column
            while len(self._groups) > 1 and self._num_bytes() > self._max_bytes:
                self._groups.popitem(last=False)
        return column

    def _num_bytes(self) -> int:
        return sum(column.nbytes for column in self._groups.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageRows, (self._root, self._max_bytes)


def image_bytes(cell: Any, root: Path) -> bytes:
    """Return the content of a cell as Hugging Face writes it: {bytes, path}, or the bytes alone."""
    data, name = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
    if data is None and name is not None:
        try:
            data = (root / name).read_bytes()
        except OSError as error:
            raise ValueError(f"the image {name} cannot be read: {error.strerror}") from None
    if data is None:
        raise ValueError("the row has no image")
    return data


def decode_image(cell: Any, root: Path) -> UInt8[np.ndarray, "h w 3"]:
    data = image_bytes(cell, root)
    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            if image.mode not in _IMAGE_MODES:
                raise ValueError(f"the image has mode {image.mode}; expected 8-bit RGB")
            return np.array(image.convert("RGB"))
    except (PIL.UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"the image cannot be decoded: {error}") from None
