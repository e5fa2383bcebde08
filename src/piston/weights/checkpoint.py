"""A checkpoint in any format, opened: its configuration, and its tensors under our names.

    folder with model.safetensors              Piston's own, openpi's PyTorch or LeRobot's: by names
    folder with model.safetensors.index.json   the same in several files
    folder with manifest.ocdbt, or whose params/ has it          openpi's JAX trainer

Opening reads headers only. It refuses tensors that the configuration has no place for; that none
is missing is checked by whoever loads, since a model may have parts that are meant to be new.
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
from piston.serialization import from_json
from piston.weights.building import expected_shapes
from piston.weights.declared import read_json
from piston.weights.errors import CheckpointError, Shape, check_match, listing
from piston.weights.orbax import find_params, read_orbax
from piston.weights.safetensors_source import OWN_FORMAT, read_safetensors
from piston.weights.sizes import assumed_fields, infer_config
from piston.weights.source import Entry, Source

TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Tensors by our names, and the configuration of the model that they make."""

    path: Path
    config: ModelConfig
    source: Source
    # Fields of the configuration that no file says: the family's usual values.
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def format(self) -> str:
        """`piston`, `jax`, `openpi-pytorch` or `lerobot`."""
        return self.source.format

    @property
    def dropped(self) -> Mapping[str, str]:
        """Foreign names that are deliberately not used, with the reason."""
        return self.source.dropped

    def names(self) -> list[str]:
        """In the order in which reading is cheapest."""
        return list(self.source.entries)

    def entry(self, name: str) -> Entry:
        return self.source.entries[name]

    def shapes(self) -> dict[str, Shape]:
        return {name: entry.shape for name, entry in self.source.entries.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: entry.dtype for name, entry in self.source.entries.items()}

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """In the dtype in which it is stored, unless another is asked for."""
        return self.source.entries[name].read(dtype)

    @property
    def num_bytes(self) -> int:
        entries = self.source.entries.values()
        return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)

    def __str__(self) -> str:
        return f"{self.path} ({self.format})"


def open_checkpoint(location: str | Path, config: ModelConfig | None = None) -> Checkpoint:
    """Detect the format by content. Without `config` the sizes are read or inferred."""
    path = assets.resolve(location)
    tensors = _find_tensors(path)
    if tensors.is_dir():
        source = read_orbax(tensors)
    else:
        source = read_safetensors(tensors)
    if integers := [n for n, e in source.entries.items() if not e.dtype.is_floating_point]:
        raise CheckpointError(
            f"{tensors} holds numbers that are not floating-point in {', '.join(integers[:5])}. "
            "The file is damaged or not of this model."
        )
    shapes = {name: entry.shape for name, entry in source.entries.items()}
    if config is None and source.format == OWN_FORMAT:
        config = read_model_config(tensors.parent)
    assumed: Mapping[str, Any] = {}
    if config is None:
        config = _infer(source, shapes)
        assumed = assumed_fields(config, source.declared)
    what = f"{path} ({source.format}) does not fit the {config.family} model of its configuration"
    found = {**shapes, **source.unknown}
    check_match(expected_shapes(config), found, may_miss_some=True, what=what)
    return Checkpoint(path, config, source, assumed)


def _infer(source: Source, shapes: Mapping[str, Shape]) -> ModelConfig:
    try:
        return infer_config(shapes, source.heads, source.declared)
    except CheckpointError as error:
        if not source.unknown:
            raise
        # Likely the reason: tensors under names that are not known here.
        lines = [f"{name} {shape}" for name, shape in source.unknown.items()]
        raise CheckpointError(f"{error}\n{listing('unexpected', lines)}") from error


def read_model_config(folder: Path) -> ModelConfig:
    """The model's part of the `config.json` that Piston writes beside the tensors."""
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; it says what the model beside it is made of. Copy it from where "
            "the model was written, or give the model's configuration."
        )
    data = read_json(path)
    if data.get("format") != OWN_FORMAT or "model" not in data:
        raise CheckpointError(
            f"{path} is not what Piston writes (no format 'piston' with a model), but the tensors "
            "beside it are. Copy config.json from where the model was written."
        )
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {data.get('version')!r}, known here is {VERSION}. "
            "Update Piston, or write the checkpoint again with this version."
        )
    try:
        config: ModelConfig = from_json(data["model"], ModelConfig, f"{path}: model")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return config


def _find_tensors(path: Path) -> Path:
    """The safetensors file, the index, or the Orbax folder."""
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
    params = find_params(path)
    if params is not None:
        return params
    present = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{path} is no checkpoint: expected {TENSORS}, {INDEX}, or the params folder of the JAX "
        f"trainer; found {present}."
    )
