"""Observations for trying a policy, from what its server says that it expects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

PROMPT = "do something"


def example_observation(metadata: Mapping[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """Return a random observation with everything that `metadata["observation"]` names.

    Images are of the size that the model uses. Optional cameras are there as well.
    """
    expected = metadata.get("observation")
    if not isinstance(expected, Mapping):
        raise ValueError(
            "The metadata do not say which observation the policy expects ('observation' is "
            "missing). Piston's servers do, unless the robot is a class without a table."
        )
    return _fill(expected, np.random.default_rng(seed))


def leaves(
    expected: Mapping[str, Any], *path: str
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield where each value of an observation is (its keys, outermost first), and what it is."""
    for key, entry in expected.items():
        if isinstance(entry.get("dtype"), str):
            yield (*path, key), entry
        else:
            yield from leaves(entry, *path, key)


def _fill(expected: Mapping[str, Any], random: np.random.Generator) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for path, entry in leaves(expected):
        place = filled
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = _value(entry, random)
    return filled


def _value(entry: Mapping[str, Any], random: np.random.Generator) -> Any:
    if entry["dtype"] == "str":
        return PROMPT
    sides = iter(entry.get("resized_to", ()))
    shape = [next(sides) if size is None else size for size in entry["shape"]]
    if entry["dtype"] == "uint8":
        return random.integers(256, size=shape, dtype=np.uint8)
    return random.random(shape).astype(entry["dtype"])
