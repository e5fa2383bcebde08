"""Models from checkpoints and back: loading and saving.

    model.safetensors       the tensors under our names
    config.json             {"format": "piston", "version": 1, "model": {…}}, and further sections

A model is loaded as a whole or not at all. Its tensors are read one by one into the memory in which
they are used, so that peak memory is the model. Files appear under their names when they are
complete: a reader sees the old file or the new one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piston.files import atomic_file, atomic_folder, sync, write_json
from piston.models.build import WithoutRandomFills, build_on_meta
from piston.models.configs import ModelConfig
from piston.models.model import Model
from piston.models.precision import held_as_asked
from piston.serialization import to_json
from piston.weights.checkpoint import (
    TENSORS,
    Checkpoint,
    check_match,
    expected_shapes,
    open_checkpoint,
    shapes_of,
)
from piston.weights.configs import CONFIG, OWN_FORMAT, VERSION
from piston.weights.tensors import write_tensor_file

logger = logging.getLogger(__name__)

# Returns what takes the place of a module.
Replace = Callable[[nn.Module], nn.Module]

_MAX_THREADS = 4  # the bandwidth of memory limits reading


def load_model(
    location: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    allow_missing: Iterable[str] = (),
    replace: Replace | None = None,
) -> Model:
    """Load the model of a checkpoint in any known format.

    `dtype` is what the large matrices are held in; None keeps the stored dtype of each. Tensors
    that are float32 in every model become float32. `replace` returns what takes the place of a
    module, which may be itself. It is called as soon as the module's tensors are read, so that the
    model as it is stored never has to fit in memory.
    """
    checkpoint = open_checkpoint(location, config)
    model = build_on_meta(checkpoint.config)
    new = _check_tensors(model, checkpoint, allow_missing)
    _fill_on_meta(model, checkpoint, new, dtype, device, replace)
    return model


def _check_tensors(model: Model, checkpoint: Checkpoint, allow_missing: Iterable[str]) -> list[str]:
    """Return the names of new tensors; raise MismatchError for any other difference."""
    what = f"{checkpoint} does not fit the {model.config.family} model"
    expected, found = shapes_of(model.state_dict()), shapes_of(checkpoint.entries)
    new = check_match(expected, found, allow_missing=allow_missing, what=what)
    if new:
        logger.info("%d tensors are new, not from %s: %s …", len(new), checkpoint.path, new[0])
    return new


def _fill_on_meta(
    model: Model,
    checkpoint: Checkpoint,
    new: Sequence[str],
    dtype: torch.dtype | None,
    device: str | torch.device,
    replace: Replace | None,
) -> None:
    """Give memory and values to all tensors of a model on the meta device, module by module."""
    held, shapes = held_dtypes(model, checkpoint, dtype), shapes_of(model.state_dict())
    initial = _initial_values(model.config, new) if new else {}
    counts = Counter(map(_module, held))
    filled: dict[str, dict[str, Tensor]] = {path: {} for path in counts}
    lock = threading.Lock()

    def fill(name: str) -> None:
        tensor = torch.empty(shapes[name], dtype=held[name], device=device)
        if name in initial:
            tensor.copy_(initial[name])
        else:
            checkpoint.entries[name].read_into(tensor)
        path = _module(name)
        with lock:
            filled[path][name.rpartition(".")[2]] = tensor
            is_complete = len(filled[path]) == counts[path]
        if is_complete:
            module = model.get_submodule(path)
            module.load_state_dict(filled.pop(path), strict=False, assign=True)
            if replace is not None and path:
                model.set_submodule(path, replace(module))

    _read_all(checkpoint, fill)
    for name in initial:
        fill(name)


def _initial_values(config: ModelConfig, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the values with which a new model would start, for these parameters only."""
    model = build_on_meta(config)
    values: dict[str, Tensor] = {}
    modules: dict[str, nn.Module] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        modules[path] = model.get_submodule(path)
        values[name] = torch.empty(modules[path].get_parameter(leaf).shape)
        setattr(modules[path], leaf, nn.Parameter(values[name]))
    with WithoutRandomFills():  # the parameters that stay on the meta device
        for module in modules.values():
            module.reset_parameters()  # type: ignore[operator]
    return values


def held_dtypes(
    model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Return the dtype in which each tensor is held if `dtype` is asked for; None is as stored.

    Some are always float32, even where a file stores less: openpi's files hold the norms of the
    vision tower in bfloat16.
    """
    held = dict.fromkeys(model.state_dict(), torch.float32)
    for name, _ in held_as_asked(model):
        stored = checkpoint.entries.get(name)
        held[name] = dtype or (stored.dtype if stored else torch.float32)
    return held


def _read_all(checkpoint: Checkpoint, read: Callable[[str], None]) -> None:
    """Call `read` with the name of every stored tensor, in several threads."""
    names = checkpoint.names()
    if checkpoint.format == "jax":
        # Arrays are decoded one after the other in their order, by tensorstore's own threads.
        threads = 1
    else:
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        sizes: Counter[str] = Counter()
        for name, entry in checkpoint.entries.items():
            sizes[_module(name)] += entry.num_bytes
        # The largest module first: it needs most memory besides what replaces it.
        names.sort(key=lambda name: (-sizes[_module(name)], _module(name)))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, names))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def save_model(
    model: nn.Module | Mapping[str, Tensor],
    config: ModelConfig,
    folder: str | Path,
    *,
    sections: Mapping[str, Any] | None = None,
) -> None:
    """Write `model.safetensors` and `config.json`; existing ones are replaced.

    `sections` are further parts of `config.json` (plain JSON). Other files in the folder stay.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if empty := sorted(name for name, tensor in state.items() if tensor.is_meta):
        raise ValueError(f"{len(empty)} tensors have no values (meta device), such as {empty[0]}.")
    what = "The tensors are not the configuration's"
    check_match(expected_shapes(config), shapes_of(state), what=what)
    described = describe(config, sections or {})
    folder = Path(folder).absolute()
    exists = folder.is_dir() and any(folder.iterdir())
    # A new folder appears with both files.
    opened = nullcontext(folder) if exists else atomic_folder(folder)
    with opened as place, atomic_file(place / TENSORS) as temporary:
        write_tensor_file(temporary, state)
        sync(temporary)  # before the other file is replaced: a full disk is found here
        write_json(place / CONFIG, described, indent=2)


def describe(config: ModelConfig, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of our config.json."""
    own = {"format": OWN_FORMAT, "version": VERSION, "model": to_json(config)}
    if clash := sorted(own.keys() & sections.keys()):
        raise ValueError(f"Sections of config.json may not be named {', '.join(clash)}.")
    return {**own, **sections}
