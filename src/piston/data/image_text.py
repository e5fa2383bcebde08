"""Pictures with a question and an answer: from a folder, or from the labels of a robot data set.

    ImageTextSet("folder")[i]      {"image": uint8 (h, w, 3), "question": str, "answer": str}
    DatasetQuestions(dataset)[i]   the same, of a data set opened with language=True

The folder has one table, *.jsonl (a JSON object per line) or *.parquet, with the columns question,
answer and image: the path of a file in the folder, or, in a parquet file, the bytes of the image or
{bytes, path} as Hugging Face writes it. Texts are read at once; images when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import UInt8

from piston.data.columns import ImageRows, decode_image
from piston.data.dataset import LeRobotDataset
from piston.data.format import INFO
from piston.data.mixture import EpisodeChoice
from piston.data.protocol import Episode, Texts
from piston.files import read_json_lines
from piston.suggestions import did_you_mean

COLUMNS = ("image", "question", "answer")


class _Pictures(Sequence[dict[str, Any]]):
    """What datasets of pictures have in common: no robot, no episodes of their own."""

    fps = 0.0
    episodes: Sequence[Episode] = ()
    cameras = ("image",)
    keys: tuple[str, ...] = ()

    def column(self, key: str) -> np.ndarray:
        raise KeyError(f"Pictures with questions have no columns, so no {key!r}.")


class ImageTextSet(_Pictures):
    """The pictures, questions and answers of a folder. It can be pickled.

    Rows are counted from 0; lines of a *.jsonl file that are empty do not count.
    """

    def __init__(self, root: str | os.PathLike[str], *, complete: bool = True) -> None:
        """Read the table of the folder. Raise an error if there is none or it cannot be used.

        With `complete`, rows without a text are an error; else `incomplete` lists them.
        """
        self.root = Path(root)
        self._path = _find_table(self.root)
        # Without the images of a parquet file, unless they are paths.
        is_lines = self._path.suffix == ".jsonl"
        table = _read_lines(self._path) if is_lines else _read_parquet(self._path)
        self._table = _in_read_only_memory(table)
        self._images = ImageRows(self.root)
        if not len(self._table):
            raise ValueError(f"{self._path} has no rows; expected one for each question.")
        for key in self._table.column_names:
            column = self._table[key]
            if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
                raise ValueError(f"{self._path}: {key} is of type {column.type}, expected text.")
        # The number of the row, and what is wrong with it.
        self.incomplete = [*self._empty_texts()]
        for row, what in self.incomplete if complete else ():
            raise ValueError(f"{self._path}, row {row}: {what}. Complete the row or remove it.")

    def _empty_texts(self) -> Iterator[tuple[int, str]]:
        for key in self._table.column_names:
            column = self._table[key]
            lengths = pc.fill_null(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0)
            for row in np.flatnonzero(lengths.to_numpy() == 0).tolist():
                yield row, f"{key} is {column[row].as_py()!r}, expected a text that is not empty"

    @property
    def texts(self) -> dict[str, Texts]:
        """The questions and the answers."""
        return {key: Texts.of(self._table[key].to_pylist()) for key in COLUMNS[1:]}

    def pairs(self, num_rows: int) -> list[tuple[str, str]]:
        """Return the questions and the answers of the first rows."""
        return list(zip(*(self._table[key][:num_rows].to_pylist() for key in COLUMNS[1:])))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:  # type: ignore[override]
        row = _row_number(index, len(self))
        item = {key: self._table[key][row].as_py() for key in COLUMNS[1:]}
        try:
            return {**item, "image": self.picture(row)}
        except ValueError as error:
            raise ValueError(f"{self._path}, row {row}: {error}") from error

    def picture(self, row: int) -> UInt8[np.ndarray, "h w 3"]:
        """Decode the picture of a row. Raise ValueError if it is missing or damaged."""
        if "image" in self._table.column_names:
            return decode_image({"path": self._table["image"][row].as_py()}, self.root)
        return self._images.read(self._path.name, "image", row)


class DatasetQuestions(_Pictures):
    """The questions about the images of a robot's dataset, opened with language=True."""

    def __init__(self, dataset: LeRobotDataset) -> None:
        self.root, self.episodes = dataset.root, dataset.episodes
        self._dataset, self._questions = dataset, dataset.questions

    @property
    def texts(self) -> dict[str, Texts]:
        """The questions and the answers."""
        pairs = [question for _, question in self._questions]
        return {key: Texts.of(getattr(pair, key) for pair in pairs) for key in COLUMNS[1:]}

    @property
    def num_pictures(self) -> int:
        return len({(frame, question.camera) for frame, question in self._questions})

    def select(self, episodes: EpisodeChoice = None, **_: Any) -> DatasetQuestions:
        return DatasetQuestions(self._dataset.select(episodes))

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:  # type: ignore[override]
        frame, (camera, question, answer) = self._questions[_row_number(index, len(self))]
        image = self._dataset.frame(frame, [camera])[camera]
        return {"image": image, "question": question, "answer": answer}


def is_table(root: Path) -> bool:
    """Return whether a folder is a table of pictures, and not a LeRobot data set."""
    return not (root / INFO).is_file() and bool(_tables(root))


def _row_number(index: SupportsIndex, length: int) -> int:
    row = index.__index__()
    if not -length <= row < length:
        raise IndexError(f"There is no row {row}; there are {length}.")
    return row % length


def _find_table(root: Path) -> Path:
    if not root.is_dir():
        raise FileNotFoundError(f"There is no folder {root} of pictures with questions.")
    tables = _tables(root)
    if len(tables) != 1:
        found = ", ".join(path.name for path in tables) or "none"
        kind = FileNotFoundError if not tables else ValueError
        raise kind(
            f"{root} must have exactly one table, *.jsonl or *.parquet, with the columns "
            f"{', '.join(COLUMNS)}; found {found}."
        )
    return tables[0]


def _tables(root: Path) -> list[Path]:
    paths = sorted(p for p in root.iterdir() if p.suffix in (".jsonl", ".parquet"))
    return [path for path in paths if not path.name.startswith(".")]


def _read_parquet(path: Path) -> pa.Table:
    """Read the columns of texts; `image` is one of them if it holds paths."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            _require_columns(path, schema.names)
            kind = schema.field("image").type
            is_stored = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
            is_stored |= pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            return file.read(columns=list(COLUMNS[1:] if is_stored else COLUMNS))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def _read_lines(path: Path) -> pa.Table:
    rows: list[dict[str, str]] = []
    for number, row in read_json_lines(path):
        if row is None:
            raise ValueError(f"{path}, line {number} is not a JSON object. Repair the line.")
        _require_columns(path, list(row), f", row {len(rows)}")
        for key in COLUMNS:
            if not isinstance(row[key], str):
                what = f"{key} is {str(row[key])[:80]!r}, expected a text"
                raise ValueError(f"{path}, row {len(rows)}: {what}.")
        rows.append({key: row[key] for key in COLUMNS})
    return pa.Table.from_pylist(rows, pa.schema([(key, pa.large_string()) for key in COLUMNS]))


def _in_read_only_memory(table: pa.Table) -> pa.Table:
    """Return the same table in memory that the worker processes of a loader share."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(pa.py_buffer(stream.getvalue().to_pybytes())).read_all()


def _require_columns(path: Path, names: Sequence[str], place: str = "") -> None:
    for key in COLUMNS:
        if key not in names:
            raise ValueError(
                f"{path}{place}: there is no {key!r}.{did_you_mean(key, names)} Found "
                f"{', '.join(names) or 'nothing'}; expected {', '.join(COLUMNS)}."
            )
