"""Labels in words, to write: the subtask of every frame, and questions about single images.

`data.language` says how LeRobot v3.0 keeps them, and reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from piston.data.format import EVENTS, PERSISTENT

if TYPE_CHECKING:
    from typing import TypeGuard

Cell = list[dict[str, Any]]  # the rows of labels in one frame
SUBTASK, QUESTION = "subtask", "vqa"  # styles of rows
_FIELDS = ("role", "content", "style", "timestamp", "camera", "tool_calls")
ROLES = ("user", "assistant")


class Question(NamedTuple):
    """A question about one picture; `camera` is the data set's key."""

    camera: str
    question: str
    answer: str


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip())


def label_cells(
    subtasks: Sequence[str], questions: Sequence[Sequence[Question]], fps: float
) -> dict[str, list[Cell]]:
    """Return both columns of an episode, given the subtask ("" for none) and questions by frame."""
    persistent: Cell = [
        _row("assistant", text, SUBTASK) | {"timestamp": frame / fps}
        for frame, text in enumerate(subtasks)
        if text and (frame == 0 or text != subtasks[frame - 1])
    ]
    events: list[Cell] = [
        [
            _row(role, text, QUESTION, one.camera)
            for one in asked
            for role, text in zip(ROLES, (one.question, one.answer))
        ]
        for asked in questions
    ]
    return {PERSISTENT: [persistent] * len(subtasks), EVENTS: events}


def _row(role: str, content: str, style: str, camera: str | None = None) -> dict[str, Any]:
    return {"role": role, "content": content, "style": style, "camera": camera}


def language_array(key: str, cells: Iterable[Cell | None]) -> pa.Array:
    """Return a column of labels in LeRobot's type; fields that a row lacks are null.

    Raise ValueError if the cells are not lists of such rows.
    """

    def type_of(call: pa.DataType) -> pa.DataType:
        types = {"timestamp": pa.float32(), "tool_calls": pa.list_(call)}
        return pa.list_(pa.struct([(n, types.get(n, pa.string())) for n in _fields(key)]))

    try:
        plain = [[row | {"tool_calls": _as_json(row)} for row in one or () if row] for one in cells]
        array = pa.array(plain, type_of(pa.string()))
    except (AttributeError, TypeError, pa.ArrowException) as error:
        raise ValueError(f"{key} does not hold rows of labels: {error}") from error
    # Arrow has had a type for JSON since version 19, which arrays cannot be made of directly.
    return array.cast(type_of(pa.json_())) if hasattr(pa, "json_") else array


def describe_language(key: str) -> dict[str, Any]:
    """Return the type of a column of labels as Hugging Face `datasets` describes it."""
    described: dict[str, Any] = {}
    for name in _fields(key):
        dtype = "float32" if name == "timestamp" else "string"
        described[name] = {"dtype": dtype, "_type": "Value"}
    described["tool_calls"] = {"feature": {"_type": "Json"}, "_type": "List"}
    return {"feature": described, "_type": "List"}


def _fields(key: str) -> list[str]:
    return [name for name in _FIELDS if key == PERSISTENT or name != "timestamp"]


def _as_json(row: Mapping[str, Any]) -> list[str] | None:
    calls = row.get("tool_calls")
    if calls is None:
        return None
    return [call if isinstance(call, str) else json.dumps(call) for call in calls]
