"""Names: from the keys of a data set to the keys that a robot knows.

Moves values, never looks inside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from piston.serialization import register
from piston.transforms.base import Data, missing_key

SEPARATOR = "/"
# Belong to the sample rather than to a robot, so that no key map can lose them.
ALWAYS_KEPT = ("prompt", "action_is_pad")


@register("repack")
@dataclasses.dataclass(frozen=True)
class RepackTransform:
    """A new dictionary in the shape of `structure`, whose leaves say where each value comes from.

    A leaf is a key of the data (`"observation.state"`) or the path to a nested one
    (`"observation/images/top"`). What `structure` does not name is dropped, except the prompt and
    the padding mask of the actions.
    """

    structure: Mapping[str, Any]

    def __post_init__(self) -> None:
        for path, source in flatten_dict(self.structure).items():
            if not isinstance(source, str):
                raise TypeError(
                    f"RepackTransform: {path!r} must name a key of the data, found {source!r}."
                )

    def __call__(self, data: Data) -> Data:
        filled = _fill(self.structure, {**flatten_dict(data), **data})
        return {**{key: data[key] for key in ALWAYS_KEPT if key in data}, **filled}


def _fill(structure: Mapping[str, Any], values: Mapping[str, Any]) -> Data:
    filled: Data = {}
    for name, source in structure.items():
        if isinstance(source, Mapping):
            filled[name] = _fill(source, values)
        elif source in values:
            filled[name] = values[source]
        else:
            raise missing_key(source, values, f"RepackTransform (for {name!r})")
    return filled


def flatten_dict(tree: Mapping[str, Any], separator: str = SEPARATOR) -> Data:
    """`{"a": {"b": 1}}` → `{"a/b": 1}`. An empty dictionary stays, as a leaf."""
    flat: Data = {}

    def add(key: str, value: Any) -> None:
        if key in flat:
            raise ValueError(f"Two values would both be called {key!r} when flattened.")
        flat[key] = value

    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            for path, leaf in flatten_dict(value, separator).items():
                add(f"{name}{separator}{path}", leaf)
        else:
            add(name, value)
    return flat


def unflatten_dict(flat: Mapping[str, Any], separator: str = SEPARATOR) -> Data:
    """`{"a/b": 1}` → `{"a": {"b": 1}}`: the inverse of `flatten_dict`."""
    tree: Data = {}
    for path, value in flat.items():
        *parents, name = path.split(separator)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"{path!r} lies inside {parent!r}, which is itself a value.")
        if name in node:
            raise ValueError(f"{path!r} is both a value and a dictionary of values.")
        node[name] = value
    return tree
