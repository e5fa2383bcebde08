"""Numbers and texts of a data set as whole columns, in the order of its episodes.

Reads parquet, one key or many at a time, and keeps what it read; a column that files may lack
(`index`, `task_index`, …) is computed. Decodes no image and no video. Pickled without what it read.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from piston.data.episodes import Episode, EpisodeError
from piston.data.metadata import DERIVED, Metadata

Rows = dict[str, np.ndarray]  # of one episode, by key

_THREADS = 4  # small files: mostly waiting


class Columns:
    """`stored` names the keys that the files have; the derived ones are always there."""

    def __init__(self, metadata: Metadata, episodes: Sequence[Episode], stored: Iterable[str]):
        self._metadata = metadata
        self._episodes = tuple(episodes)
        self._stored = frozenset(stored)
        lengths = [episode.length for episode in episodes]
        self._starts = np.cumsum([0, *lengths])
        features = metadata.features.values()
        numeric = [f.name for f in features if not f.is_camera and f.name not in DERIVED]
        # Everything but cameras; the derived keys last.
        self.keys = (*(name for name in numeric if name in self._stored), *DERIVED)
        self._forget()

    def _forget(self) -> None:
        self._values: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: str) -> np.ndarray:
        """(frames, …), read only."""
        if key not in self._values:
            self.load([key])
        return self._values[key]

    def load(self, keys: Sequence[str]) -> None:
        """Read what is not there yet, each file once."""
        if all(key in self._values for key in keys):
            return
        with self._lock:
            missing = [key for key in keys if key not in self._values]
            stored = [key for key in missing if key in self._stored]
            if stored:
                self._values.update(self._read(stored))
            self._values.update({key: self._derive(key) for key in missing if key not in stored})
            for key in missing:
                self._values[key].flags.writeable = False

    def unreadable(self) -> dict[int, str]:
        """Reads everything, and keeps it; or tells the episodes whose rows cannot be read."""
        try:
            self.load(self.keys)
            return {}
        except ValueError:
            pass
        by_file: dict[str, list[Episode]] = collections.defaultdict(list)
        for episode in self._episodes:
            by_file[episode.data_path].append(episode)
        keys = [key for key in self.keys if key in self._stored]
        wrong: dict[int, str] = {}
        for path, inside in by_file.items():
            wrong |= read_rows(self._metadata, self._metadata.root / path, inside, keys)[1]
        return wrong

    def _read(self, keys: list[str]) -> dict[str, np.ndarray]:
        by_file: dict[str, list[int]] = collections.defaultdict(list)
        for position, episode in enumerate(self._episodes):
            by_file[episode.data_path].append(position)
        result: dict[str, np.ndarray] = {}
        with ThreadPoolExecutor(max_workers=min(_THREADS, len(by_file))) as pool:
            files = pool.map(self._read_file, by_file, by_file.values(), itertools.repeat(keys))
            for positions, rows in zip(by_file.values(), files):
                for position in positions:
                    for key, values in rows[self._episodes[position].index].items():
                        if key not in result:
                            shape = (int(self._starts[-1]), *values.shape[1:])
                            result[key] = np.empty(shape, values.dtype)
                        self._copy(key, position, values, result[key])
        return result

    def _copy(self, key: str, position: int, found: np.ndarray, out: np.ndarray) -> None:
        episode, start, stop = self._episodes[position], *self._starts[position : position + 2]
        if found.shape[1:] != out.shape[1:] or not np.can_cast(found.dtype, out.dtype, "same_kind"):
            raise EpisodeError(
                f"{episode.data_path}: {key} is {found.dtype}{list(found.shape[1:])}, in the files "
                f"before it is {out.dtype}{list(out.shape[1:])}. Write the file anew, or leave "
                f"episode {episode.index} out.",
                episode.index,
            )
        out[start:stop] = found

    def _read_file(self, path: str, positions: list[int], keys: list[str]) -> dict[int, Rows]:
        episodes = [self._episodes[position] for position in positions]
        found, wrong = read_rows(self._metadata, self._metadata.root / path, episodes, keys)
        for what in wrong.values():
            raise ValueError(what)
        return found

    def _derive(self, key: str) -> np.ndarray:
        episodes = self._episodes
        lengths = [episode.length for episode in episodes]
        steps = np.concatenate([np.arange(length) for length in lengths])
        if key == "frame_index":
            return steps
        if key == "timestamp":
            return (steps / self._metadata.fps).astype(np.float32)
        if key == "index":
            return steps + np.repeat([episode.start for episode in episodes], lengths)
        if key == "episode_index":
            return np.repeat([episode.index for episode in episodes], lengths)
        if key == "task_index":
            numbers = {text: number for number, text in self._metadata.tasks.items()}
            first = [numbers.get(e.tasks[0], -1) if e.tasks else -1 for e in episodes]
            return np.repeat(first, lengths)
        raise KeyError(f"{self._metadata.root} has no column {key!r}; it has {list(self.keys)}.")

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_values", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def read_table(path: Path, keys: Sequence[str]) -> pa.Table:
    try:
        return pq.read_table(path, columns=list(keys), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}. `piston data check` lists every damaged file."
        ) from None


def read_rows(
    metadata: Metadata, path: Path, episodes: Sequence[Episode], keys: Sequence[str]
) -> tuple[dict[int, Rows], dict[int, str]]:
    """Each episode's own rows of a data file; for those that cannot be read, why."""
    try:
        table = read_table(path, keys)
    except ValueError as error:
        return {}, {episode.index: str(error) for episode in episodes}

    def read(together: Sequence[Episode], table: pa.Table) -> dict[int, Rows]:
        rows = find_rows(metadata, path, together, table.num_rows)
        if len(together) == 1:  # what is wrong in other rows is not this one's business
            only = rows[together[0].index]
            table = table.slice(only.start, only.stop - only.start)
            rows = {together[0].index: slice(0, table.num_rows)}
        shapes = {key: metadata.features[key].shape for key in keys if key in metadata.features}
        arrays = {key: to_array(table[key], shapes.get(key, ()), path, key) for key in keys}
        return {
            index: {key: array[own] for key, array in arrays.items()} for index, own in rows.items()
        }

    try:
        return read(episodes, table), {}
    except ValueError:
        pass
    found: dict[int, Rows] = {}
    wrong: dict[int, str] = {}
    for episode in episodes:
        try:
            found |= read([episode], table)
        except ValueError as error:
            wrong[episode.index] = str(error)
    return found, wrong


def find_rows(
    metadata: Metadata, path: Path, episodes: Sequence[Episode], num_rows: int
) -> dict[int, slice]:
    """Which rows of a data file are whose."""
    if metadata.version != "v3.0":
        return {episode.index: slice(0, num_rows) for episode in episodes}
    if "episode_index" in pq.read_schema(path).names:
        owners = read_table(path, ["episode_index"])["episode_index"].to_numpy()
        return _pieces(metadata, path, episodes, owners)
    relative = path.relative_to(metadata.root).as_posix()
    first = min(e.start for e in metadata.episodes if e.data_path == relative)
    return {e.index: slice(e.start - first, e.start - first + e.length) for e in episodes}


def _pieces(
    metadata: Metadata, path: Path, episodes: Sequence[Episode], owners: np.ndarray
) -> dict[int, slice]:
    numbers, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
    found = {int(n): (int(first), int(count)) for n, first, count in zip(numbers, firsts, counts)}
    rows = {}
    for episode in episodes:
        first, count = found.get(episode.index, (0, 0))
        if count != episode.length or (owners[first : first + count] != episode.index).any():
            raise ValueError(
                f"{path}: {count} rows are of episode {episode.index}, or they are not in one "
                f"piece; expected {episode.length}. Run: piston data check {metadata.root}"
            )
        rows[episode.index] = slice(first, first + count)
    return rows


def to_array(column: pa.ChunkedArray, shape: tuple[int, ...], path: Path, key: str) -> np.ndarray:
    """(rows,) for plain values, (rows, *shape) for lists."""
    values, sizes = column.combine_chunks(), []
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or _is_fixed(values):
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


def _is_fixed(values: pa.Array) -> bool:
    return bool(pa.types.is_fixed_size_list(values.type))
