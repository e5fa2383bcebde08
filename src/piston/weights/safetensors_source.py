"""Safetensors files as a source: one file or shards with an index, under our names or foreign ones.

The names decide which format it is. Nothing is read but headers until a tensor is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from piston.weights import pytorch_names
from piston.weights.declared import read_declared, read_json
from piston.weights.errors import CheckpointError, Shape, listing
from piston.weights.source import Entry, Source
from piston.weights.tensor_file import TensorFile

OWN_TREES = ("vision.", "vlm.", "action_expert.", "suffix.")
OWN_FORMAT = "piston"


@dataclasses.dataclass(frozen=True)
class _Located:
    """Where a tensor of the set lies."""

    file: TensorFile
    name: str

    @property
    def entry(self) -> Entry:
        info = self.file.tensors[self.name]
        read_into = functools.partial(self.file.read_into, self.name)
        return Entry(info.shape, info.dtype, read_into, functools.partial(self.file.map, self.name))


def read_safetensors(path: Path) -> Source:
    """From a file, or from an index (`….index.json`) of several."""
    located = _shards(path) if path.name.endswith(".json") else _single(path)
    ours = sum(name.startswith(OWN_TREES) for name in located)
    theirs = sum(pytorch_names.is_pytorch_name(name) for name in located)
    if not located or max(ours, theirs) == 0:
        raise CheckpointError(
            f"{path} holds no model that is known here: its tensors are "
            f"{', '.join(sorted(located)[:5]) or 'none at all'}. Known are π0, π0.5 and π0-FAST as "
            "written by Piston, by openpi (JAX and PyTorch) and by LeRobot."
        )
    return _own(located) if ours >= theirs else _foreign(located, path.parent)


def _own(located: Mapping[str, _Located]) -> Source:
    known = {name: one.entry for name, one in located.items() if name.startswith(OWN_TREES)}
    unknown = {name: one.entry.shape for name, one in located.items() if name not in known}
    return Source(OWN_FORMAT, known, unknown=unknown, parallel=True)


def _foreign(located: Mapping[str, _Located], folder: Path) -> Source:
    translation = pytorch_names.translate(located)
    entries = {ours: located[theirs].entry for ours, theirs in translation.used.items()}
    autoregressive = not any(name.startswith("suffix.") for name in entries)
    if translation.output_head is not None and autoregressive:
        # π0-FAST uses the output head. If it had been trained apart, dropping it would be wrong.
        name = "vlm.embedding.weight"
        embedding, head = located[translation.used[name]], located[translation.output_head]
        read_into = functools.partial(_read_tied, embedding, head)
        entries[name] = Entry(entries[name].shape, entries[name].dtype, read_into)
    unknown: dict[str, Shape] = {name: located[name].entry.shape for name in translation.unknown}
    return Source(
        translation.format,
        entries,
        dropped=translation.dropped,
        unknown=unknown,
        declared=read_declared(folder),
        parallel=True,
    )


def _read_tied(embedding: _Located, head: _Located, destination: Tensor) -> None:
    """Read the embedding table, once it is sure that the stored output head is the same."""
    ours, theirs = embedding.entry, head.entry
    same = (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) and all(
        torch.equal(a, b)
        for a, b in zip(embedding.file.chunks(embedding.name), head.file.chunks(head.name))
    )
    if not same:
        raise CheckpointError(
            f"{head.name} in {head.file.path} differs from the embedding table, but π0-FAST's "
            "output head is the embedding table itself. The file is not of this model."
        )
    ours.read_into(destination)


def _single(path: Path) -> dict[str, _Located]:
    file = TensorFile(path)
    return {name: _Located(file, name) for name in file.tensors}


def _shards(index: Path) -> dict[str, _Located]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise CheckpointError(
            f"{index} has no weight_map from tensor names to files beside it. Fetch it again."
        )
    names = sorted(set(weight_map.values()))
    if absent := [name for name in names if not (index.parent / name).is_file()]:
        raise CheckpointError(
            f"{index} names files that are not there.\n{listing('missing', absent)}\nFetch them."
        )
    files = {name: TensorFile(index.parent / name) for name in names}
    actual = {(tensor, name) for name, file in files.items() for tensor in file.tensors}
    promised = set(weight_map.items())
    if actual != promised:
        lines = [f"{tensor} in {file}" for tensor, file in sorted(promised - actual)]
        extra = [f"{tensor} in {file}" for tensor, file in sorted(actual - promised)]
        blocks = listing("in the index only", lines), listing("in the files only", extra)
        raise CheckpointError(
            "\n".join(
                [f"{index} and its files do not agree.", *filter(None, blocks), "Fetch all again."]
            )
        )
    return {tensor: _Located(files[file], tensor) for tensor, file in weight_map.items()}
