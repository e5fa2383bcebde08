"""Conversion of checkpoints: from any known format to ours, openpi's or LeRobot's.

    piston      model.safetensors, config.json with the robot of a trained checkpoint, assets/
    openpi      model.safetensors as openpi's PyTorch models load it, config.json, assets/
    openpi-jax  params/ as openpi's JAX models load it (Orbax), config.json, assets/
    lerobot     model.safetensors, config.json and processors of a LeRobot policy

Tensors are read, changed and written one at a time. The names are those of the table with which the
format is read. openpi and LeRobot have a place for statistics, but none for the robot: its own
transforms are a configuration there (openpi), or steps that the user adds (LeRobot).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from piston.config import TRAIN_SECTION
from piston.files import atomic_folder, check_new_folder, is_really_in, write_json
from piston.models.build import build_on_meta
from piston.models.configs import GemmaSize, ModelConfig, VisionSize
from piston.models.lora import merged_weight, without_adapters
from piston.progress import Progress, no_progress
from piston.serialization import to_json
from piston.suggestions import did_you_mean
from piston.transforms.normalize import FILE_NAME, NormStats, read_norm_stats, write_norm_stats
from piston.weights import lerobot, openpi_jax
from piston.weights.checkpoint import TENSORS, Checkpoint, open_checkpoint
from piston.weights.configs import (
    CONFIG,
    FAMILIES,
    OPENPI_NAMES,
    OWN_FORMAT,
    foreign_fields,
    unusual_fields,
)
from piston.weights.models import describe, held_dtypes
from piston.weights.pytorch_names import EMBEDDING, EXPERT_HEAD, OUTPUT_HEAD, foreign_name
from piston.weights.tensors import CheckpointError, read_object, write_tensor_file

logger = logging.getLogger(__name__)

Format = Literal["piston", "openpi", "openpi-jax", "lerobot"]
FORMATS: tuple[Format, ...] = get_args(Format)
_SOFTWARE = {
    "openpi": "openpi's PyTorch models",
    "openpi-jax": "openpi's JAX models",
    "lerobot": "LeRobot's models",
}
_FAMILIES = {"openpi": ("π0", "π0.5"), "openpi-jax": tuple(FAMILIES), "lerobot": tuple(FAMILIES)}
_ASSETS = "assets"


def convert(
    source: str | Path,
    target: str | Path,
    dtype: torch.dtype | None = None,
    *,
    to: Format = "piston",
    merge_lora: bool = False,
    config: ModelConfig | None = None,
    sizes: Mapping[str, VisionSize | GemmaSize] | None = None,
    asset_id: str | None = None,
    progress: Progress = no_progress,
) -> Checkpoint:
    """Write a checkpoint of any known format in another one, and open the result.

    `dtype` None keeps the dtype of every tensor, except that tensors which are float32 in every
    model become float32. `merge_lora` adds adapters to the weights that they adapt. `asset_id`
    chooses the statistics for LeRobot among several in `assets/`. `progress` counts bytes.
    """
    if to not in FORMATS:
        hint = did_you_mean(to, FORMATS)
        raise ValueError(f"The format is {to!r}; expected one of {', '.join(FORMATS)}.{hint}")
    target = Path(target).absolute()
    check_new_folder(target)
    checkpoint = open_checkpoint(source, config, sizes=sizes, allow_missing=())
    tensors = _Tensors(checkpoint, dtype, merge_lora)
    names = {name: name for name in tensors.dtypes}
    if to != "piston":
        _check_counterpart(tensors, to)
    if to in ("openpi", "lerobot"):
        names = _foreign_names(tensors, to)
    _log_choices(checkpoint)
    with atomic_folder(target) as fresh:
        _write_small_files(fresh, to, _SourceFiles(checkpoint), tensors.config, asset_id)
        shapes = {theirs: tensors.empty(ours) for theirs, ours in names.items()}
        if to == "openpi-jax":
            params = fresh / "params"
            openpi_jax.write_arrays(params, tensors.config, shapes, tensors.read, progress)
        else:
            write_tensor_file(fresh / TENSORS, shapes, lambda n: tensors.read(names[n]), progress)
    return open_checkpoint(target, None if to == "piston" else tensors.config)


def _write_small_files(
    folder: Path, to: Format, files: _SourceFiles, config: ModelConfig, asset_id: str | None
) -> None:
    """Write the configuration and the statistics: first, so that errors come before the tensors."""
    if to != "piston" and files.has_robot:
        logger.warning(
            "%s are written without the robot. Its own transforms (such as delta actions, and "
            "ALOHA's signs and grippers) have to be applied there: see docs/checkpoints.md.",
            _SOFTWARE[to],
        )
    if to == "lerobot":
        norm_stats, quantiles = files.statistics(asset_id)
        lerobot.write_policy_files(
            folder, config, norm_stats, use_quantiles=quantiles, floor=files.norm_floor
        )
        return
    described = describe(config, files.sections(config))
    if to != "piston":
        described = foreign_fields(config, OPENPI_NAMES)
    write_json(folder / CONFIG, described, indent=2)
    files.copy_statistics(folder, to, asset_id)


class _Tensors:
    """The tensors of a checkpoint as they are written, under our names, read on demand."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None, merge_lora: bool) -> None:
        self._checkpoint, self.config = checkpoint, checkpoint.config
        plain = without_adapters(self.config)
        if merge_lora and plain == self.config:
            raise ValueError(f"{checkpoint} has no adapters to merge: leave out --merge-lora.")
        self._merge = merge_lora
        if merge_lora:
            self.config = plain
        model = build_on_meta(self.config)
        self._model, held = model.state_dict(), held_dtypes(model, checkpoint, dtype)
        # In the order in which reading is fastest.
        self.dtypes = {name: held[name] for name in checkpoint.names() if name in held}

    def empty(self, name: str) -> Tensor:
        """Return a tensor without memory in the shape and dtype that are written."""
        if name == EXPERT_HEAD:
            rows, width = self.config.vocab_size, self._model["suffix.action_in.weight"].shape[0]
            dtype = self.dtypes["vlm.embedding.weight"]
            return torch.empty(rows, width, dtype=dtype, device="meta")
        return self._model[name].to(self.dtypes[name])

    def read(self, name: str) -> Tensor:
        if name == EXPERT_HEAD:
            return torch.zeros_like(self.empty(name), device="cpu")
        part, _, leaf = name.rpartition(".")
        if not self._merge or leaf != "weight" or f"{part}.lora_a" not in self._checkpoint.entries:
            return self._checkpoint.tensor(name, self.dtypes[name])
        lora = getattr(self._checkpoint.config, name.partition(".")[0]).lora
        a, b = (self._checkpoint.tensor(f"{part}.{leaf}") for leaf in ("lora_a", "lora_b"))
        merged = merged_weight(self._checkpoint.tensor(name), a, b, lora.scale)
        return merged.to(self.dtypes[name])


def _check_counterpart(tensors: _Tensors, to: Format) -> None:
    """Raise ValueError if the other software has no such model; warn if it has other sizes."""
    config, software = tensors.config, _SOFTWARE[to]
    if config.family not in _FAMILIES[to]:
        others = [name for name in _FAMILIES if config.family in _FAMILIES[name]]
        raise ValueError(
            f"The model is {config.family}, which {software} do not include. Write it with "
            f"{' or '.join(f'--to {name}' for name in (*others, 'piston'))}."
        )
    if config != without_adapters(config):
        raise ValueError("The model has adapters, which are written only merged: add --merge-lora.")
    if without := sorted(ours for ours in tensors.dtypes if foreign_name(ours) is None):
        raise ValueError(
            f"{software} have no counterpart of {len(without)} tensors, such as {without[0]}: "
            "models with a convolutional stem (VisionSize.stem), distilled models "
            "(`piston distill`), and models of your own exist here only."
        )
    if unusual := unusual_fields(config):
        logger.warning(
            "The model is written, but %s may not be able to load it; it differs from the public "
            "%s in %s.",
            *(software, config.family),
            ", ".join(f"{name} = {value}" for name, value in unusual.items()),
        )


def _foreign_names(tensors: _Tensors, to: Format) -> dict[str, str]:
    """Return the names to write in model.safetensors, and the tensors under them.

    The action expert reads no text, but its output head is in all files of both formats, and their
    readers require it: it is written as zeros. The embedding table is tied to the output head. A
    file that openpi loads must have one of both, one that LeRobot loads must have both.
    """
    names = {ours: foreign_name(ours) for ours in tensors.dtypes}
    found = {theirs: ours for ours, theirs in names.items() if theirs is not None}
    embedding = found[EMBEDDING]
    if to == "openpi":
        del found[EMBEDDING]
    found[OUTPUT_HEAD] = embedding
    if "suffix.action_in.weight" in names:
        found[EXPERT_HEAD] = EXPERT_HEAD
    prefix = "model." if to == "lerobot" else ""
    return {prefix + theirs: ours for theirs, ours in found.items()}


class _SourceFiles:
    """What is beside the tensors of the source: its robot and its statistics."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        # Of a trainer's step folder, which may be given by its params or its file.
        path, self._config = checkpoint.path, checkpoint.config
        self._folder = path if path.is_dir() and path.name != "params" else path.parent
        self._sections: dict[str, Any] = {}
        described = self._folder / CONFIG
        if checkpoint.format == OWN_FORMAT and described.is_file():
            own = describe(checkpoint.config, {})
            self._sections = {k: v for k, v in read_object(described).items() if k not in own}
            if not isinstance(self._sections.get(TRAIN_SECTION, {}), dict):
                raise CheckpointError(f"{described}: {TRAIN_SECTION} is not a JSON object.")

    def sections(self, config: ModelConfig) -> dict[str, Any]:
        """Return the further sections of config.json, such as the robot, for this model."""
        train = self._sections.get(TRAIN_SECTION)
        if train is None:
            return self._sections
        return {**self._sections, TRAIN_SECTION: {**train, "model": to_json(config)}}

    @property
    def has_robot(self) -> bool:
        return TRAIN_SECTION in self._sections

    @property
    def norm_floor(self) -> float:
        data = self._sections.get(TRAIN_SECTION, {}).get("data", {})
        return float(data.get("norm_floor", 0.0))

    def statistics(self, asset_id: str | None) -> tuple[Mapping[str, NormStats], bool]:
        """Return the statistics of one robot, and whether they are applied as quantiles.

        They are empty, with a warning, if the source has none.
        """
        root, quantiles = self._folder / _ASSETS, self._config.uses_quantiles
        found = {p.parent.relative_to(root).as_posix() for p in root.rglob(FILE_NAME)}
        listed = ", ".join(sorted(found)) or "none"
        if asset_id is None and len(found) > 1:
            raise ValueError(f"{root} has several statistics: {listed}. Choose with --asset-id.")
        if asset_id is not None and asset_id not in found:
            raise ValueError(f"{root} has no statistics {asset_id!r}. Found: {listed}.")
        if found:
            return read_norm_stats(root / (asset_id or found.pop())), quantiles
        if (theirs := lerobot.read_statistics(self._folder)) is not None:
            return theirs
        logger.warning(
            "%s has no statistics: the policy that is written does not normalise.", self._folder
        )
        return {}, quantiles

    def copy_statistics(self, target: Path, to: Format, asset_id: str | None) -> None:
        """Copy assets/, or the statistics of a LeRobot policy, which `asset_id` gives a name."""
        has_assets = (self._folder / _ASSETS).is_dir()
        theirs = list(self._folder.glob(f"{lerobot.PREPROCESSOR}*"))
        if asset_id is not None and (has_assets or not theirs):
            raise ValueError(
                "--asset-id chooses statistics for LeRobot (--to lerobot), or names those of a "
                f"LeRobot policy. {self._folder} is none: leave it out."
            )
        if has_assets:
            shutil.copytree(self._folder / _ASSETS, target / _ASSETS)
        elif asset_id is not None:
            if not is_really_in(target / _ASSETS, target / _ASSETS / asset_id):
                raise ValueError(f"--asset-id is {asset_id!r}; it names a folder in {_ASSETS}/.")
            self._name_statistics(target / _ASSETS / asset_id)
        elif to != "piston" and lerobot.read_statistics(self._folder) is not None:
            raise ValueError(
                f"{self._folder} has the statistics of a LeRobot policy, which have no name. Give "
                "them the asset_id of openpi's configuration: --asset-id NAME"
            )
        elif to == "piston":  # as they are: they say how they are applied
            for file in theirs:
                shutil.copy2(file, target)

    def _name_statistics(self, folder: Path) -> None:
        found = lerobot.read_statistics(self._folder)
        if found is None:
            raise ValueError(f"{self._folder} has no statistics: leave out --asset-id.")
        if found[1] != self._config.uses_quantiles:
            raise ValueError(
                f"{self._folder} normalises by {'quantiles' if found[1] else 'mean and std'}, "
                f"statistics in assets/ are applied in the other way for {self._config.family}."
            )
        write_norm_stats(folder, found[0])


def _log_choices(checkpoint: Checkpoint) -> None:
    if checkpoint.assumed:
        logger.warning(
            "%s does not state these fields, so their usual values were assumed: %s. If the model "
            "was trained with other values, convert with its configuration (--preset).",
            checkpoint,
            ", ".join(f"{name} = {value}" for name, value in checkpoint.assumed.items()),
        )
    for name, reason in checkpoint.dropped.items():
        logger.info("Left out %s: %s.", name, reason)
