"""Writing our own format, whole or not at all, and converting the others to it.

    model.safetensors   the tensors under our names
    config.json         {"format": "piston", "version": 1, "model": {…}}, and what the writer adds
    assets/             as the source had it: norm statistics

Files are written beside their place under another name, brought to the disk, and renamed: whoever
reads, at whatever moment, sees the old file or the new one.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piston.files import sync, write_text
from piston.models.configs import ModelConfig
from piston.serialization import to_json
from piston.weights.building import build_on_meta, expected_shapes, held_dtypes, shapes_of
from piston.weights.checkpoint import CONFIG, TENSORS, VERSION, Checkpoint, open_checkpoint
from piston.weights.errors import check_match
from piston.weights.safetensors_source import OWN_FORMAT
from piston.weights.source import Entry
from piston.weights.tensor_writing import TensorToWrite, write_tensor_file

logger = logging.getLogger(__name__)

_ASSETS = "assets"
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, the tensor just written


def save_model(
    model: nn.Module | Mapping[str, Tensor],
    config: ModelConfig,
    folder: str | Path,
    *,
    sections: Mapping[str, Any] | None = None,
) -> None:
    """Write `model.safetensors` and `config.json`; an existing pair is replaced, file by file.

    `sections` are further parts of `config.json` (plain JSON), for whoever writes more than a
    model. Other files in the folder are left alone.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if empty := sorted(name for name, tensor in state.items() if tensor.is_meta):
        raise ValueError(f"{len(empty)} tensors have no values (meta device), such as {empty[0]}.")
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_match(expected_shapes(config), found, what="The tensors are not the configuration's")
    tensors = {name: TensorToWrite.of(tensor) for name, tensor in state.items()}
    folder = Path(folder).absolute()
    text = _config_text(config, sections or {})
    with written_folder(folder) as fresh:
        write_tensor_file(fresh / TENSORS, tensors, {"format": "pt"})
        write_text(fresh / CONFIG, text)


def convert(
    source: str | Path,
    target: str | Path,
    dtype: torch.dtype | None = None,
    *,
    config: ModelConfig | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Write a checkpoint of any known format in our own, holding one tensor at a time.

    `dtype` None keeps every tensor's; but those that models hold in float32 always become float32.
    """
    target = Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(
            f"{target} exists already. Convert to a new folder, or remove this one first."
        )
    checkpoint = open_checkpoint(source, config)
    model = build_on_meta(checkpoint.config)
    what = f"{checkpoint} is not a whole {checkpoint.config.family} model"
    check_match(shapes_of(model), checkpoint.shapes(), what=what)
    held = held_dtypes(model, checkpoint.dtypes(), dtype)
    tensors = {name: _to_write(checkpoint.entry(name), held[name]) for name in checkpoint.names()}
    if checkpoint.assumed:
        values = ", ".join(f"{name} = {value}" for name, value in checkpoint.assumed.items())
        logger.warning(
            "%s does not say these, so the usual ones were assumed: %s. If the model was trained "
            "with others, convert with its configuration (--preset).",
            checkpoint,
            values,
        )
    for name, reason in checkpoint.dropped.items():
        logger.info("Left out %s: %s.", name, reason)
    with written_folder(target) as fresh:
        write_tensor_file(fresh / TENSORS, tensors, {"format": "pt"}, _report(tensors, progress))
        write_text(fresh / CONFIG, _config_text(checkpoint.config, {}))
        if (assets := _assets_of(checkpoint.path)) is not None:
            shutil.copytree(assets, fresh / _ASSETS)
    return open_checkpoint(target)


def _to_write(entry: Entry, dtype: torch.dtype) -> TensorToWrite:
    return TensorToWrite(entry.shape, dtype, lambda: entry.read(dtype))


def _report(
    tensors: Mapping[str, TensorToWrite], progress: Progress | None
) -> Callable[[str, int], None] | None:
    if progress is None:
        return None
    total = sum(tensor.num_bytes for tensor in tensors.values())
    done = 0

    def report(name: str, num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total, name)

    return report


def _assets_of(path: Path) -> Path | None:
    """The norm statistics of a trainer's step folder, which may be given by its params or file."""
    folders = [path] if path.is_dir() and path.name != "params" else [path.parent]
    return next((f / _ASSETS for f in folders if (f / _ASSETS).is_dir()), None)


def _config_text(config: ModelConfig, sections: Mapping[str, Any]) -> str:
    own = {"format": OWN_FORMAT, "version": VERSION, "model": to_json(config)}
    if clash := sorted(own.keys() & sections.keys()):
        raise ValueError(f"Sections of config.json may not be named {', '.join(clash)}.")
    return json.dumps({**own, **sections}, indent=2, ensure_ascii=False) + "\n"


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder beside the target; what was put in it appears in the target at the end.

    A new target appears in one step. In an existing one the files change places one by one.
    """
    fresh = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)  # of a writer that was killed
    fresh.mkdir(parents=True)
    try:
        yield fresh
        sync(fresh)
        if not folder.exists() or not any(folder.iterdir()):
            fresh.rename(folder)
        else:
            for path in sorted(fresh.iterdir()):
                path.replace(folder / path.name)
            sync(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
