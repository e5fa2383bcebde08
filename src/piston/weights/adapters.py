"""Adapters alone, in files: what training with a frozen base has to keep.

    adapters.safetensors   the adapters under their names in the whole model
    adapters.json          {"format": "piston-adapters", "version": 1, "lora": {expert: {…}}}

They mean something only beside the base weights that they were trained on; which those are is the
user's to know.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from piston.files import write_text
from piston.models.autoregressive import Pi0FAST
from piston.models.configs import ModelConfig
from piston.models.flow import Pi0
from piston.models.lora import adapter_state_dict, load_adapter_state_dict
from piston.weights.declared import read_json
from piston.weights.errors import CheckpointError
from piston.weights.saving import written_folder
from piston.weights.tensor_file import TensorFile
from piston.weights.tensor_writing import TensorToWrite, write_tensor_file

_TENSORS, _CONFIG = "adapters.safetensors", "adapters.json"
_HEAD = {"format": "piston-adapters", "version": 1}


def save_adapters(model: Pi0 | Pi0FAST, folder: str | Path) -> None:
    """Write the model's adapters and what they are; an existing pair is replaced."""
    adapters = adapter_state_dict(model)
    if not adapters:
        raise ValueError("The model has no adapters to save: no expert's size has a lora.")
    text = json.dumps({**_HEAD, "lora": _lora_of(model.config)}, indent=2) + "\n"
    tensors = {name: TensorToWrite.of(tensor) for name, tensor in adapters.items()}
    with written_folder(Path(folder).absolute()) as fresh:
        write_tensor_file(fresh / _TENSORS, tensors, {"format": "pt"})
        write_text(fresh / _CONFIG, text)


def load_adapters(model: Pi0 | Pi0FAST, folder: str | Path) -> None:
    """Fill the model's adapters, all or none; its other weights are left alone.

    The model must have the very adapters that were saved: experts, kinds of layers, rank and alpha.
    """
    folder = Path(folder)
    for name in (_CONFIG, _TENSORS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing; `save_adapters` writes it.")
    data = read_json(folder / _CONFIG)
    if {key: data.get(key) for key in _HEAD} != _HEAD:
        raise CheckpointError(f"{folder / _CONFIG} is not what `save_adapters` writes: {_HEAD}.")
    ours = _lora_of(model.config)
    if data.get("lora") != ours:
        raise CheckpointError(
            f"The adapters in {folder} are {data.get('lora')}, the model's are {ours}. Build the "
            "model with the adapters that were saved."
        )
    file = TensorFile(folder / _TENSORS)
    adapters = {}
    for name, info in file.tensors.items():
        adapters[name] = torch.empty(info.shape, dtype=info.dtype)
        file.read_into(name, adapters[name])
    load_adapter_state_dict(model, adapters)


def _lora_of(config: ModelConfig) -> dict[str, Any]:
    sizes = {name: getattr(config, name, None) for name in ("vlm", "action_expert")}
    return {
        name: dataclasses.asdict(size.lora)
        for name, size in sizes.items()
        if size is not None and size.lora is not None
    }
