"""LeRobot's v3.0 tables in Arrow: the data of an episode, the list of episodes, the tasks.

The column types and the schema metadata are those that other readers expect: Hugging Face
`datasets` reads the `huggingface` entry, pandas the `pandas` entry.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.episode_stats import STAT_NAMES, EpisodeStats
from piston.data.features import Features, cameras
from piston.files import atomic_file

# The name of array types of two to five dimensions in `datasets`.
_ARRAY_TYPE = "datasets.features.features.Array{}DExtensionType"
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

ColumnType = tuple[pa.DataType, dict[str, Any], dict[str, str] | None]


def write_table(table: pa.Table, path: Path) -> None:
    """Write one row group, completely or not at all."""
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, row_group_size=max(len(table), 1))


def data_table(columns: Mapping[str, Any], features: Features) -> pa.Table:
    """Return the rows of one episode: every feature that is not a video.

    Numeric columns are (n, *shape) arrays, image columns lists of encoded images.
    """
    stored = {key: entry for key, entry in features.items() if entry["dtype"] != "video"}
    types = {key: _column_type(entry) for key, entry in stored.items()}
    fields = [pa.field(key, type_, metadata=extra) for key, (type_, _, extra) in types.items()]
    described = {key: description for key, (_, description, _) in types.items()}
    metadata = {"huggingface": json.dumps({"info": {"features": described}})}
    arrays = [_data_array(columns[key], entry) for key, entry in stored.items()]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))


def _value_type(dtype: str) -> pa.DataType:
    names = {"bool": pa.bool_(), "string": pa.string()}
    return names[dtype] if dtype in names else pa.from_numpy_dtype(np.dtype(dtype))


def _column_type(entry: dict[str, Any]) -> ColumnType:
    """Return the type in Arrow, its description for `datasets`, and metadata of the field."""
    dtype, shape = entry["dtype"], entry["shape"]
    if dtype == "image":
        return _IMAGE_TYPE, {"_type": "Image"}, None
    value, described = _value_type(dtype), {"dtype": dtype, "_type": "Value"}
    if shape == [1]:
        return value, described, None
    if len(shape) == 1:
        described = {"feature": described, "length": shape[0], "_type": "List"}
        return pa.list_(value, shape[0]), described, None
    # `datasets` stores these as an extension type over plain lists.
    extension = {
        "ARROW:extension:name": _ARRAY_TYPE.format(len(shape)),
        "ARROW:extension:metadata": json.dumps([shape, dtype]),
    }
    described = {"shape": shape, "dtype": dtype, "_type": f"Array{len(shape)}D"}
    return _nested(value, len(shape)), described, extension


def _nested(value_type: pa.DataType, depth: int) -> pa.DataType:
    for _ in range(depth):
        value_type = pa.list_(value_type)
    return value_type


def _data_array(values: Any, entry: dict[str, Any]) -> pa.Array:
    if entry["dtype"] == "image":
        return pa.array([{"bytes": data, "path": None} for data in values], type=_IMAGE_TYPE)
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
    """Return the columns of meta/episodes; `stats` names the statistics of each feature."""
    integers = ["data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index"]
    fields = [
        ("episode_index", pa.int64()),
        ("tasks", pa.list_(pa.string())),
        ("length", pa.int64()),
        *((name, pa.int64()) for name in integers),
    ]
    for camera in cameras(features):
        fields += [
            (f"videos/{camera}/{name}", pa.int64()) for name in ("chunk_index", "file_index")
        ]
        times = ("from_timestamp", "to_timestamp")
        fields += [(f"videos/{camera}/{name}", pa.float64()) for name in times]
    for key, names in stats.items():
        # The same number of dimensions as the feature; (c, 1, 1) for images.
        value = _nested(pa.float64(), len(features[key]["shape"]))
        types = {name: pa.list_(pa.int64()) if name == "count" else value for name in names}
        fields += [(f"stats/{key}/{name}", type_) for name, type_ in types.items()]
    fields += [("meta/episodes/chunk_index", pa.int64()), ("meta/episodes/file_index", pa.int64())]
    return pa.schema(fields)


def stat_names(schema: pa.Schema, features: Features) -> dict[str, list[str]]:
    """Return which statistics of each feature the rows of meta/episodes hold."""
    columns = set(schema.names)
    found = {k: [n for n in STAT_NAMES if f"stats/{k}/{n}" in columns] for k in features}
    return {key: names for key, names in found.items() if names}


def plain_stats(stats: EpisodeStats) -> dict[str, dict[str, Any]]:
    """Return statistics as lists of numbers: whole for "count", else floats."""
    return {
        key: {
            name: (value if name == "count" else value.astype(np.float64)).tolist()
            for name, value in feature.items()
        }
        for key, feature in stats.items()
    }


def stats_of_rows(table: pa.Table) -> list[EpisodeStats]:
    """Return the statistics in the rows of meta/episodes, one entry per row."""
    episodes: list[EpisodeStats] = [{} for _ in range(len(table))]
    for column in table.column_names:
        if column.startswith("stats/"):
            key, name = column.removeprefix("stats/").rsplit("/", 1)
            for episode, value in zip(episodes, table[column].to_pylist()):
                episode.setdefault(key, {})[name] = np.array(value)
    return episodes


def tasks_table(tasks: Mapping[str, int]) -> pa.Table:
    """Return meta/tasks.parquet: the task text is the pandas index that LeRobot looks up."""
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
