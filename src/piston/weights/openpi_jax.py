"""Checkpoints of openpi's JAX trainer (Orbax): the table of their arrays, and their reader.

    B layers, stacked on the first axis     D width     F mlp     N heads     K key heads
    H head size     R rank of an adapter     P patch     V vocabulary

A JAX kernel is (in, out), ours are (out, in). The action expert has `_1` after a module's name.
Files are read with `tensorstore`, without JAX. Layers are stacked in one array, often in one
compressed chunk of several gigabytes, so each array is decoded once and all its layers are read
before the next array is opened.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piston.weights.configs import Heads
from piston.weights.expected import CheckpointError, Shape
from piston.weights.pytorch_names import SUFFIX
from piston.weights.tensors import Entry

_MANIFEST = "manifest.ocdbt"
_METADATA_FILES = {".zarray": "zarr", "zarr.json": "zarr3"}
_BLOCK = 2**26  # bytes of a large array that are copied at once
_DTYPES = {str(d)[6:]: d for d in (torch.float16, torch.float32, torch.float64, torch.bfloat16)}

# How one of our tensors is made from its part of an array.
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "same": lambda x: x,
    "flat": torch.flatten,
    "transpose": lambda x: x.mT,
    "conv": lambda x: x.permute(3, 2, 0, 1),  # (P, P, 3, D) → (D, 3, P, P)
    "heads first": lambda x: x.mT.flatten(0, 1),  # (N, D, H) → (N·H, D)
    "heads last": lambda x: x.flatten(1).mT,  # (D, N, H) → (N·H, D)
    "from heads": lambda x: x.flatten(0, 1).mT,  # (N, H, D) → (D, N·H)
    "one group": lambda x: x.mT[None],  # (in, out) → (1, out, in)
    "one group from heads": lambda x: x.flatten(0, 1).mT[None],  # (N, H, R) → (1, R, N·H)
    # (N, R, D) → (1, D, R): every head adds to every output.
    "sum of heads": lambda x: x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).mT[None],
}


@dataclasses.dataclass(frozen=True)
class Part:
    """One of our tensors in a JAX array.

    `*` in the name: the array stacks all layers on its first axis. `at`: the index on the axis
    after the layers.
    """

    name: str
    layout: str = "same"
    at: int | None = None


Rows = dict[str, tuple[Part, ...]]


def _parts(layout: str, *names: str) -> tuple[Part, ...]:
    """Return the parts of an array: a single one, or one for each index of an axis."""
    return tuple(
        Part(name, layout, None if len(names) == 1 else at) for at, name in enumerate(names)
    )


def _projections(leaf: str, *names: str) -> tuple[str, ...]:
    return tuple(f"attention.{name}.{leaf}" for name in names)


_VISION: Rows = {
    "embedding/kernel": _parts("conv", "patch_embedding.weight"),
    "embedding/bias": _parts("same", "patch_embedding.bias"),
    "pos_embedding": (Part("position_embedding", at=0),),
    "Transformer/encoder_norm/scale": _parts("same", "norm.weight"),
    "Transformer/encoder_norm/bias": _parts("same", "norm.bias"),
    "head/kernel": _parts("transpose", "head.weight"),
    "head/bias": _parts("same", "head.bias"),
}
_ATTENTION = "MultiHeadDotProductAttention_0"
_BLOCK_ROWS: Rows = {
    "LayerNorm_0/scale": _parts("same", "attention_norm.weight"),
    "LayerNorm_0/bias": _parts("same", "attention_norm.bias"),
    "LayerNorm_1/scale": _parts("same", "mlp_norm.weight"),
    "LayerNorm_1/bias": _parts("same", "mlp_norm.bias"),
    **{
        f"{_ATTENTION}/{name}/{leaf}": _parts(layout, f"attention.{name}.{ours}")
        for name in ("query", "key", "value")
        for leaf, ours, layout in (("kernel", "weight", "heads last"), ("bias", "bias", "flat"))
    },
    f"{_ATTENTION}/out/kernel": _parts("from heads", "attention.output.weight"),
    f"{_ATTENTION}/out/bias": _parts("same", "attention.output.bias"),
    "MlpBlock_0/Dense_0/kernel": _parts("transpose", "mlp.up.weight"),
    "MlpBlock_0/Dense_0/bias": _parts("same", "mlp.up.bias"),
    "MlpBlock_0/Dense_1/kernel": _parts("transpose", "mlp.down.weight"),
    "MlpBlock_0/Dense_1/bias": _parts("same", "mlp.down.bias"),
}
# `{}` is where the action expert's `_1` stands.
_LAYER: Rows = {
    "attn/q_einsum{}/w": _parts("heads first", "attention.query.weight"),
    "attn/kv_einsum{}/w": _parts("heads first", *_projections("weight", "key", "value")),
    # Instead of both where every head has keys of its own.
    "attn/qkv_einsum{}/w": _parts("heads first", *_projections("weight", "query", "key", "value")),
    "attn/attn_vec_einsum{}/w": _parts("from heads", "attention.output.weight"),
    "mlp{}/gating_einsum": _parts("transpose", "mlp.gate.weight", "mlp.up.weight"),
    "mlp{}/linear": _parts("transpose", "mlp.down.weight"),
    "pre_attention_norm{}/scale": _parts("same", "attention_norm.scale"),
    "pre_attention_norm{}/Dense_0/kernel": _parts("transpose", "attention_norm.modulation.weight"),
    "pre_attention_norm{}/Dense_0/bias": _parts("same", "attention_norm.modulation.bias"),
    "pre_ffw_norm{}/scale": _parts("same", "mlp_norm.scale"),
    "pre_ffw_norm{}/Dense_0/kernel": _parts("transpose", "mlp_norm.modulation.weight"),
    "pre_ffw_norm{}/Dense_0/bias": _parts("same", "mlp_norm.modulation.bias"),
    # Adapters, in the layout that models/lora.py describes.
    "attn/q_einsum{}/lora_a": _parts("transpose", "attention.query.lora_a"),
    "attn/q_einsum{}/lora_b": _parts("transpose", "attention.query.lora_b"),
    **{
        f"attn/{array}_einsum{{}}/{leaf}": _parts("transpose", *_projections(leaf, *names))
        for array, names in {"kv": ("key", "value"), "qkv": ("query", "key", "value")}.items()
        for leaf in ("lora_a", "lora_b")
    },
    "attn/attn_vec_einsum{}/lora_a": _parts("one group from heads", "attention.output.lora_a"),
    "attn/attn_vec_einsum{}/lora_b": _parts("sum of heads", "attention.output.lora_b"),
    "mlp{}/gating_einsum_lora_a": _parts("one group", "mlp.gate.lora_a", "mlp.up.lora_a"),
    "mlp{}/gating_einsum_lora_b": _parts("one group", "mlp.gate.lora_b", "mlp.up.lora_b"),
    "mlp{}/linear_lora_a": _parts("one group", "mlp.down.lora_a"),
    "mlp{}/linear_lora_b": _parts("one group", "mlp.down.lora_b"),
}
_FINAL_NORM: Rows = {
    "final_norm{}/scale": _parts("same", "norm.scale"),
    "final_norm{}/Dense_0/kernel": _parts("transpose", "norm.modulation.weight"),
    "final_norm{}/Dense_0/bias": _parts("same", "norm.modulation.bias"),
}


def _make_table() -> Rows:
    table: Rows = {"PaliGemma/llm/embedder/input_embedding": _parts("same", "vlm.embedding.weight")}

    def add(theirs: str, ours: str, rows: Rows, mark: str = "") -> None:
        for path, parts in rows.items():
            named = (dataclasses.replace(part, name=ours + part.name) for part in parts)
            table[theirs + path.format(mark)] = tuple(named)

    add("PaliGemma/img/", "vision.", _VISION)
    add("PaliGemma/img/Transformer/encoderblock/", "vision.blocks.*.", _BLOCK_ROWS)
    for mark, expert in {"": "vlm", "_1": "action_expert"}.items():
        add("PaliGemma/llm/layers/", f"{expert}.layers.*.", _LAYER, mark)
        add("PaliGemma/llm/", f"{expert}.", _FINAL_NORM, mark)
    for theirs, ours in SUFFIX.items():
        table[f"{theirs}/kernel"] = _parts("transpose", f"suffix.{ours}.weight")
        table[f"{theirs}/bias"] = _parts("same", f"suffix.{ours}.bias")
    return table


TABLE: Rows = _make_table()


@dataclasses.dataclass(frozen=True)
class Slice:
    """Where one of our tensors is in its JAX array, and how it is converted."""

    name: str
    index: tuple[int, ...]
    convert: Callable[[Tensor], Tensor]
    shape: Shape


def plain_path(path: str) -> str:
    """Return the path without the top `params` and the leaf `value`, which only some trees have."""
    return path.removeprefix("params/").removesuffix("/value")


def slices(path: str, shape: Shape) -> list[Slice] | None:
    """Return our tensors in an array of this shape; None if the path is not in the table."""
    parts = TABLE.get(path)
    if parts is None:
        return None
    try:
        return list(_slices(parts, torch.empty(shape, device="meta")))
    except (IndexError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has shape {shape}, which is not how the JAX models store "
            f"{', '.join(part.name for part in parts)}. Is this a checkpoint of openpi's?"
        ) from error


def _slices(parts: tuple[Part, ...], array: Tensor) -> Iterator[Slice]:
    for layer in range(array.shape[0]) if "*" in parts[0].name else [None]:
        here = array if layer is None else array[layer]
        if parts[0].at is not None and here.shape[0] != len(parts):
            raise ValueError(f"expected {len(parts)} on the axis of the parts")
        for part in parts:
            one = here if part.at is None else here[part.at]
            index = tuple(i for i in (layer, part.at) if i is not None)
            name = part.name.replace("*", str(layer))
            convert = _LAYOUTS[part.layout]
            yield Slice(name, index, convert, tuple(convert(one).shape))


def heads_of(shapes: Mapping[str, Shape]) -> Heads | None:
    """Return the numbers of heads, from the arrays that have an axis for them."""
    layers = "PaliGemma/llm/layers/attn"
    query = shapes.get(f"{layers}/q_einsum/w")  # (B, N, D, H)
    key_value = shapes.get(f"{layers}/kv_einsum/w")  # (B, 2, K, D, H)
    joined = shapes.get(f"{layers}/qkv_einsum/w")  # (B, 3, N, D, H)
    block = "PaliGemma/img/Transformer/encoderblock"
    vision = shapes.get(f"{block}/{_ATTENTION}/query/kernel")  # (B, D, N, H)
    if joined is not None and vision is not None:
        return Heads(vision[2], joined[2], joined[2], joined[4])
    if query is None or key_value is None or vision is None:
        return None
    return Heads(vision[2], query[1], key_value[2], query[3])


# The files.


def find_params(folder: Path) -> Path | None:
    """Return the folder with the arrays: this one, or its `params` as in a trainer's step."""
    for candidate in (folder, folder / "params"):
        if (candidate / _MANIFEST).is_file() or any(candidate.glob("*/.zarray")):
            return candidate
    return None


def read_arrays(folder: Path) -> tuple[dict[str, Entry], dict[str, Shape], Heads | None]:
    """Return our tensors, the shapes of unknown arrays, and the numbers of heads."""
    store = _ArrayStore(folder)
    entries: dict[str, Entry] = {}
    unknown: dict[str, Shape] = {}
    for path, shape in store.shapes.items():
        found = slices(path, shape)
        if found is None:
            unknown[path] = shape
        for one in found or ():
            if one.name in entries:
                raise CheckpointError(
                    f"{folder} holds {one.name} twice, once in {path}. It is not a checkpoint of "
                    "one model; write it again into an empty folder."
                )
            read_into = functools.partial(store.read_into, path, one)
            entries[one.name] = Entry(one.shape, store.dtypes[path], read_into)
    return entries, unknown, heads_of(store.shapes)


class _ArrayStore:
    """The arrays of one checkpoint by path. Keeps the array that was read last decoded."""

    def __init__(self, folder: Path) -> None:
        try:
            import tensorstore
        except ImportError as error:
            raise ImportError(
                "Checkpoints of the JAX trainer are read with tensorstore, which is not installed. "
                "Run: pip install 'piston[jax-weights]'"
            ) from error
        self._tensorstore, self._folder = tensorstore, folder
        try:
            self._specs = self._list()
            opened = {path: self._tensorstore.open(spec) for path, spec in self._specs.items()}
            arrays = {path: opening.result() for path, opening in opened.items()}
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{folder} cannot be read as an Orbax checkpoint: {error}. Some of its files are "
                "damaged or were not copied; fetch all of them again."
            ) from error
        self.shapes: dict[str, Shape] = {path: array.shape for path, array in arrays.items()}
        stored = {path: array.dtype.name for path, array in arrays.items()}
        if bad := [f"{path} ({name})" for path, name in stored.items() if name not in _DTYPES]:
            raise CheckpointError(
                f"{folder} holds arrays of other dtypes than {', '.join(_DTYPES)}: {bad[0]}."
            )
        self.dtypes = {path: _DTYPES[name] for path, name in stored.items()}
        self._open_path: str | None = None
        self._open_array: Any = None

    def read_into(self, path: str, where: Slice, destination: Tensor) -> None:
        size = math.prod(where.shape) * self.dtypes[path].itemsize
        if where.index or size <= _BLOCK or where.convert is not _LAYOUTS["same"]:
            destination.copy_(where.convert(self._read(path, where.index)))
            return
        rows = max(1, _BLOCK * where.shape[0] // size)
        for start in range(0, where.shape[0], rows):
            block = slice(start, min(start + rows, where.shape[0]))
            destination[block].copy_(self._read(path, (block,)))

    def _list(self) -> dict[str, dict[str, Any]]:
        """Return how each array is opened, by its path in the table."""
        base = {"driver": "file", "path": f"{self._folder.resolve()}/"}
        is_database = (self._folder / _MANIFEST).is_file()
        keys: dict[str, Any] = {"driver": "ocdbt", "base": base} if is_database else base
        specs: dict[str, dict[str, Any]] = {}
        for raw in sorted(self._tensorstore.KvStore.open(keys).result().list().result()):
            key, _, file = raw.decode().rpartition("/")
            if file not in _METADATA_FILES:
                continue
            path = plain_path(key.replace(".", "/"))
            if path in specs:
                raise ValueError(f"{path} is there twice, once under the key {key}")
            place = f"{key}/" if is_database else f"{base['path']}{key}/"
            kvstore = {**keys, "path": place}
            specs[path] = {"driver": _METADATA_FILES[file], "kvstore": kvstore}
        return specs

    def _read(self, path: str, index: tuple[int | slice, ...]) -> Tensor:
        try:
            array = self._array(path)
            values = (array[index] if index else array).read().result()
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{path} in {self._folder} cannot be read: {error}. Some files of the checkpoint "
                "are damaged or were not copied; fetch all of them again."
            ) from error
        values = np.ascontiguousarray(values)
        if self.dtypes[path] == torch.bfloat16:  # a dtype that numpy itself does not have
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    def _array(self, path: str) -> Any:
        if path != self._open_path:
            self._open_path = self._open_array = None  # frees its memory first
            size = math.prod(self.shapes[path]) * self.dtypes[path].itemsize
            context = {
                # Room for the whole array: its chunks are decoded only once.
                "cache_pool": {"total_bytes_limit": 2 * size},
                # The compressed bytes stay in the file.
                "file_io_mode": {"mode": "memmap"},
            }
            self._open_array = self._tensorstore.open(
                self._specs[path],
                context=self._tensorstore.Context(context),
                recheck_cached_data=False,
                recheck_cached_metadata=False,
            ).result()
            self._open_path = path
        return self._open_array
