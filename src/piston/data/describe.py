"""A first description of a robot (see `piston.robots.description`), guessed from a data set.

Only `meta/` is read. What cannot be known from it is a comment in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from piston.data.format import (
    DERIVED,
    EVENTS,
    PERSISTENT,
    SUBTASK_INDEX,
    Feature,
    declared_names,
)
from piston.data.metadata import Metadata

SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_OVERVIEWS = ("top", "high", "front", "exterior", "base", "head", "overhead", "third", "scene")
_WRISTS = ("wrist", "hand", "gripper", "eye_in_hand")
# Names of dimensions that must not be subtracted: fingers, and rotations of a hand. In a robot that
# is moved by its joints, wrist_roll is one of them.
_GRIPPERS = re.compile(r"grip|finger|claw|jaw", re.IGNORECASE)
_ROTATIONS = re.compile(r"roll|pitch|yaw|quat|euler|rot|(^|_)(r|q)[xyzw]$|rpy", re.IGNORECASE)
_POSITIONS = re.compile(r"(^|[_. ])[xyz]$", re.IGNORECASE)
_MAX_WIDTH = 100


def describe_robot(metadata: Metadata, name: str) -> str:
    """Return the text of a description. Raise ValueError if the set has no state or no actions."""
    state, other_state = _state(metadata)
    actions = _vectors(metadata, ("action", "actions")) or _vectors(
        metadata, [key for key in metadata.features if key.startswith(("action.", "actions."))]
    )
    if not state or not actions:
        lacking = "state" if not state else "actions"
        keys = ", ".join(key for key in metadata.features if key not in DERIVED)
        raise ValueError(
            f"{metadata.root} has no {lacking} that could be recognised by its name; expected "
            f"vectors such as 'observation.state' and 'action'. It has {keys}. Write the file by "
            "hand: docs/your-robot.md shows one."
        )
    parts = (
        _head(metadata, name),
        _relative(state, actions),
        _cameras(metadata),
        _dimensions(
            "state", "the names of its dimensions in order, or how many", state, other_state
        ),
        _dimensions("actions", "the same, for what the robot is told to do", actions),
        _grippers([*state, *actions]),
    )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(metadata: Metadata, name: str) -> list[str]:
    tasks = [text for text in metadata.tasks.values() if text.strip()]
    prompt = f"prompt = {_quoted(tasks[0] if tasks else 'pick up the cup')}"
    return [
        "# What the numbers and cameras of this robot mean. Check every line: it was guessed from",
        f"# the data set {metadata.root.name}. Then: piston train tiny_robot --robot THIS_FILE …",
        f"name = {_quoted(name)}",
        f"rate = {metadata.fps}  # control steps per second, as recorded",
        f"{'' if len(tasks) == 1 else '# '}{prompt}  # for observations without one;",
        "# in training, every frame has the sentence of its own task",
        *(f"# {line}" for line in describe_labels(metadata)),
    ]


def describe_labels(metadata: Metadata) -> list[str]:
    """Return a line for each kind of label that a data set declares."""
    lines = {
        PERSISTENT: f"The set declares labels of subtasks ({PERSISTENT}).",
        SUBTASK_INDEX: f"The set declares labels of subtasks ({SUBTASK_INDEX}).",
        EVENTS: f"The set declares questions about its pictures ({EVENTS}).",
    }
    return [line for key, line in lines.items() if key in metadata.features]


def _relative(state: Sequence[Feature], actions: Sequence[Feature]) -> list[str]:
    """Joints and positions are relative if state and actions name them alike; nothing else."""
    told, measured = _names(actions), _names(state)
    is_pose = any(map(_POSITIONS.search, told))
    joints = [
        name
        for name in told
        if name in measured
        and not _GRIPPERS.search(name)
        and not (is_pose and _ROTATIONS.search(name))
    ]
    comment = (
        "# Action dimensions that are trained relative to the state (the dimension of the same"
    )
    why = "# name). For absolute joint or hand positions; not for grippers, rotations, velocities."
    if not joints:
        return [comment, why, "# None: no joints have the same name in state and actions."]
    return [comment, why, *_list("relative = ", joints)]


def _cameras(metadata: Metadata) -> list[str]:
    lines = [
        "[cameras]  # the data set's key = the model's slot: base_0_rgb sees the scene, the others",
        "# are at the wrists. The base models know these three; a slot may stay without a camera.",
    ]
    slots = _slots(metadata.cameras)
    if not slots:
        lines.append("# The data set has no camera.")
    for camera, slot in slots.items():
        line = f"{_quoted(camera)} = {_quoted(slot or '…')}"
        lines.append(line if slot else f"# {line}  # no slot is left for it")
    return lines


def _slots(cameras: Iterable[str]) -> dict[str, str | None]:
    """Return a slot for each camera, or None; overviews first, then in the data set's order."""
    names = [camera for camera in cameras if "depth" not in camera.lower()]
    chosen: dict[str, str | None] = dict.fromkeys(names)
    for camera in names:
        words = camera.lower().removeprefix("observation.images.")
        if any(word in words for word in _WRISTS):
            slot = SLOTS[2] if "right" in words else SLOTS[1]
            chosen[camera] = slot if slot not in chosen.values() else None
    rest = [camera for camera in names if not any(w in camera.lower() for w in _WRISTS)]
    rest.sort(key=lambda camera: not any(word in camera.lower() for word in _OVERVIEWS))
    for camera, slot in zip(rest, [s for s in SLOTS if s not in chosen.values()]):
        chosen[camera] = slot
    return chosen


def _state(metadata: Metadata) -> tuple[list[Feature], list[Feature]]:
    """Return the features of the state, and other vectors that might belong to it."""
    keys = [
        key
        for key in metadata.features
        if key not in DERIVED and not key.startswith(("action", "next."))
    ]
    every = _vectors(metadata, keys)
    usual = [one for one in every if one.name in ("observation.state", "state")]
    return (usual, [one for one in every if one not in usual]) if usual else (every, [])


def _vectors(metadata: Metadata, keys: Iterable[str]) -> list[Feature]:
    features = [metadata.features[key] for key in keys if key in metadata.features]
    return [one for one in features if one.dtype.startswith("float") and len(one.shape) == 1]


def _dimensions(
    field: str, comment: str, features: Iterable[Feature], others: Iterable[Feature] = ()
) -> list[str]:
    lines, used = [f"[{field}]  # the data set's key = {comment}"], set[str]()
    for feature in features:
        names = declared_names(feature)
        if used & set(names):  # a name means one dimension
            names = []
        used |= set(names)
        start = f"{_quoted(feature.name)} = "
        lines += _list(start, names) if names else [f"{start}{feature.shape[0]}"]
    lines += [f"# {_quoted(one.name)} = {one.shape[0]}  # not used" for one in others]
    return lines


def _grippers(features: Sequence[Feature]) -> list[str]:
    names = [name for name in dict.fromkeys(_names(features)) if _GRIPPERS.search(name)]
    lines = [
        "[grippers]  # the robot's numbers at both ends become 0 (open) and 1 (closed), as in the",
        "# data of the base models. Without this, they are only normalised, like other dimensions.",
    ]
    return [
        *lines,
        *(f"# {_quoted(n)} = {{ open = 1.0, closed = 0.0 }}" for n in names or ["gripper"]),
    ]


def _names(features: Iterable[Feature]) -> list[str]:
    return [name for feature in features for name in declared_names(feature)]


def _list(start: str, names: Sequence[str]) -> list[str]:
    """Return `start` and a list of names, in lines of limited length."""
    whole = f"{start}[{', '.join(map(_quoted, names))}]"
    if len(whole) <= _MAX_WIDTH:
        return [whole]
    lines = [""]
    for name in map(_quoted, names):
        if len(lines[-1]) + len(name) + 6 > _MAX_WIDTH:
            lines.append("")
        lines[-1] += f" {name}," if lines[-1] else f"{name},"
    return [f"{start}[", *(f"    {line}" for line in lines), "]"]


def _quoted(text: str) -> str:
    """A JSON string is a TOML string, as long as DEL is escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
