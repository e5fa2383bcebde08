"""Transforms: pure functions from a dictionary of NumPy values to a new one.

A transform never changes what it is given, nested dictionaries included, and takes any number of
leading batch axes. Here are chains and groups of transforms, the renaming of keys, and the checks
of keys and shapes. `Normalize` checks that values are finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from piston.serialization import register
from piston.suggestions import did_you_mean

Data = dict[str, Any]

TEXTS = ("prompt", "subtask", "question", "answer")
# Keys of a sample rather than of a robot: they are kept whatever keys a robot has.
ALWAYS_KEPT = (*TEXTS, "action_is_pad")


@runtime_checkable
class Transform(Protocol):
    def __call__(self, data: Data, /) -> Data: ...


class MissingKeyError(KeyError):
    """A KeyError whose text is its message; that of a plain KeyError is quoted and escaped."""

    def __str__(self) -> str:
        return str(self.args[0])


@register("group")
@dataclasses.dataclass(frozen=True)
class Group:
    """Transforms on the way to the model, and those that undo them on the way back."""

    inputs: Sequence[Transform] = ()
    outputs: Sequence[Transform] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", _checked(self.inputs))
        object.__setattr__(self, "outputs", _checked(self.outputs))

    def push(self, inputs: Sequence[Transform] = (), outputs: Sequence[Transform] = ()) -> Group:
        """Return a group with one more layer on the side of the model.

        inputs   robot → old → new → model      (appended)
        outputs  robot ← old ← new ← model      (prepended: new runs first)
        """
        return Group(inputs=(*self.inputs, *inputs), outputs=(*outputs, *self.outputs))


@dataclasses.dataclass(frozen=True)
class CompositeTransform:
    """Transforms applied in order; an error has a note that says which one raised it."""

    transforms: Sequence[Transform]

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", _checked(self.transforms))

    def __call__(self, data: Data) -> Data:
        for position, transform in enumerate(self.transforms, start=1):
            try:
                data = transform(data)
            except Exception as error:
                place = f"{position} of {len(self.transforms)}"
                error.add_note(f"in transform {name_of(transform)} ({place})")
                raise
        return data

    def for_inference(self) -> CompositeTransform:
        return CompositeTransform(for_inference(self.transforms))


compose = CompositeTransform


def for_inference(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """Return the transforms of an inference pipeline.

    A transform that differs there has a method `for_inference`. It returns the transform that takes
    its place, or None if it belongs to training only.
    """
    chosen = (t.for_inference() if hasattr(t, "for_inference") else t for t in transforms)
    return tuple(transform for transform in chosen if transform is not None)


def name_of(transform: Transform) -> str:
    """Return the name of a transform's class, or of a function."""
    return getattr(transform, "__name__", type(transform).__name__)


def _checked(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    transforms = tuple(transforms)
    for transform in transforms:
        if isinstance(transform, type):
            name = transform.__name__
            raise TypeError(f"{name} is a class; a transform is an instance of it: {name}().")
        if not callable(transform):
            raise TypeError(f"{transform!r} is not a transform: it cannot be called with data.")
    return transforms


@register("repack")
@dataclasses.dataclass(frozen=True)
class RepackTransform:
    """Return a dictionary in the shape of `structure`, whose leaves name keys of the data.

    A leaf is a key (`"observation.state"`) or the path to a nested one (`"images/top"`). Other keys
    are dropped, except texts (the prompt and the like) and the padding mask of the actions.
    """

    structure: Mapping[str, Any]

    def __post_init__(self) -> None:
        for path, source in flatten_dict(self.structure).items():
            if not isinstance(source, str):
                found = f"{path!r} must name a key of the data, found {source!r}."
                raise TypeError(f"RepackTransform: {found}")

    def __call__(self, data: Data) -> Data:
        filled = _fill(self.structure, {**flatten_dict(data), **data})
        return {**{key: data[key] for key in ALWAYS_KEPT if key in data}, **filled}


def _fill(structure: Mapping[str, Any], values: Mapping[str, Any]) -> Data:
    return {
        name: _fill(source, values)
        if isinstance(source, Mapping)
        else require(values, source, f"RepackTransform (for {name!r})")
        for name, source in structure.items()
    }


def flatten_dict(tree: Mapping[str, Any], separator: str = "/") -> Data:
    """Return `{"a/b": 1}` for `{"a": {"b": 1}}`. An empty dictionary is a leaf."""
    flat: Data = {}
    for name, value in tree.items():
        leaves = {name: value}
        if isinstance(value, Mapping) and value:
            inner = flatten_dict(value, separator)
            leaves = {f"{name}{separator}{path}": leaf for path, leaf in inner.items()}
        if twice := flat.keys() & leaves.keys():
            raise ValueError(f"Two values would both be called {min(twice)!r} when flattened.")
        flat |= leaves
    return flat


def require(data: Mapping[str, Any], key: str, context: str) -> Any:
    """Return the value of `key`. Raise an error that begins with `context` if it is missing."""
    if key not in data:
        raise missing_key(key, data, context)
    return data[key]


def require_mapping(data: Mapping[str, Any], key: str, context: str) -> Mapping[str, Any]:
    value = require(data, key, context)
    if not isinstance(value, Mapping):
        found = type(value).__name__
        raise ValueError(f"{context}: {key!r} is a {found}; expected a dictionary of names.")
    return value


def require_numbers(
    data: Mapping[str, Any], key: str, context: str, dim: int | None = None, axes: int = 1
) -> np.ndarray:
    """Return numbers of shape (…, dim), or with two axes (…, horizon, dim); None: of any size."""
    array = np.asarray(require(data, key, context))
    expected = f"(…, {'horizon, ' * (axes - 1)}{dim or 'dim'})"
    if array.dtype.kind not in "iuf":
        raise ValueError(
            f"{context}: {key!r} has dtype {array.dtype}; expected numbers {expected}."
        )
    if array.ndim < axes or dim not in (None, array.shape[-1]):
        raise ValueError(f"{context}: {key!r} has shape {array.shape}; expected {expected}.")
    return array


def missing_key(key: str, available: Iterable[str], context: str) -> MissingKeyError:
    names = [str(name) for name in available]
    hint = did_you_mean(key, names)
    return MissingKeyError(f"{context}: key {key!r} is missing.{hint} Found {listed(names)}.")


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "nothing"
