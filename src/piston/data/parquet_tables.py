"""LeRobot's tables in Arrow: the data of an episode, the episodes, the tasks.

Knows the exact column types and the schema metadata that other readers look for (Hugging Face
`datasets` reads the `huggingface` entry, pandas the `pandas` entry). Knows nothing of where files
go.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.episode_stats import EpisodeStats
from piston.data.features import Features, cameras
from piston.files import atomic_file

# What `datasets` calls the nested array types of two to five dimensions.
_ARRAY_TYPE = "datasets.features.features.Array{}DExtensionType"
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_table(table: pa.Table, path: Path) -> None:
    """One row group, whole or not at all."""
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, row_group_size=max(len(table), 1))


def concatenate_parquet(sources: Iterable[Path], target: Path) -> None:
    """The rows of all sources in one file, row groups kept (one per episode)."""
    with atomic_file(target) as temporary:
        writer: pq.ParquetWriter | None = None
        try:
            for source in sources:
                with pq.ParquetFile(source) as file:
                    writer = writer or pq.ParquetWriter(temporary, file.schema_arrow)
                    for number in range(file.num_row_groups):
                        group = file.read_row_group(number)
                        writer.write_table(group, row_group_size=max(len(group), 1))
        finally:
            if writer is not None:
                writer.close()


def data_schema(features: Features, list_name: str = "List") -> pa.Schema:
    """Columns of a data file: every feature that is not a video.

    `list_name` is what `datasets` calls a list: "List" since version 4, which no older version
    knows; "Sequence" before, which all versions know.
    """
    stored = {key: entry for key, entry in features.items() if entry["dtype"] != "video"}
    fields = [_data_field(key, entry) for key, entry in stored.items()]
    described = {key: _hugging_face_type(entry, list_name) for key, entry in stored.items()}
    metadata = {"huggingface": json.dumps({"info": {"features": described}})}
    return pa.schema(fields, metadata=metadata)


def data_table(columns: Mapping[str, Any], features: Features, list_name: str = "List") -> pa.Table:
    """Rows of one episode. Numeric columns are (n, *shape) arrays, image columns lists of PNG
    bytes.
    """
    schema = data_schema(features, list_name)
    arrays = [_data_array(columns[field.name], features[field.name]) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _value_type(dtype: str) -> pa.DataType:
    names = {"bool": pa.bool_(), "string": pa.string()}
    return names[dtype] if dtype in names else pa.from_numpy_dtype(np.dtype(dtype))


def _data_field(key: str, entry: dict[str, Any]) -> pa.Field:
    if entry["dtype"] == "image":
        return pa.field(key, _IMAGE_TYPE)
    shape = entry["shape"]
    value_type = _value_type(entry["dtype"])
    if shape == [1]:
        return pa.field(key, value_type)
    if len(shape) == 1:
        return pa.field(key, pa.list_(value_type, shape[0]))
    for _ in shape:
        value_type = pa.list_(value_type)
    # `datasets` stores these as an extension type over plain lists; the metadata says so without
    # importing it.
    extension = {
        "ARROW:extension:name": _ARRAY_TYPE.format(len(shape)),
        "ARROW:extension:metadata": json.dumps([shape, entry["dtype"]]),
    }
    return pa.field(key, value_type, metadata=extension)


def _hugging_face_type(entry: dict[str, Any], list_name: str) -> dict[str, Any]:
    if entry["dtype"] == "image":
        return {"_type": "Image"}
    shape = entry["shape"]
    if shape == [1]:
        return {"dtype": entry["dtype"], "_type": "Value"}
    if len(shape) == 1:
        value = {"dtype": entry["dtype"], "_type": "Value"}
        return {"feature": value, "length": shape[0], "_type": list_name}
    return {"shape": shape, "dtype": entry["dtype"], "_type": f"Array{len(shape)}D"}


def _data_array(values: Any, entry: dict[str, Any]) -> pa.Array:
    if entry["dtype"] == "image":
        return pa.array([{"bytes": png, "path": None} for png in values], type=_IMAGE_TYPE)
    if entry["dtype"] == "string":
        return pa.array(list(values), type=pa.string())
    shape = entry["shape"]
    array = np.ascontiguousarray(values, dtype=np.dtype(entry["dtype"]))
    flat = pa.array(array.ravel(), type=_value_type(entry["dtype"]))
    if shape == [1]:
        return flat
    if len(shape) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, shape[0])
    for size in reversed(shape):
        offsets = pa.array(np.arange(0, len(flat) + 1, size), type=pa.int32())
        flat = pa.ListArray.from_arrays(offsets, flat)
    return flat


def episodes_schema(features: Features, stats: Mapping[str, Sequence[str]]) -> pa.Schema:
    """Columns of meta/episodes. `stats` says which statistics each feature has."""
    fields = [
        ("episode_index", pa.int64()),
        ("tasks", pa.list_(pa.string())),
        ("length", pa.int64()),
        ("data/chunk_index", pa.int64()),
        ("data/file_index", pa.int64()),
        ("dataset_from_index", pa.int64()),
        ("dataset_to_index", pa.int64()),
    ]
    for camera in cameras(features):
        fields += [
            (f"videos/{camera}/chunk_index", pa.int64()),
            (f"videos/{camera}/file_index", pa.int64()),
            (f"videos/{camera}/from_timestamp", pa.float64()),
            (f"videos/{camera}/to_timestamp", pa.float64()),
        ]
    for key, names in stats.items():
        for name in names:
            fields.append((f"stats/{key}/{name}", _stat_type(features[key], name)))
    fields += [("meta/episodes/chunk_index", pa.int64()), ("meta/episodes/file_index", pa.int64())]
    return pa.schema(fields)


def _stat_type(entry: dict[str, Any], name: str) -> pa.DataType:
    if name == "count":
        return pa.list_(pa.int64())
    nested: pa.DataType = pa.float64()
    for _ in entry["shape"]:  # (c, 1, 1) for images, else the feature's own shape
        nested = pa.list_(nested)
    return nested


def stats_row(stats: EpisodeStats) -> dict[str, Any]:
    """Statistics as columns of meta/episodes."""
    return {
        f"stats/{key}/{name}": (value if name == "count" else value.astype(np.float64)).tolist()
        for key, feature in stats.items()
        for name, value in feature.items()
    }


def stats_of_rows(table: pa.Table) -> list[EpisodeStats]:
    """The statistics that rows of meta/episodes hold, one entry per row."""
    episodes: list[EpisodeStats] = [{} for _ in range(len(table))]
    for column in table.column_names:
        if column.startswith("stats/"):
            key, name = column.removeprefix("stats/").rsplit("/", 1)
            for episode, value in zip(episodes, table[column].to_pylist()):
                episode.setdefault(key, {})[name] = np.array(value)
    return episodes


def tasks_table(tasks: Mapping[str, int]) -> pa.Table:
    """meta/tasks.parquet: the task text is the pandas index, which LeRobot looks tasks up by."""
    column = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "str"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [column | {"metadata": {"encoding": "UTF-8"}}],
        "columns": [
            _pandas_column("task_index", "int64", "int64"),
            _pandas_column("task", "object", "str"),
        ],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "3.0.0",
    }
    schema = pa.schema(
        [("task_index", pa.int64()), ("task", pa.large_string())],
        metadata={"pandas": json.dumps(pandas)},
    )
    return pa.table({"task_index": list(tasks.values()), "task": list(tasks)}, schema=schema)


def _pandas_column(name: str, pandas_type: str, numpy_type: str) -> dict[str, Any]:
    types = {"pandas_type": pandas_type, "numpy_type": numpy_type, "metadata": None}
    return {"name": name, "field_name": name} | types
