"""The newest file of `meta/episodes` in v3.0: the rows that a recorder may still change.

Knows the columns and how they are written in one step. Knows nothing of data and video files beyond
the slots that rows name. Older files of `meta/episodes` never change.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.episode_stats import STAT_NAMES, EpisodeStats
from piston.data.features import Features, cameras
from piston.data.parquet_tables import episodes_schema, stats_row, write_table
from piston.data.shared_files import Slot

EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
# The newest file is rewritten with every episode; this bounds what that costs.
EPISODES_PER_FILE = 500


def column_prefixes(features: Features) -> dict[str, str]:
    """What is stored in shared files ("data" and each camera) -> the prefix of its columns."""
    return {"data": "data"} | {key: f"videos/{key}" for key in cameras(features)}


def slots_of(prefix: str, rows: pa.Table) -> list[Slot]:
    chunks, files = rows[f"{prefix}/chunk_index"], rows[f"{prefix}/file_index"]
    return [Slot(chunk, file) for chunk, file in zip(chunks.to_pylist(), files.to_pylist())]


class EpisodeRows:
    def __init__(self, root: Path, features: Features, fps: float) -> None:
        self._root = root
        self._features = features
        self._fps = fps
        self._table: pa.Table | None = None
        self._slot = Slot(0, 0)

    def load(self) -> pa.Table | None:
        """All rows of the set, or None when it has no episodes; the newest file's are kept for
        writing.
        """
        paths = sorted((self._root / "meta/episodes").glob("*/*.parquet"))
        tables = [pq.read_table(path) for path in paths]
        if not tables:
            return None
        self._check_columns(tables[-1].schema)
        self._table = tables[-1]
        self._slot = slots_of("meta/episodes", tables[-1])[-1]
        return pa.concat_tables(tables)

    def __len__(self) -> int:
        """Rows in the newest file."""
        return 0 if self._table is None else len(self._table)

    @property
    def is_full(self) -> bool:
        return len(self) >= EPISODES_PER_FILE

    def begin_next_file(self, chunks_size: int) -> None:
        self._table, self._slot = None, self._slot.next(chunks_size)

    def append(
        self, index: int, tasks: list[str], start: int, length: int, slot: Slot, stats: EpisodeStats
    ) -> None:
        """Writes one more row, of an episode whose every stream has the file `slot` to itself."""
        row: dict[str, Any] = {
            "episode_index": index,
            "tasks": tasks,
            "length": length,
            "dataset_from_index": start,
            "dataset_to_index": start + length,
            "meta/episodes/chunk_index": self._slot.chunk,
            "meta/episodes/file_index": self._slot.file,
        }
        for stream, prefix in column_prefixes(self._features).items():
            row |= {f"{prefix}/chunk_index": slot.chunk, f"{prefix}/file_index": slot.file}
            if stream != "data":
                row |= {f"{prefix}/from_timestamp": 0.0}
                row |= {f"{prefix}/to_timestamp": length / self._fps}
        if self._table is not None:
            schema = self._table.schema  # a set without some statistics stays without them
        else:
            schema = episodes_schema(self._features, {k: list(v) for k, v in stats.items()})
        table = pa.Table.from_pylist([row | stats_row(stats)], schema=schema)
        self._write(table if self._table is None else pa.concat_tables([self._table, table]))

    def move(self, places: Mapping[str, Mapping[int, tuple[Slot, int]]]) -> None:
        """Gives episodes new places: per stream and row, the file and the frames before it."""
        if self._table is None:
            raise ValueError("there are no episodes to move")
        rows = self._table
        lengths = rows["length"].to_pylist()
        for stream, moved in places.items():
            prefix = column_prefixes(self._features)[stream]
            changes: dict[str, dict[int, Any]] = {
                "chunk_index": {row: slot.chunk for row, (slot, _) in moved.items()},
                "file_index": {row: slot.file for row, (slot, _) in moved.items()},
            }
            if stream != "data":
                starts = {row: start for row, (_, start) in moved.items()}
                ends = {row: start + lengths[row] for row, start in starts.items()}
                changes["from_timestamp"] = {row: n / self._fps for row, n in starts.items()}
                changes["to_timestamp"] = {row: n / self._fps for row, n in ends.items()}
            for name, values in changes.items():
                column = rows.column_names.index(f"{prefix}/{name}")
                field = rows.schema.field(column)
                changed = [values.get(i, old) for i, old in enumerate(rows[column].to_pylist())]
                rows = rows.set_column(column, field, pa.array(changed, type=field.type))
        self._write(rows)

    def _write(self, rows: pa.Table) -> None:
        rows = rows.combine_chunks()
        name = EPISODES_PATH.format(chunk_index=self._slot.chunk, file_index=self._slot.file)
        write_table(rows, self._root / name)
        self._table = rows

    def _check_columns(self, found: pa.Schema) -> None:
        columns = set(found.names)
        stats = {
            key: [name for name in STAT_NAMES if f"stats/{key}/{name}" in columns]
            for key in self._features
        }
        expected = set(episodes_schema(self._features, stats).names)
        if expected != columns:
            raise ValueError(
                f"{self._root}: meta/episodes does not fit the features of info.json; they differ "
                f"in {sorted(expected ^ columns)}. This set can be read, but not continued"
            )
