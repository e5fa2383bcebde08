"""A checkpoint in any format, opened: its configuration, and its tensors under our names.

    folder with model.safetensors              Piston's, openpi's PyTorch or LeRobot's, by its names
    folder with model.safetensors.index.json   the same in several files
    folder with manifest.ocdbt, also in params/    openpi's JAX trainer

Opening reads headers only, and config.json once. Tensors for which the configuration has no place
are an error. Missing tensors are an error when a model is loaded: some may be allowed to be new.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piston import assets
from piston.models.configs import ModelConfig
from piston.weights import openpi_jax, pytorch_names
from piston.weights.configs import (
    CONFIG,
    OWN_FORMAT,
    Heads,
    assumed_fields,
    declared_fields,
    infer_config,
    own_config,
    read_object,
)
from piston.weights.expected import CheckpointError, Shape, check_match, expected_shapes, listings
from piston.weights.tensors import Entry, TensorFile

TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OWN_TREES = ("vision.", "vlm.", "action_expert.", "suffix.")


class _Source(NamedTuple):
    """The tensors of a checkpoint under our names, before its configuration is known."""

    format: str
    entries: Mapping[str, Entry]
    unknown: Mapping[str, Shape]  # foreign names that are not in any table
    dropped: Mapping[str, str] = MappingProxyType({})
    heads: Heads | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Tensors by our names, and the configuration of their model."""

    path: Path
    config: ModelConfig
    # `piston`, `jax`, `openpi-pytorch` or `lerobot`.
    format: str
    # In the order in which reading is fastest.
    entries: Mapping[str, Entry]
    # Foreign names that are deliberately not used, with the reason.
    dropped: Mapping[str, str]
    # Fields of the configuration that no file states: the family's usual values.
    assumed: Mapping[str, Any]

    def names(self) -> list[str]:
        return list(self.entries)

    def shapes(self) -> dict[str, Shape]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor in the dtype in which it is stored, or in another one."""
        return self.entries[name].read(dtype)

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(e.shape) * e.dtype.itemsize for e in self.entries.values())

    def __str__(self) -> str:
        return f"{self.path} ({self.format})"


def open_checkpoint(location: str | Path, config: ModelConfig | None = None) -> Checkpoint:
    """Open a checkpoint; its content decides the format.

    Without `config`, the configuration is read from config.json or inferred.
    """
    path = assets.resolve(location)
    tensors = _find_tensors(path)
    if tensors.is_dir():
        entries, unnamed, heads = openpi_jax.read_arrays(tensors)
        source = _Source("jax", entries, unnamed, heads=heads)
    else:
        source = _read_safetensors(tensors)
    if integers := [n for n, e in source.entries.items() if not e.dtype.is_floating_point]:
        raise CheckpointError(
            f"{tensors} holds values that are not floating-point in {', '.join(integers[:5])}. "
            "The file is damaged or not of this model."
        )
    shapes = {name: entry.shape for name, entry in source.entries.items()}
    assumed: Mapping[str, Any] = {}
    if config is None and source.format == OWN_FORMAT:
        config = own_config(tensors.parent / CONFIG)
    elif config is None:
        # The JAX trainer's arrays are in `params`; config.json is beside that folder.
        inside = tensors.is_dir() and tensors.name != "params"
        declared = declared_fields((tensors if inside else tensors.parent) / CONFIG)
        try:
            config = infer_config(shapes, source.heads, declared)
        except CheckpointError as error:  # tensors under unknown names are a likely reason
            unknown = [f"{name} {shape}" for name, shape in source.unknown.items()]
            raise CheckpointError(
                "\n".join([str(error), *listings({"unexpected": unknown})])
            ) from error
        assumed = assumed_fields(config, declared)
    what = f"{path} ({source.format}) does not fit the {config.family} model of its configuration"
    found = {**shapes, **source.unknown}
    check_match(expected_shapes(config), found, may_miss_some=True, what=what)
    return Checkpoint(path, config, source.format, source.entries, source.dropped, assumed)


def _find_tensors(path: Path) -> Path:
    """Return the safetensors file, the index, or the Orbax folder."""
    if path.is_file():
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return path
        raise CheckpointError(
            f"{path} is neither a .safetensors file nor the .index.json of several. Give one of "
            "these, or the checkpoint's folder."
        )
    for name in (TENSORS, INDEX):
        if (path / name).is_file():
            return path / name
    params = openpi_jax.find_params(path)
    if params is not None:
        return params
    present = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{path} is not a checkpoint: expected {TENSORS}, {INDEX}, or the params folder of the "
        f"JAX trainer; found {present}."
    )


def _read_safetensors(path: Path) -> _Source:
    """Read a file, or an index (`….index.json`) of several, under our or foreign names."""
    entries = _read_shards(path) if path.name.endswith(".json") else TensorFile(path).entries
    ours = sum(name.startswith(_OWN_TREES) for name in entries)
    theirs = sum(pytorch_names.is_pytorch_name(name) for name in entries)
    if max(ours, theirs) == 0:
        raise CheckpointError(
            f"{path} holds no known model: its tensors are "
            f"{', '.join(sorted(entries)[:5]) or 'none at all'}. Known are π0, π0.5 and π0-FAST as "
            "written by Piston, by openpi (JAX and PyTorch) and by LeRobot."
        )
    if ours >= theirs:
        known = {name: e for name, e in entries.items() if name.startswith(_OWN_TREES)}
        unknown = {name: e.shape for name, e in entries.items() if name not in known}
        return _Source(OWN_FORMAT, known, unknown)
    table = pytorch_names.translate(entries)
    used = {ours: entries[theirs] for ours, theirs in table.used.items()}
    embedding = "vlm.embedding.weight"
    if table.output_head is not None and not any(name.startswith("suffix.") for name in used):
        # π0-FAST uses the output head, so that it may only be dropped if it is tied.
        used[embedding] = _tied(used[embedding], entries[table.output_head], table.output_head)
    unknown = {name: entries[name].shape for name in table.unknown}
    return _Source(table.format, used, unknown, table.dropped)


def _tied(embedding: Entry, head: Entry, name: str) -> Entry:
    """Return the embedding table; reading it checks that the stored output head is equal."""

    def read_into(destination: Tensor) -> None:
        same = (embedding.shape, embedding.dtype) == (head.shape, head.dtype)
        if not same or not all(map(torch.equal, embedding.chunks(), head.chunks())):
            raise CheckpointError(
                f"{name} differs from the embedding table, but π0-FAST's output head is the "
                "embedding table itself. The file is not of this model."
            )
        embedding.read_into(destination)

    return Entry(embedding.shape, embedding.dtype, read_into)


def _read_shards(index: Path) -> dict[str, Entry]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise CheckpointError(
            f"{index} has no weight_map from tensor names to files beside it. Fetch it again."
        )
    names = sorted(set(weight_map.values()))
    if absent := [name for name in names if not (index.parent / name).is_file()]:
        lines = [f"{index} names files that are not there.", *listings({"missing": absent})]
        raise CheckpointError("\n".join([*lines, "Fetch them."]))
    files = {name: TensorFile(index.parent / name) for name in names}
    actual = {(tensor, name) for name, file in files.items() for tensor in file.entries}
    listed = set(weight_map.items())
    if actual != listed:
        kinds = {"in the index only": listed - actual, "in the files only": actual - listed}
        named = {kind: [f"{t} in {f}" for t, f in sorted(rows)] for kind, rows in kinds.items()}
        lines = [f"{index} and its files do not agree.", *listings(named), "Fetch all again."]
        raise CheckpointError("\n".join(lines))
    return {tensor: entry for file in files.values() for tensor, entry in file.entries.items()}
