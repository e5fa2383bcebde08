"""What a transform is, how transforms are chained, and how they refuse bad data.

A transform takes a dictionary of NumPy values and gives a new one; it never changes what it was
given, nested dictionaries included, and takes any number of leading batch axes. Knows nothing of
particular keys, robots or models.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from piston.serialization import register

Data = dict[str, Any]


@runtime_checkable
class Transform(Protocol):
    def __call__(self, data: Data, /) -> Data: ...


class MissingKeyError(KeyError):
    """A KeyError that reads as a sentence: a plain one shows its message in quotes, escaped."""

    def __str__(self) -> str:
        return str(self.args[0])


@register("group")
@dataclasses.dataclass(frozen=True)
class Group:
    """Transforms on the way in (to the model), and those that undo them on the way out."""

    inputs: Sequence[Transform] = ()
    outputs: Sequence[Transform] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", _checked(self.inputs))
        object.__setattr__(self, "outputs", _checked(self.outputs))

    def push(self, inputs: Sequence[Transform] = (), outputs: Sequence[Transform] = ()) -> Group:
        """One layer nearer to the model.

        inputs   robot → old → new → model      (appended)
        outputs  robot ← old ← new ← model      (prepended: new runs first)
        """
        return Group(inputs=(*self.inputs, *inputs), outputs=(*outputs, *self.outputs))


@dataclasses.dataclass(frozen=True)
class CompositeTransform:
    """Transforms applied in order; an error carries a note that says which one it came from."""

    transforms: Sequence[Transform]

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", _checked(self.transforms))

    def __call__(self, data: Data) -> Data:
        for position, transform in enumerate(self.transforms, start=1):
            try:
                data = transform(data)
            except Exception as error:
                error.add_note(
                    f"in transform {name_of(transform)} ({position} of {len(self.transforms)})"
                )
                raise
        return data

    def for_inference(self) -> CompositeTransform:
        return CompositeTransform(for_inference(self.transforms))


def for_inference(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """Return the transforms of an inference pipeline.

    A transform that differs there has a method `for_inference`. It returns the transform that takes
    its place, or None if it belongs to training only.
    """
    chosen = (t.for_inference() if hasattr(t, "for_inference") else t for t in transforms)
    return tuple(transform for transform in chosen if transform is not None)


def compose(transforms: Iterable[Transform]) -> CompositeTransform:
    return CompositeTransform(tuple(transforms))


def name_of(transform: Transform) -> str:
    """A class's name for the usual transform, a function's name for a plain function."""
    return getattr(transform, "__name__", type(transform).__name__)


def require(data: Mapping[str, Any], key: str, who: str) -> Any:
    """The value under `key`, or an error that names the keys there are."""
    if key not in data:
        raise missing_key(key, data, who)
    return data[key]


def require_mapping(data: Mapping[str, Any], key: str, who: str) -> Mapping[str, Any]:
    value = require(data, key, who)
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{who}: {key!r} is a {type(value).__name__}; expected a dictionary of names."
        )
    return value


def require_vector(data: Mapping[str, Any], key: str, dim: int | None, who: str) -> np.ndarray:
    """Finite numbers of shape (…, dim); any last axis where `dim` is None."""
    return _checked_numbers(require(data, key, who), key, dim, who, axes=("dim",))


def require_chunk(data: Mapping[str, Any], key: str, dim: int | None, who: str) -> np.ndarray:
    """Finite numbers of shape (…, horizon, dim); any last axis where `dim` is None."""
    return _checked_numbers(require(data, key, who), key, dim, who, axes=("horizon", "dim"))


def missing_key(key: str, available: Iterable[str], who: str) -> MissingKeyError:
    names = [str(name) for name in available]
    nearest = difflib.get_close_matches(key, names, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return MissingKeyError(f"{who}: key {key!r} is missing.{hint} Found {listed(names)}.")


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "nothing"


def _checked_numbers(
    value: Any, key: str, dim: int | None, who: str, axes: tuple[str, ...]
) -> np.ndarray:
    array = np.asarray(value)
    expected = ", ".join(["…", *axes[:-1], str(dim or axes[-1])])
    if not np.issubdtype(array.dtype, np.integer) and not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{who}: {key!r} has dtype {array.dtype}; expected numbers ({expected}).")
    if array.ndim < len(axes) or (dim is not None and array.shape[-1] != dim):
        raise ValueError(f"{who}: {key!r} has shape {array.shape}; expected ({expected}).")
    finite = np.isfinite(array)
    if not finite.all():
        bad = np.argwhere(~finite)
        shown = [index[0] if len(index) == 1 else tuple(index) for index in bad[:8].tolist()]
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        raise ValueError(
            f"{who}: {key!r} holds NaN or infinity at {', '.join(map(str, shown))}{more} "
            f"(shape {array.shape}); expected finite numbers."
        )
    return array


def _checked(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    for transform in transforms:
        if isinstance(transform, type):
            name = transform.__name__
            raise TypeError(f"{name} is a class; a transform is an instance of it: {name}().")
        if not callable(transform):
            raise TypeError(f"{transform!r} is not a transform: it cannot be called with data.")
    return tuple(transforms)
