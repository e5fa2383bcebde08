"""A checkpoint in any format, opened: its configuration, and its tensors under our names.

    folder with model.safetensors              Piston's, openpi's PyTorch or LeRobot's, by its names
    folder with model.safetensors.index.json   the same in several files
    folder with manifest.ocdbt, also in params/    openpi's JAX trainer

Opening reads headers only, and config.json once. Tensors for which the configuration has no place
are an error. Missing tensors are an error when a model is loaded: some may be allowed to be new.
What a configuration has a place for is known from its model, built without memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piston import assets
from piston.models.build import build_on_meta
from piston.models.configs import GemmaSize, ModelConfig, VisionSize
from piston.models.lora import matching_parameters
from piston.suggestions import did_you_mean
from piston.weights import openpi_jax, pytorch_names
from piston.weights.configs import CONFIG, OWN_FORMAT, declared_fields, infer_config, own_config
from piston.weights.tensors import (
    CheckpointError,
    Entry,
    FileEntry,
    Shape,
    read_object,
    read_tensor_file,
)

TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OWN_TREES = ("vision.", "vlm.")  # which every model has
_EMBEDDING = "vlm.embedding.weight"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN = 20  # lines per kind of problem; the exception carries all of them


class MismatchError(CheckpointError):
    """A checkpoint's tensors are not the model's. Carries every name, also those not printed."""

    def __init__(self, message: str, *names: Iterable[str]) -> None:
        super().__init__(message)
        self.missing, self.unexpected, self.misshaped = map(tuple, names)


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

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor in the dtype in which it is stored, or in another one."""
        return self.entries[name].read(dtype)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def __str__(self) -> str:
        return f"{self.path} ({self.format})"


def open_checkpoint(
    location: str | Path,
    config: ModelConfig | None = None,
    *,
    sizes: Mapping[str, VisionSize | GemmaSize] | None = None,
    allow_missing: Iterable[str] | None = None,
) -> Checkpoint:
    """Open a checkpoint; its content decides the format.

    Without `config`, the configuration is read from config.json or inferred; `sizes` gives those of
    parts of a foreign model that cannot be inferred. With `allow_missing`, tensors that none of
    these patterns matches must not be missing.
    """
    path = assets.resolve(location)
    tensors = _find_tensors(path)
    entries: Mapping[str, Entry]
    dropped: Mapping[str, str] = {}
    heads: Mapping[str, Mapping[str, int]] = {}
    if tensors.is_dir():
        format_ = "jax"
        entries, unknown, heads = openpi_jax.read_arrays(tensors)
    else:
        writes = config is not None and bool(config.targets)
        format_, entries, unknown, dropped = _read_safetensors(tensors, writes)
    if integers := [name for name, e in entries.items() if not e.dtype.is_floating_point]:
        raise CheckpointError(
            f"{tensors} holds values that are not floating-point in {', '.join(integers[:5])}. "
            "The file is damaged or not of this model."
        )
    if sizes and (config is not None or format_ == OWN_FORMAT):
        raise ValueError(
            f"The sizes of {', '.join(sizes)} are given, but those of {path} ({format_}) are known "
            f"from {'the preset' if config is not None else CONFIG}. Give only one of both."
        )
    assumed: Mapping[str, Any] = {}
    if config is None and format_ == OWN_FORMAT:
        config = own_config(tensors.parent / CONFIG)
    elif config is None:
        # The JAX trainer's arrays are in `params`; config.json is beside that folder.
        inside = tensors.is_dir() and tensors.name != "params"
        stated = (tensors if inside else tensors.parent) / CONFIG
        declared = {**declared_fields(stated), **(sizes or {})}
        try:
            config, assumed = infer_config(shapes_of(entries), heads, declared)
        except CheckpointError as error:  # tensors under unknown names are a likely reason
            lines = [f"{name} {shape}" for name, shape in unknown.items()]
            listed = _listing({"unexpected": lines})
            raise CheckpointError(f"{path} ({format_}): {error}\n{listed}") from error
        except ValueError as error:  # of a value that config.json states
            raise CheckpointError(f"{stated} does not describe a model: {error}") from error
    what = f"{path} ({format_}) does not fit the {config.family} model of its configuration"
    found = {**shapes_of(entries), **unknown}
    check_match(expected_shapes(config), found, allow_missing=allow_missing, what=what)
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
    if (params := openpi_jax.find_params(path)) is not None:
        return params
    present = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{path} is not a checkpoint: expected {TENSORS}, {INDEX}, or the params folder of the "
        f"JAX trainer; found {present}."
    )


def _read_safetensors(
    path: Path, writes: bool
) -> tuple[str, dict[str, FileEntry], dict[str, Shape], dict[str, str]]:
    """Read a file, or an index of several, under our or foreign names.

    `writes` is whether a flow model writes tokens, as π0-FAST does. Return the format, the tensors,
    the shapes of those under unknown names, and the dropped names.
    """
    entries = _read_shards(path) if path.name.endswith(".json") else read_tensor_file(path)
    ours = sum(name.startswith(_OWN_TREES) for name in entries)
    plain = map(pytorch_names.plain_name, entries)
    theirs = sum(name.startswith("paligemma_with_expert.") for name in plain)
    if not ours and not theirs:
        raise CheckpointError(
            f"{path} holds no known model: its tensors are "
            f"{', '.join(sorted(entries)[:5]) or 'none at all'}. Known are π0, π0.5 and π0-FAST as "
            "written by Piston, by openpi (JAX and PyTorch) and by LeRobot."
        )
    if ours >= theirs:
        return OWN_FORMAT, entries, {}, {}
    table = pytorch_names.translate(entries)
    used = {ours: entries[name] for ours, name in table.used.items()}
    if writes or not any(name.startswith("suffix.") for name in used):
        # A model that writes uses the output head: it may only be dropped if it is tied.
        for name, reason in table.dropped.items():
            if reason == pytorch_names.TIED:
                twin = (name, entries[name])
                used[_EMBEDDING] = dataclasses.replace(used[_EMBEDDING], twin=twin)
    format_ = "lerobot" if any(name.startswith("model.") for name in entries) else "openpi-pytorch"
    return format_, used, {name: entries[name].shape for name in table.unknown}, table.dropped


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
        text = _listing(problems)
        raise CheckpointError(f"{index} and its files do not agree.\n{text}\nFetch all again.")
    return {name: entry for entries in files.values() for name, entry in entries.items()}


def check_match(
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    *,
    allow_missing: Iterable[str] | None = (),
    what: str,
) -> list[str]:
    """Raise one MismatchError for all tensors that are missing, unexpected or of another shape.

    Return the names of missing tensors that a pattern of `allow_missing` allows. A pattern that
    matches no tensor of the model is an error. With None, missing tensors are listed but do not
    cause the error.
    """
    allowed = set(matching_parameters(expected, tuple(allow_missing or ())))
    missing = sorted(expected.keys() - found.keys() - allowed)
    unexpected = sorted(found.keys() - expected.keys())
    common = sorted(expected.keys() & found.keys())
    misshaped = [name for name in common if expected[name] != found[name]]
    if not (unexpected or misshaped or (missing and allow_missing is not None)):
        return sorted(allowed - found.keys())
    hints = {name: did_you_mean(name, missing, cutoff=0.85) for name in unexpected}
    kinds = {
        "missing": [f"{name} {expected[name]}" for name in missing],
        "unexpected": [f"{name} {found[name]}{hints[name]}" for name in unexpected],
        "of the wrong shape": [
            f"{name}: found {found[name]}, expected {expected[name]}" for name in misshaped
        ],
    }
    advice = (
        "Use the configuration that the checkpoint was made with. Tensors that are meant to be "
        "trained from scratch have to be named: --allow-missing PATTERN …"
    )
    if missing and all(".lora_" in name for name in missing) and not unexpected:
        advice = (
            "The model has adapters and the checkpoint has none: allow new ones with "
            "--allow-missing '*.lora_?'"
        )
    message = f"{what}; nothing was loaded.\n{_listing(kinds)}\n{advice}"
    raise MismatchError(message, missing, unexpected, misshaped)


def _listing(kinds: Mapping[str, Sequence[str]]) -> str:
    """Return `36 missing:` and the first lines for each kind with any; layers are joined."""
    texts = []
    for kind, lines in kinds.items():
        layers: dict[str, list[int]] = {}  # lines that differ only in the number of the layer
        for line in lines:
            numbers = set(_LAYER.findall(line))
            template = _LAYER.sub("{}", line) if len(numbers) == 1 else line
            layers.setdefault(template, []).extend(map(int, numbers))
        merged = [template.replace("{}", _ranges(sorted(n))) for template, n in layers.items()]
        texts += [f"  {len(lines)} {kind}:"] if lines else []
        texts += [f"    {line}" for line in merged[:_SHOWN]]
        if len(merged) > _SHOWN:
            texts.append(f"    … and {len(merged) - _SHOWN} more lines")
    return "\n".join(texts)


def _ranges(numbers: Sequence[int]) -> str:
    """Return `3`, `[0-17]` or `[0,1,3]`."""
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"[{numbers[0]}-{numbers[-1]}]"
    return f"[{','.join(map(str, numbers))}]"


def shapes_of(tensors: Mapping[str, Tensor] | Mapping[str, Entry]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the tensors that a checkpoint of this configuration has to hold."""
    return shapes_of(build_on_meta(config).state_dict())
