"""What the parquet files of a data set hold: numbers and texts as whole columns, and images.

`read_rows` opens every data file once. `join_columns` makes whole columns of the rows, and computes
those that the files may lack (`index`, `task_index`, …). Images stay in the files until `ImageRows`
is asked for one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import UInt8

from piston.data.format import DERIVED, Episode, is_inside
from piston.data.metadata import Metadata
from piston.data.problems import EpisodeError

Columns = dict[str, np.ndarray]  # of one episode or of many, by key

_THREADS = 8  # reading small files is mostly waiting
_MAX_BYTES = 256 * 2**20  # of row groups of images that are kept
# Pillow converts these to RGB without changing the range of values.
_IMAGE_MODES = ("RGB", "RGBA", "L", "P", "1")


@dataclasses.dataclass(frozen=True)
class DataRows:
    """What data files hold of some episodes, images and labels excluded."""

    names: dict[str, frozenset[str]]  # path of a file that can be read → all its columns
    rows: dict[int, Columns]  # by episode, as are the others; derived columns are never missing
    first_rows: dict[int, int]  # where an episode begins in its file
    unreadable: dict[int, str]  # why the rows of an episode are not there
    ignored: dict[str, str]  # columns that can be read in no episode, and why

    @property
    def stored(self) -> frozenset[str]:
        """The columns that at least one file has."""
        return frozenset().union(*self.names.values()).difference(self.ignored)

    @property
    def everywhere(self) -> frozenset[str]:
        """The columns that all files have."""
        return frozenset.intersection(*self.names.values()).difference(self.ignored)


def read_rows(metadata: Metadata, episodes: Iterable[Episode]) -> DataRows:
    """Read the rows of these episodes from all files that exist.

    A column that cannot be read costs the episode, unless that is so in all of them.
    """
    found, failed = DataRows({}, {}, {}, {}, {}), _Failed()
    read_each_file(functools.partial(_read_file, found, failed, metadata), episodes)
    for (index, key), why in sorted(failed.why.items()):
        if key not in failed.elsewhere:
            found.ignored.setdefault(key, why)
        elif found.rows.pop(index, None) is not None:
            del found.first_rows[index]
            found.unreadable[index] = why
    return found


def read_each_file(read: Callable[[str, list[Episode]], None], episodes: Iterable[Episode]) -> None:
    """Call `read` with each data file and its episodes, several files at once."""
    by_file: dict[str, list[Episode]] = collections.defaultdict(list)
    for episode in episodes:
        by_file[episode.data_path].append(episode)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda item: read(*item), by_file.items()))


@dataclasses.dataclass
class _Failed:
    """Why columns cannot be read, by episode, and the columns that can be in other episodes."""

    why: dict[tuple[int, str], str] = dataclasses.field(default_factory=dict)
    elsewhere: set[str] = dataclasses.field(default_factory=set)


def _read_file(
    found: DataRows, failed: _Failed, metadata: Metadata, path: str, episodes: Sequence[Episode]
) -> None:
    features = metadata.features
    if not (metadata.root / path).is_file():
        return
    try:
        with pq.ParquetFile(metadata.root / path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            declared = {
                key
                for key, feature in features.items()
                if not feature.is_camera and not feature.is_language
            }
            keys = [key for key in names if key in declared or key in DERIVED]
            table = file.read(columns=keys, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        what = f"{path} cannot be read: {str(error).splitlines()[0]}"
        found.unreadable.update({episode.index: what for episode in episodes})
        return
    found.names[path] = frozenset(names)

    shapes = {key: features[key].shape if key in features else () for key in keys}
    whole: Columns = {}
    for key in keys:
        with contextlib.suppress(ValueError):  # in whose rows? See below.
            whole[key] = to_array(table[key], shapes[key], path, key)
    owners = _owners(metadata, episodes, table)
    numbers, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
    places = dict(zip(numbers.tolist(), zip(firsts.tolist(), counts.tolist())))
    for episode in episodes:
        start, count = places.get(episode.index, (0, 0))
        place = slice(start, start + episode.length)
        try:
            if count != episode.length or len(owners) != len(table):
                known = count if len(owners) == len(table) else "an unknown number of"
                raise ValueError(f"{path} has {known} rows of it, listed are {episode.length}")
            if (owners[place] != episode.index).any():
                raise ValueError(f"{path}: its rows are mixed with those of other episodes")
        except ValueError as error:
            found.unreadable[episode.index] = str(error)
            continue
        rows = {key: array[place] for key, array in whole.items()}
        for key in keys:
            if key not in whole:
                try:
                    part = table[key].slice(start, episode.length)
                    rows[key] = to_array(part, shapes[key], path, key)
                except ValueError as error:
                    failed.why[episode.index, key] = str(error)
        failed.elsewhere.update(rows)
        found.first_rows[episode.index] = start
        derived = {} if rows.keys() >= set(DERIVED) else _derive(metadata, episode)
        found.rows[episode.index] = derived | rows


def _owners(metadata: Metadata, episodes: Sequence[Episode], table: pa.Table) -> np.ndarray:
    """Return the episode of each row of a file, as far as that is known."""
    if metadata.version != "v3.0":
        return np.full(len(table), episodes[0].index)
    if "episode_index" in table.column_names:
        return table["episode_index"].to_numpy()
    inside = [one for one in metadata.episodes if one.data_path == episodes[0].data_path]
    inside.sort(key=lambda episode: episode.start)
    return np.repeat([e.index for e in inside], [e.length for e in inside])


def _derive(metadata: Metadata, episode: Episode) -> Columns:
    steps = np.arange(episode.length)
    numbers = {text: number for number, text in metadata.tasks.items()}
    task = numbers.get(episode.tasks[0], -1) if episode.tasks else -1
    return {
        "timestamp": (steps / metadata.fps).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(episode.length, episode.index),
        "index": steps + episode.start,
        "task_index": np.full(episode.length, task),
    }


def to_array(column: pa.ChunkedArray, shape: tuple[int, ...], path: Any, key: str) -> np.ndarray:
    """Return (rows,) for plain values and (rows, *shape) for lists; ValueError if values lack.

    Anything but numbers, such as text, is an array of Python objects, with None for null.
    """
    leaf = column.type
    while isinstance(leaf, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        leaf = leaf.value_type
    if not pa.types.is_primitive(leaf) and not pa.types.is_null(leaf):
        objects = np.empty(len(column), object)
        objects[:] = column.to_pylist()
        return objects
    values, sizes = column.combine_chunks(), []
    while isinstance(values, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
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


def join_columns(metadata: Metadata, episodes: Sequence[Episode], data: DataRows) -> Columns:
    """Take the columns of these episodes out of `data`; return them read-only, derived ones last.

    What is taken is removed there, so that nothing is in memory twice.
    """
    rows, columns = [data.rows[episode.index] for episode in episodes], Columns()
    declared = [key for key in metadata.features if key in rows[0] and key not in DERIVED]
    everywhere = data.everywhere
    for key in (*declared, *DERIVED):
        pieces = [one.pop(key) for one in rows]
        if key in DERIVED and key not in everywhere:
            # For all episodes, since what some files hold need not have the same shape and type.
            pieces = [_derive(metadata, episode)[key] for episode in episodes]
        first = pieces[0]
        for episode, found in zip(episodes, pieces):
            if not fits(found, first):
                raise EpisodeError(
                    f"{episode.data_path}: {key} is {found.dtype}{list(found.shape[1:])}, in the "
                    f"files before it is {first.dtype}{list(first.shape[1:])}. Write the file "
                    f"again, or leave out episode {episode.index}.",
                    episode.index,
                )
        columns[key] = np.concatenate(pieces, dtype=first.dtype, casting="same_kind")
        columns[key].flags.writeable = False
    return columns


def fits(rows: np.ndarray, column: np.ndarray) -> bool:
    """Return whether rows can be appended to a column."""
    same_shape = rows.shape[1:] == column.shape[1:]
    return same_shape and np.can_cast(rows.dtype, column.dtype, "same_kind")


class ImageRows:
    """Images stored in the rows of data files, as bytes or as the name of a file.

    Parquet cannot read a single row, so the row groups used last are kept. Safe for threads.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, threading.Lock()
        # By file: its footer, and the first row of each row group.
        self._footers: dict[str, tuple[pq.FileMetaData, np.ndarray]] = {}
        # By file, column and number; the most recently used last.
        self._groups: dict[tuple[str, str, int], pa.ChunkedArray] = {}

    def read(self, path: str, key: str, row: int) -> UInt8[np.ndarray, "h w 3"]:
        """Return one image. Raise ValueError if it is missing or damaged."""
        try:
            if path not in self._footers:
                footer = pq.read_metadata(self._root / path)
                sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
                self._footers[path] = footer, np.cumsum([0, *sizes[:-1]])
            footer, starts = self._footers[path]
            group = int(np.searchsorted(starts, row, side="right")) - 1
            cell = self._group(path, key, group, footer)[row - int(starts[group])].as_py()
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ValueError(f"{path}, column {key}: cannot be read: {error}") from None
        return decode_image(cell, self._root)

    def _group(self, path: str, key: str, group: int, footer: pq.FileMetaData) -> pa.ChunkedArray:
        name = (path, key, group)
        with self._lock:
            if name in self._groups:
                self._groups[name] = self._groups.pop(name)  # now the most recently used
                return self._groups[name]
        # A file object of its own, since two threads must not use the same one.
        options = {"metadata": footer, "page_checksum_verification": True}
        with pq.ParquetFile(self._root / path, **options) as file:
            column = file.read_row_group(group, columns=[key], use_threads=False)[key]
        with self._lock:
            self._groups[name] = column
            # Only here: to measure all groups takes much longer than to decode an image.
            surplus = sum(one.nbytes for one in self._groups.values()) - _MAX_BYTES
            while surplus > 0 and len(self._groups) > 1:
                surplus -= self._groups.pop(next(iter(self._groups))).nbytes
        return column

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageRows, (self._root,)


def image_bytes(cell: Any, root: Path) -> bytes:
    """Return the content of a cell as Hugging Face writes it: {bytes, path}, or the bytes alone."""
    data, name = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
    if data is None and name is not None:
        if not isinstance(name, str) or not is_inside(name):
            raise ValueError(f"the image {name} is not read: its path leads outside the data set")
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
            image.verify()  # compares the checksums of a PNG, which decoding does not
        with PIL.Image.open(io.BytesIO(data)) as image:
            if image.mode not in _IMAGE_MODES:
                raise ValueError(f"the image has mode {image.mode}; expected 8-bit RGB")
            return np.array(image.convert("RGB"))
    except (PIL.UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"the image cannot be decoded: {error}") from None
