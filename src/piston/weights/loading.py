"""Filling a model from a checkpoint: all of it or nothing.

A model on the meta device gets its tensors here. On a CPU and in the stored dtype they are the
mapped file itself, copied page by page only where training writes; else they are read one by one:
either way peak memory is the model. So a model file in use may be replaced by renaming, as
`save_model` does, but not be overwritten in place. A model that has its memory already is filled in
place, in its own dtypes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from piston.models.autoregressive import Pi0FAST
from piston.models.configs import ModelConfig
from piston.models.flow import Pi0
from piston.weights.building import build_model, build_on_meta, held_dtypes, shapes_of
from piston.weights.checkpoint import Checkpoint, open_checkpoint
from piston.weights.errors import check_match
from piston.weights.initial import initial_values

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_THREADS = 4  # reading is limited by memory bandwidth soon


def load_model(
    location: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    may_be_new: Iterable[str] = (),
) -> Pi0 | Pi0FAST:
    """The model of a checkpoint in any known format.

    `dtype` None keeps what is stored, tensor by tensor; another holds the parameters in it. Either
    way those that are float32 whatever the model computes in become float32.
    """
    checkpoint = open_checkpoint(location, config)
    model = build_on_meta(checkpoint.config)
    load_into(model, checkpoint, may_be_new, dtype=dtype, device=device)
    return model


def load_into(
    model: Pi0 | Pi0FAST,
    checkpoint: Checkpoint,
    may_be_new: Iterable[str] = (),
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> list[str]:
    """Fill every tensor of the model; returns the names that were not in the checkpoint.

    Patterns in `may_be_new` (`"*.lora_?"`) say what may be absent: it keeps the values that the
    model was constructed with. Anything else that is missing, extra or of another shape is one
    error, raised before the model is touched. `dtype` and `device` are for models on meta. Should a
    file turn out to be damaged while a model that has memory is filled, all of it becomes NaN.
    """
    expected = shapes_of(model)
    new = check_match(
        expected,
        checkpoint.shapes(),
        may_be_new=may_be_new,
        what=f"{checkpoint} does not fit the {model.config.family} model",
    )
    state = model.state_dict()
    empty = [name for name, tensor in state.items() if tensor.is_meta]
    if not empty:
        _fill(checkpoint, {name: state[name] for name in expected if name not in new})
    elif len(empty) < len(state):
        raise ValueError(
            f"{len(empty)} of the model's {len(state)} tensors are on the meta device, the others "
            "have memory. Build the whole model on one device."
        )
    else:
        _materialize(model, checkpoint, new, dtype, torch.device(device))
    if new:
        logger.info("%d tensors are new, not from %s: %s …", len(new), checkpoint.path, new[0])
    return new


def _materialize(
    model: Pi0 | Pi0FAST,
    checkpoint: Checkpoint,
    new: list[str],
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    held = held_dtypes(model, checkpoint.dtypes(), dtype)

    def make(name: str) -> Tensor:
        entry = checkpoint.entry(name)
        if device.type == "cpu" and held[name] == entry.dtype:
            mapped = entry.map()
            if mapped is not None:
                return mapped
        tensor = torch.empty(entry.shape, dtype=held[name], device=device)
        entry.read_into(tensor)
        return tensor

    tensors = dict(zip(checkpoint.names(), _for_each(checkpoint, checkpoint.names(), make)))
    for name, value in initial_values(lambda: build_model(model.config), new).items():
        tensors[name] = value.to(device=device, dtype=held[name])
    model.load_state_dict(tensors, strict=True, assign=True)  # only now: never half a model


def _fill(checkpoint: Checkpoint, destinations: Mapping[str, Tensor]) -> None:
    def read(name: str) -> None:
        checkpoint.entry(name).read_into(destinations[name])

    names = [name for name in checkpoint.names() if name in destinations]
    try:
        _for_each(checkpoint, names, read)
    except BaseException:
        with torch.no_grad():
            for tensor in destinations.values():
                tensor.fill_(torch.nan)  # half old and half new, it would run and be wrong
        raise


def _for_each(checkpoint: Checkpoint, names: Sequence[str], work: Callable[[str], T]) -> list[T]:
    threads = min(_MAX_THREADS, os.cpu_count() or 1) if checkpoint.source.parallel else 1
    with torch.no_grad(), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, names))
