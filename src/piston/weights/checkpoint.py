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
from typing import Any

import torch
from torch import Tensor

from piston import assets
from piston.models.configs import ModelConfig
from piston.weights import openpi_jax, pytorch_names
from piston.weights.configs import (
    CONFIG,
    OWN_FORMAT,
    declared_fields,
    infer_config,
    own_config,
    read_object,
)
from piston.weights.expected import CheckpointError, Shape, check_match, expected_shapes, listing
from piston.weights.tensors import Entry, FileEntry, read_tensor_file

TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OWN_TREES = ("vision.", "vlm.", "action_expert.", "suffix.")


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
    entries: Mapping[str, Entry]
    dropped: dict[str, str] = {}
    heads: dict[str, dict[str, int]] = {}
    if tensors.is_dir():
        format_ = "jax"
        entries, unknown, heads = openpi_jax.read_arrays(tensors)
    else:
        format_, entries, unknown, dropped = _read_safetensors(tensors)
    if integers := [name for name, e in entries.items() if not e.dtype.is_floating_point]:
        raise CheckpointError(
            f"{tensors} holds values that are not floating-point in {', '.join(integers[:5])}. "
            "The file is damaged or not of this model."
        )
    shapes = {name: entry.shape for name, entry in entries.items()}
    assumed: Mapping[str, Any] = {}
    if config is None and format_ == OWN_FORMAT:
        config = own_config(tensors.parent / CONFIG)
    elif config is None:
        # The JAX trainer's arrays are in `params`; config.json is beside that folder.
        inside = tensors.is_dir() and tensors.name != "params"
        declared = declared_fields((tensors if inside else tensors.parent) / CONFIG)
        try:
            config, assumed = infer_config(shapes, heads, declared)
        except CheckpointError as error:  # tensors under unknown names are a likely reason
            lines = [f"{name} {shape}" for name, shape in unknown.items()]
            raise CheckpointError(f"{error}\n{listing({'unexpected': lines})}") from error
    what = f"{path} ({format_}) does not fit the {config.family} model of its configuration"
    check_match(expected_shapes(config), {**shapes, **unknown}, may_miss_some=True, what=what)
    return Checkpoint(path, config, format_, entries, dropped, assumed)


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


def _read_safetensors(
    path: Path,
) -> tuple[str, dict[str, FileEntry], dict[str, Shape], dict[str, str]]:
    """Read a file, or an index of several, under our or foreign names.

    Return the format, the tensors, the shapes of those under unknown names, and the dropped names.
    """
    entries = _read_shards(path) if path.name.endswith(".json") else read_tensor_file(path)
    used = {name: name for name in entries if name.startswith(_OWN_TREES)}
    theirs = sum(map(pytorch_names.is_pytorch_name, entries))
    if not used and not theirs:
        raise CheckpointError(
            f"{path} holds no known model: its tensors are "
            f"{', '.join(sorted(entries)[:5]) or 'none at all'}. Known are π0, π0.5 and π0-FAST as "
            "written by Piston, by openpi (JAX and PyTorch) and by LeRobot."
        )
    if len(used) >= theirs:
        unknown = {name: e.shape for name, e in entries.items() if name not in used}
        return OWN_FORMAT, {name: entries[name] for name in used}, unknown, {}
    table = pytorch_names.translate(entries)
    found = {ours: entries[name] for ours, name in table.used.items()}
    if table.output_head is not None and not any(name.startswith("suffix.") for name in found):
        # π0-FAST uses the output head, so that it may only be dropped if it is tied.
        twin = (table.output_head, entries[table.output_head])
        embedding = "vlm.embedding.weight"
        found[embedding] = dataclasses.replace(found[embedding], twin=twin)
    return table.format, found, {name: entries[name].shape for name in table.unknown}, table.dropped


def _read_shards(index: Path) -> dict[str, FileEntry]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise CheckpointError(
            f"{index} has no weight_map from tensor names to files beside it. Fetch it again."
        )
    names = sorted(set(weight_map.values()))
    problems = {"missing": [name for name in names if not (index.parent / name).is_file()]}
    if not problems["missing"]:
        files = {name: read_tensor_file(index.parent / name) for name in names}
        actual = {(tensor, name) for name, entries in files.items() for tensor in entries}
        rows = {
            "in the index only": weight_map.items() - actual,
            "in the files only": actual - weight_map.items(),
        }
        problems = {kind: [f"{t} in {f}" for t, f in sorted(r)] for kind, r in rows.items()}
    if any(problems.values()):
        text = listing(problems)
        raise CheckpointError(f"{index} and its files do not agree.\n{text}\nFetch all again.")
    return {name: entry for entries in files.values() for name, entry in entries.items()}
