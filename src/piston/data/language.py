"""Labels in words: the subtask of every frame, and questions with answers about single pictures.

LeRobot v3.0 keeps them in two columns of the data files, as lists of rows with these fields:

    language_persistent  role, content, style, timestamp, camera, tool_calls
                         the same list in every frame of an episode; a row is active from its
                         timestamp until the next row of its style
    language_events      the same without timestamp, in the frame where it happens

A subtask is a persistent row of style "subtask". A question is two event rows of style "vqa" with
the same camera, of role "user" (the question) and "assistant" (the answer). Other styles are not
used. In the older form, a column `subtask_index` refers to meta/subtasks.parquet; it counts where
an episode has no persistent rows of subtasks.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int32

from piston.data.columns import DataRows, read_each_file
from piston.data.format import EVENTS, LANGUAGE, PERSISTENT, SUBTASK_INDEX, SUBTASKS, Episode
from piston.data.metadata import Metadata
from piston.data.problems import EpisodeError
from piston.data.record.labels import QUESTION, ROLES, SUBTASK, Cell, Question, is_text
from piston.suggestions import did_you_mean

Kind = Literal["subtasks", "questions"]

STYLES = {
    PERSISTENT: (SUBTASK, "plan", "memory", "motion", "task_aug"),
    EVENTS: (QUESTION, "interjection", "trace", None),  # None: a call of a tool
}
_NEEDED = {
    PERSISTENT: ("content", "style", "timestamp"),
    EVENTS: ("role", "content", "style", "camera"),
}
_BATCH_ROWS = 4096  # the list that is repeated in every frame is small on disk, not in memory


@dataclasses.dataclass
class EpisodeLabels:
    """The labels of one episode, and what is wrong with them."""

    subtasks: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # from which frame
    questions: list[tuple[int, Question]] = dataclasses.field(default_factory=list)
    wrong: dict[Kind, list[str]] = dataclasses.field(
        default_factory=lambda: {"subtasks": [], "questions": []}
    )
    differs: bool = False  # language_persistent is not the same in all frames
    unknown_styles: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of the episodes of an open data set."""

    texts: tuple[str, ...]  # of subtasks
    numbers: Int32[np.ndarray, " frames"]  # the text of each frame, or -1; read-only
    questions: Mapping[int, Sequence[tuple[int, Question]]]  # by episode, with their frames

    def subtask(self, row: int) -> str:
        number = int(self.numbers[row])
        return self.texts[number] if number >= 0 else ""


def join_labels(
    metadata: Metadata,
    episodes: Sequence[Episode],
    labels: Mapping[int, EpisodeLabels],
    used: Sequence[Kind],
) -> Labels:
    """Make one column of the subtasks. Raise EpisodeError if a label of a kind used is wrong."""
    texts: dict[str, int] = {}
    numbers, start = np.full(sum(episode.length for episode in episodes), -1, np.int32), 0
    for episode in episodes:
        found = labels[episode.index]
        for what in itertools.chain(*(found.wrong[kind] for kind in used)):
            raise EpisodeError(
                f"{metadata.root}, episode {episode.index}: {what}. Correct the label, "
                "leave out the episode, or read the set without labels. List all problems: piston "
                f"data check {metadata.root}",
                episode.index,
            )
        for frame, text in found.subtasks:
            number = texts.setdefault(text, len(texts)) if text else -1
            numbers[start + frame : start + episode.length] = number
        start += episode.length
    numbers.flags.writeable = False
    asked = {e.index: labels[e.index].questions for e in episodes if labels[e.index].questions}
    return Labels(tuple(texts), numbers, asked)


def read_labels(
    metadata: Metadata, episodes: Iterable[Episode], data: DataRows
) -> dict[int, EpisodeLabels]:
    """Read the labels of the episodes whose rows have been read."""
    read = [episode for episode in episodes if episode.index in data.rows]
    labels = {episode.index: EpisodeLabels() for episode in read}
    read_each_file(functools.partial(_read_file, metadata, data, labels), read)
    if SUBTASK_INDEX in metadata.features and SUBTASK_INDEX in data.stored | data.ignored.keys():
        _take_numbered(metadata, data, labels)
    return labels


def _read_file(
    metadata: Metadata,
    data: DataRows,
    labels: Mapping[int, EpisodeLabels],
    path: str,
    episodes: Sequence[Episode],
) -> None:
    places = [(data.first_rows[episode.index], episode) for episode in episodes]
    places.sort(key=lambda place: place[0])
    first: Any = None  # the cell of an episode's first frame
    key = PERSISTENT
    try:
        with pq.ParquetFile(metadata.root / path, page_checksum_verification=True) as file:
            for key in (key for key in LANGUAGE if key in data.names[path]):
                _check_type(key, file.schema_arrow.field(key).type)
                for episode, frame, cells in _parts(file, key, places):
                    found = labels[episode.index]
                    if key == EVENTS:
                        lengths = pc.fill_null(pc.list_value_length(cells), 0)
                        for row in np.flatnonzero(lengths).tolist():
                            _take_questions(found, _rows(cells[row]), frame + row, metadata)
                        continue
                    if frame == 0:
                        first = cells.slice(0, 1)
                        _take_subtasks(found, _rows(first[0]), episode, metadata.fps)
                    found.differs |= not cells.equals(first.take(pa.repeat(0, len(cells))))
    except (pa.ArrowException, OSError, ValueError) as error:
        for episode in episodes:
            kind: Kind = "questions" if key == EVENTS else "subtasks"
            labels[episode.index].wrong[kind].append(f"{path}: {str(error).splitlines()[0]}")


def _rows(cell: pa.Scalar) -> Cell:
    """Return the rows of a cell; nulls are not rows."""
    return [row for row in cell.as_py() or () if row is not None]


def _check_type(key: str, found: pa.DataType) -> None:
    """Raise ValueError if a column of this type cannot hold labels; a column of nulls has none."""
    lists = pa.types.is_list(found) or pa.types.is_large_list(found)
    rows = found.value_type if lists else found
    if pa.types.is_null(rows):
        return
    names = [field.name for field in rows] if lists and pa.types.is_struct(rows) else ()
    if not set(_NEEDED[key]) <= set(names):
        raise ValueError(
            f"{key} is of type {found}; expected lists of structs with {', '.join(_NEEDED[key])}"
        )


def _parts(
    file: pq.ParquetFile, key: str, places: Sequence[tuple[int, Episode]]
) -> Iterator[tuple[Episode, int, pa.Array]]:
    """Yield the cells of episodes: the episode, the number of the first frame, some cells.

    `places` are the episodes with their first rows, in ascending order. An episode may come in
    several parts.
    """
    starts, first = [start for start, _ in places], 0
    for batch in file.iter_batches(_BATCH_ROWS, columns=[key], use_threads=False):
        cells = batch.column(0)
        if pa.types.is_null(cells.type):
            return
        begin = max(bisect.bisect_right(starts, first) - 1, 0)
        for start, episode in places[begin : bisect.bisect_left(starts, first + len(cells))]:
            frame = max(first - start, 0)
            part = cells.slice(max(start - first, 0), max(episode.length - frame, 0))
            if len(part):
                yield episode, frame, part
        first += len(cells)


def _take_subtasks(found: EpisodeLabels, rows: Cell, episode: Episode, fps: float) -> None:
    texts: dict[float, str] = {}  # by time
    wrong = found.wrong["subtasks"]
    for row in rows:
        text, time = row["content"], row["timestamp"]
        if not _is_used(found, PERSISTENT, row["style"]):
            continue
        if not isinstance(time, int | float) or isinstance(time, bool):
            wrong.append(f"the subtask {text!r} has the timestamp {time!r}, not a number")
        elif not is_text(text):
            wrong.append(f"the text of the subtask at {time:g} s is {text!r}, not a sentence")
        elif texts.setdefault(time, text) != text:
            wrong.append(f"there are two subtasks at {time:g} s: {texts[time]!r}, {text!r}")
    for time, text in sorted(texts.items()):
        # Frames are found by number; times are rounded to float32 and may lie between two frames.
        frame = math.floor(time * fps + 0.5) if math.isfinite(time) else -1
        if 0 <= frame < episode.length:
            found.subtasks.append((frame, text))
        else:
            end = f"the episode lasts from 0 to {episode.length / fps:g} s"
            wrong.append(f"the subtask {text!r} begins at {time:g} s, but {end}")


def _take_questions(found: EpisodeLabels, rows: Cell, frame: int, metadata: Metadata) -> None:
    """Take the questions of one frame: those of a camera and their answers are in the same order.

    Which rows come first, questions or answers, is not known.
    """
    texts: dict[str, dict[str, list[str]]] = {}  # by camera and role
    for row in rows:
        text, camera, role = row["content"], row["camera"], row["role"]
        if not _is_used(found, EVENTS, row["style"]):
            continue
        name = "question" if role == "user" else "answer"
        if camera not in metadata.cameras:
            hint = did_you_mean(str(camera), metadata.cameras)
            known = f"The cameras of the set are {', '.join(metadata.cameras) or 'none'}"
            what = f"the {name} {text!r} names the camera {camera!r}.{hint} {known}"
        elif role not in ROLES:
            what = f"the text {text!r} has the role {role!r}, not user or assistant"
        elif not is_text(text):
            what = f"the text of the {name} about {camera} is {text!r}, not a sentence"
        else:
            texts.setdefault(camera, {one: [] for one in ROLES})[role].append(text)
            continue
        found.wrong["questions"].append(f"frame {frame}: {what}")
        return  # without this row, another one may seem to lack its partner
    for camera, by_role in texts.items():
        questions, answers = by_role.values()
        found.questions += ((frame, Question(camera, *pair)) for pair in zip(questions, answers))
        if len(questions) > len(answers):
            what = f"the question {questions[-1]!r} about {camera} has no answer"
            found.wrong["questions"].append(f"frame {frame}: {what}")
        elif len(answers) > len(questions):
            what = f"the answer {answers[-1]!r} about {camera} has no question"
            found.wrong["questions"].append(f"frame {frame}: {what}")


def _is_used(found: EpisodeLabels, key: str, style: Any) -> bool:
    """Return whether rows of this style are read; note it if it is unknown."""
    if style not in STYLES[key]:
        found.unknown_styles.add(f"{key} has rows of style {style!r}")
    return style in (SUBTASK, QUESTION) and style in STYLES[key]


def _take_numbered(metadata: Metadata, data: DataRows, labels: Mapping[int, EpisodeLabels]) -> None:
    """Take subtasks by number where an episode has no others."""
    texts: dict[int, Any] = {}
    why = data.ignored.get(SUBTASK_INDEX)
    try:
        texts = read_subtasks(metadata.root)
    except ValueError as error:
        why = str(error)
    for index, found in labels.items():
        column = data.rows[index].get(SUBTASK_INDEX)
        wrong = found.wrong["subtasks"]
        if found.subtasks or wrong or (column is None and why is None):
            continue
        if why is not None or column is None:
            wrong.append(f"{SUBTASK_INDEX} cannot be used: {why}")
            continue
        numbers = column.reshape(-1)
        if numbers.dtype.kind not in "iu" or len(numbers) != len(column):
            what = f"{numbers.dtype}{list(column.shape[1:])}"
            wrong.append(f"{SUBTASK_INDEX} is {what}, expected an integer in every frame")
            continue
        for frame in np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1)).tolist():
            number = int(numbers[frame])
            if number == -1:  # frames without a label
                found.subtasks.append((frame, ""))
            elif is_text(text := texts.get(number)):
                found.subtasks.append((frame, text))
            else:
                what = f"is not in {SUBTASKS}" if number not in texts else f"has the text {text!r}"
                wrong.append(f"frame {frame}: {SUBTASK_INDEX} {number} {what}")


def read_subtasks(root: Path) -> dict[int, Any]:
    """Read meta/subtasks.parquet: the texts by number. Raise ValueError if that is not possible."""
    try:
        table = pq.read_table(root / SUBTASKS, page_checksum_verification=True)
    except FileNotFoundError:
        raise ValueError(f"there is no {SUBTASKS}") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{SUBTASKS} cannot be read: {error}") from None
    # pandas keeps the texts as the index, under its own name if that has none.
    names = [name for name in table.column_names if name != SUBTASK_INDEX]
    text = SUBTASK if SUBTASK in names else next(iter(names), None)
    if text is None or SUBTASK_INDEX not in table.column_names:
        found = ", ".join(table.column_names)
        raise ValueError(f"{SUBTASKS} has the columns {found}; expected {SUBTASK_INDEX}, {SUBTASK}")
    return dict(zip(table[SUBTASK_INDEX].to_pylist(), table[text].to_pylist()))
