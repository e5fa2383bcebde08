"""Checkpoints of openpi's JAX trainer (Orbax): the table of their arrays, reader and writer.

    B layers, stacked on the first axis     D width     F mlp     N heads     K key heads
    H head size     R rank of an adapter     P patch     V vocabulary

A JAX kernel is (in, out), ours are (out, in). The action expert has `_1` after a module's name.
Files are read and written with `tensorstore`, without JAX. Layers are stacked in one array, often
in one compressed chunk of several gigabytes, so each array is decoded once and all its layers are
read before the next array is opened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from piston.extras import needed_for
from piston.files import write_json
from piston.models.configs import GemmaSize, ModelConfig
from piston.progress import Progress, no_progress
from piston.weights.pytorch_names import SUFFIX
from piston.weights.tensors import CheckpointError, Entry, Shape, read_object

_MANIFEST, _METADATA = "manifest.ocdbt", "_METADATA"
_ROOT, _DICT_KEY = "params", 2  # of Orbax's trees
_ZARR_FILES = {".zarray": "zarr", "zarr.json": "zarr3"}
_BLOCK = 2**26  # bytes of a large array that are copied at once
_DTYPES = {str(d)[6:]: d for d in (torch.float16, torch.float32, torch.float64, torch.bfloat16)}


def _no_part(x: Tensor, heads: int) -> Tensor:
    raise NotImplementedError("Adapters are written only merged.")


class Layout(NamedTuple):
    """How one of our tensors is made from its part of an array, and back (with the heads)."""

    convert: Callable[[Tensor], Tensor]
    to_part: Callable[[Tensor, int], Tensor] = _no_part


_LAYOUTS = {
    "same": Layout(lambda x: x, lambda x, _: x),
    "flat": Layout(torch.flatten, lambda x, n: x.unflatten(0, (n, -1))),
    # (1, T, D) → (T, D)
    "single": Layout(lambda x: x.view(x.shape[1:]), lambda x, _: x[None]),
    "transpose": Layout(lambda x: x.mT, lambda x, _: x.mT),
    # (P, P, 3, D) → (D, 3, P, P)
    "conv": Layout(lambda x: x.permute(3, 2, 0, 1), lambda x, _: x.permute(2, 3, 1, 0)),
    # (N, D, H) → (N·H, D)
    "heads first": Layout(lambda x: x.mT.flatten(0, 1), lambda x, n: x.unflatten(0, (n, -1)).mT),
    # (D, N, H) → (N·H, D)
    "heads last": Layout(lambda x: x.flatten(1).mT, lambda x, n: x.mT.unflatten(1, (n, -1))),
    # (N, H, D) → (D, N·H)
    "from heads": Layout(lambda x: x.flatten(0, 1).mT, lambda x, n: x.mT.unflatten(0, (n, -1))),
    "one group": Layout(lambda x: x.mT[None]),  # (in, out) → (1, out, in)
    # (N, H, R) → (1, R, N·H)
    "one group from heads": Layout(lambda x: x.flatten(0, 1).mT[None]),
    # (N, R, D) → (1, D, R): every head adds to every output.
    "sum of heads": Layout(
        lambda x: x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).mT[None]
    ),
}
# The arrays of each kind of module: the ending of their names, and the layout.
_KINDS: dict[str, dict[str, str]] = {
    "conv": {"/kernel": "conv", "/bias": "same"},
    "dense": {"/kernel": "transpose", "/bias": "same"},
    "to heads": {"/kernel": "heads last", "/bias": "flat"},
    "from heads": {"/kernel": "from heads", "/bias": "same"},
    "layer norm": {"/scale": "same", "/bias": "same"},
    "rms norm": {"/scale": "same", "/Dense_0/kernel": "transpose", "/Dense_0/bias": "same"},
    # With adapters, in the layout that models/lora.py describes.
    "projection": {"/w": "heads first", "/lora_a": "transpose", "/lora_b": "transpose"},
    "output": {"/w": "from heads", "/lora_a": "one group from heads", "/lora_b": "sum of heads"},
    "mlp": {"": "transpose", "_lora_a": "one group", "_lora_b": "one group"},
}
# The endings of our names, by theirs, or by the kind of module and theirs.
_ENDINGS = {
    **dict.fromkeys(("/kernel", "/w", "", "layer norm/scale"), ".weight"),
    **{"/bias": ".bias", "/scale": ".scale"},
    **{"/Dense_0/kernel": ".modulation.weight", "/Dense_0/bias": ".modulation.bias"},
    **{f"{joint}{name}": f".{name}" for joint in "/_" for name in ("lora_a", "lora_b")},
}
_IMG, _LLM, _LAYER = "PaliGemma/img/", "PaliGemma/llm/", "PaliGemma/llm/layers/"
_BLOCKS = f"{_IMG}Transformer/encoderblock/"
_HEADS = f"{_BLOCKS}MultiHeadDotProductAttention_0/"
# Their module: its kind, and ours; several of ours are on the axis after the layers. `*` is the
# number of the layer: the array stacks all of them on its first axis.
_MODULES: dict[str, tuple[str, ...]] = {
    f"{_IMG}embedding": ("conv", "vision.patch_embedding"),
    f"{_BLOCKS}LayerNorm_0": ("layer norm", "vision.blocks.*.attention_norm"),
    f"{_HEADS}query": ("to heads", "vision.blocks.*.attention.query"),
    f"{_HEADS}key": ("to heads", "vision.blocks.*.attention.key"),
    f"{_HEADS}value": ("to heads", "vision.blocks.*.attention.value"),
    f"{_HEADS}out": ("from heads", "vision.blocks.*.attention.output"),
    f"{_BLOCKS}LayerNorm_1": ("layer norm", "vision.blocks.*.mlp_norm"),
    f"{_BLOCKS}MlpBlock_0/Dense_0": ("dense", "vision.blocks.*.mlp.up"),
    f"{_BLOCKS}MlpBlock_0/Dense_1": ("dense", "vision.blocks.*.mlp.down"),
    f"{_IMG}Transformer/encoder_norm": ("layer norm", "vision.norm"),
    f"{_IMG}head": ("dense", "vision.head"),
    **{theirs: ("dense", f"suffix.{ours}") for theirs, ours in SUFFIX.items()},
}
for _mark, _expert in {"": "vlm.", "_1": "action_expert."}.items():
    _attention, _mlp = _expert + "layers.*.attention.", _expert + "layers.*.mlp."
    _query, _key, _value = (f"{_attention}{name}" for name in ("query", "key", "value"))
    _MODULES |= {
        f"{_LAYER}attn/q_einsum{_mark}": ("projection", _query),
        f"{_LAYER}attn/kv_einsum{_mark}": ("projection", _key, _value),
        # Instead of both where every head has keys of its own.
        f"{_LAYER}attn/qkv_einsum{_mark}": ("projection", _query, _key, _value),
        f"{_LAYER}attn/attn_vec_einsum{_mark}": ("output", f"{_attention}output"),
        f"{_LAYER}mlp{_mark}/gating_einsum": ("mlp", f"{_mlp}gate", f"{_mlp}up"),
        f"{_LAYER}mlp{_mark}/linear": ("mlp", f"{_mlp}down"),
        f"{_LAYER}pre_attention_norm{_mark}": ("rms norm", f"{_expert}layers.*.attention_norm"),
        f"{_LAYER}pre_ffw_norm{_mark}": ("rms norm", f"{_expert}layers.*.mlp_norm"),
        f"{_LLM}final_norm{_mark}": ("rms norm", f"{_expert}norm"),
    }


class Row(NamedTuple):
    """The tensors in one array: one, or one for each index of the axis after the layers."""

    layout: Layout
    names: tuple[str, ...]


TABLE = {
    f"{_IMG}pos_embedding": Row(_LAYOUTS["single"], ("vision.position_embedding",)),
    f"{_LLM}embedder/input_embedding": Row(_LAYOUTS["same"], ("vlm.embedding.weight",)),
}
for _theirs, (_kind, *_ours) in _MODULES.items():
    for _ending, _layout in _KINDS[_kind].items():
        _leaf = _ENDINGS.get(_kind + _ending) or _ENDINGS[_ending]
        TABLE[_theirs + _ending] = Row(_LAYOUTS[_layout], tuple(name + _leaf for name in _ours))


def plain_path(path: str) -> str:
    """Return the path without the top `params` and the leaf `value`, which only some trees have."""
    return path.removeprefix(f"{_ROOT}/").removesuffix("/value")


def slices(path: str, shape: Shape) -> dict[str, tuple[tuple[int, ...], Shape]]:
    """Return where our tensors are in an array of the table, and the shapes that they have."""
    layout, names = TABLE[path]
    array = torch.empty(shape, device="meta")
    found = {}
    try:
        for layer in range(array.shape[0]) if "*" in names[0] else [None]:
            indices: list[tuple[int, ...]] = [() if layer is None else (layer,)]
            if len(names) > 1:
                indices = [(*indices[0], part) for part in range(array[indices[0]].shape[0])]
            for name, index in zip(names, indices, strict=True):
                ours = name.replace("*", str(layer))
                found[ours] = index, tuple(layout.convert(array[index]).shape)
    except (IndexError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has shape {shape}, which is not how the JAX models store "
            f"{', '.join(names)}. Is this a checkpoint of openpi's?"
        ) from error
    return found


def heads_of(shapes: Mapping[str, Shape]) -> dict[str, dict[str, int]]:
    """Return the numbers of heads, from the arrays that have an axis for them."""
    query = shapes.get(f"{_LAYER}attn/q_einsum/w")  # (B, N, D, H)
    key_value = shapes.get(f"{_LAYER}attn/kv_einsum/w")  # (B, 2, K, D, H)
    if joined := shapes.get(f"{_LAYER}attn/qkv_einsum/w"):  # (B, 3, N, D, H)
        query, key_value = (joined[0], *joined[2:]), joined
    vision = shapes.get(f"{_HEADS}query/kernel")  # (B, D, N, H)
    if query is None or key_value is None or vision is None:
        return {}
    expert = {"num_heads": query[1], "num_kv_heads": key_value[2], "head_dim": query[3]}
    return {"vision": {"num_heads": vision[2]}, "vlm": expert, "action_expert": expert}


def find_params(folder: Path) -> Path | None:
    """Return the folder with the arrays: this one, or its `params` as in a trainer's step."""
    for candidate in (folder, folder / "params"):
        if (candidate / _MANIFEST).is_file() or any(candidate.glob("*/.zarray")):
            return candidate
    return None


def read_arrays(folder: Path) -> tuple[dict[str, Entry], dict[str, Shape], dict[str, Any]]:
    """Return our tensors, the shapes of unknown arrays, and the numbers of heads."""
    store = _ArrayStore(folder)
    entries: dict[str, Entry] = {}
    for path, array_shape in store.shapes.items():
        found = slices(path, array_shape) if path in TABLE else {}
        if twice := sorted(found.keys() & entries.keys()):
            raise CheckpointError(
                f"{folder} holds {twice[0]} twice, once in {path}. It is not a checkpoint of one "
                "model; write it again into an empty folder."
            )
        for name, (index, shape) in found.items():
            entries[name] = _ArrayEntry(shape, store.dtypes[path], store, path, index)
    unknown = {path: shape for path, shape in store.shapes.items() if path not in TABLE}
    return entries, unknown, heads_of(store.shapes)


@dataclasses.dataclass(frozen=True)
class _ArrayEntry(Entry):
    store: _ArrayStore
    path: str
    index: tuple[int, ...]

    def read_into(self, destination: Tensor) -> None:
        layout = TABLE[self.path].layout
        if self.index or self.num_bytes <= _BLOCK or layout is not _LAYOUTS["same"]:
            destination.copy_(layout.convert(self.store.read(self.path, self.index)))
            return
        rows = max(1, _BLOCK * self.shape[0] // self.num_bytes)
        for start in range(0, self.shape[0], rows):
            block = slice(start, min(start + rows, self.shape[0]))
            destination[block].copy_(self.store.read(self.path, (block,)))


@contextlib.contextmanager
def _name_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{what}: {error}. Some files of the checkpoint are damaged or were not copied; fetch "
            "all of them again."
        ) from error


def _import_tensorstore() -> Any:
    with needed_for("A checkpoint of openpi's JAX trainer"):
        import tensorstore

    return tensorstore


class _ArrayStore:
    """The arrays of one checkpoint by path. Keeps the array that was read last decoded."""

    def __init__(self, folder: Path) -> None:
        tensorstore = _import_tensorstore()
        self._tensorstore, self._folder = tensorstore, folder
        self._open: tuple[str, Any] = ("", None)
        with _name_errors(f"{folder} cannot be read as an Orbax checkpoint"):
            self._specs = self._list()
            opened = {path: tensorstore.open(spec) for path, spec in self._specs.items()}
            arrays = {path: opening.result() for path, opening in opened.items()}
        self.shapes: dict[str, Shape] = {path: array.shape for path, array in arrays.items()}
        stored = {path: array.dtype.name for path, array in arrays.items()}
        if bad := [f"{path} ({name})" for path, name in stored.items() if name not in _DTYPES]:
            raise CheckpointError(
                f"{folder} holds arrays of other dtypes than {', '.join(_DTYPES)}: {bad[0]}."
            )
        self.dtypes = {path: _DTYPES[name] for path, name in stored.items()}
        # A chunk may be absent only where a fill value stands for it, unless all are written.
        metadata = read_object(folder / _METADATA) if (folder / _METADATA).is_file() else {}
        has_all_chunks = metadata.get("store_array_data_equal_to_fill_value") is True
        for path, array in arrays.items():
            may_fill = array.fill_value is not None and not has_all_chunks
            self._specs[path]["fill_missing_data_reads"] = may_fill

    def _list(self) -> dict[str, dict[str, Any]]:
        """Return how each array is opened, by its path in the table."""
        base = {"driver": "file", "path": f"{self._folder.resolve()}/"}
        is_database = (self._folder / _MANIFEST).is_file()
        keys: dict[str, Any] = {"driver": "ocdbt", "base": base} if is_database else base
        specs: dict[str, dict[str, Any]] = {}
        for raw in sorted(self._tensorstore.KvStore.open(keys).result().list().result()):
            key, _, file = raw.decode().rpartition("/")
            if file not in _ZARR_FILES:
                continue
            path = plain_path(key.replace(".", "/"))
            if path in specs:
                raise ValueError(f"{path} is there twice, once under the key {key}")
            kvstore = {**keys, "path": f"{key}/" if is_database else f"{base['path']}{key}/"}
            specs[path] = {"driver": _ZARR_FILES[file], "kvstore": kvstore}
        return specs

    def read(self, path: str, index: tuple[int | slice, ...]) -> Tensor:
        dtype, store = self.dtypes[path], self._tensorstore
        context = {
            # Room for the whole array: its chunks are decoded only once.
            "cache_pool": {"total_bytes_limit": 2 * math.prod(self.shapes[path]) * dtype.itemsize},
            # The compressed bytes stay in the file.
            "file_io_mode": {"mode": "memmap"},
        }
        never = {"recheck_cached_data": False, "recheck_cached_metadata": False}
        with _name_errors(f"{path} in {self._folder} cannot be read"):
            if self._open[0] != path:
                self._open = ("", None)  # frees its memory first
                opening = store.open(self._specs[path], context=store.Context(context), **never)
                self._open = (path, opening.result())
            values = np.ascontiguousarray(self._open[1][index].read().result())
        if dtype == torch.bfloat16:  # which numpy itself does not have
            return torch.from_numpy(values.view(np.int16)).view(dtype)
        return torch.from_numpy(values)


def arrays_of(config: ModelConfig, shapes: Mapping[str, Shape]) -> dict[str, tuple[Shape, int]]:
    """Return shapes and heads of the arrays in which JAX models store tensors of these shapes."""
    found = {}
    for path, (layout, names) in TABLE.items():
        first = names[0].replace("*", "0")
        if first not in shapes:
            continue
        size = getattr(config, first.partition(".")[0], None)  # the suffix has neither
        heads, depth = (1, 1) if size is None else (size.num_heads, size.depth)
        if isinstance(size, GemmaSize) and first.endswith((".query.weight", ".key.weight")):
            # Query, key and value are one array where every head has keys of its own.
            if ("/qkv_" in path) != (size.num_heads == size.num_kv_heads):
                continue
            heads = size.num_kv_heads if "/kv_" in path else size.num_heads
        stacked = ((depth,) if "*" in names[0] else ()) + ((len(names),) if len(names) > 1 else ())
        part = layout.to_part(torch.empty(shapes[first], device="meta"), heads).shape
        found[path] = (*stacked, *part), heads
    return found


def write_arrays(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    progress: Progress = no_progress,
) -> None:
    """Write the arrays of a model without adapters, one tensor at a time; `progress` counts bytes.

    `tensors` tell shapes and dtypes (they may be on the meta device), `read` returns the values.
    """
    store = _import_tensorstore()
    folder.mkdir(parents=True)
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.resolve()}/"}}
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    arrays = arrays_of(config, {name: tuple(t.shape) for name, t in tensors.items()})
    for path, (shape, heads) in arrays.items():
        found = slices(path, shape)
        dtypes = [tensors[name].dtype for name in found]
        dtype = functools.reduce(torch.promote_types, dtypes)
        is_small = math.prod(shape) * dtype.itemsize <= _BLOCK
        stacked = 0 if is_small else len(next(iter(found.values()))[0])
        key = f"{_ROOT}/{path}".replace("/", ".")
        array = _create(store, {**base, "path": f"{key}/"}, shape, dtype, stacked)
        buffer = torch.empty(shape if is_small else shape[stacked:], dtype=dtype)
        for name, (index, _) in found.items():
            buffer[index if is_small else ...].copy_(TABLE[path].layout.to_part(read(name), heads))
            done += tensors[name].nbytes
            if not is_small:
                array[index].write(_to_numpy(buffer, store)).result()
            progress(done, total, name)
        if is_small:
            array.write(_to_numpy(buffer, store)).result()
    write_json(
        folder / _METADATA, _describe_tree({path: shape for path, (shape, _) in arrays.items()})
    )


def _create(store: Any, place: dict[str, Any], shape: Shape, dtype: torch.dtype, ones: int) -> Any:
    """Create an array with chunks of one index on the first axes, and of limited size."""
    rows = _BLOCK // max(1, math.prod(shape[ones + 1 :]) * dtype.itemsize)
    chunks = (*(1,) * ones, max(1, min(shape[ones], rows)), *shape[ones + 1 :])
    spec = {
        "driver": "zarr",
        "kvstore": place,
        "metadata": {"chunks": chunks, "compressor": {"id": "zstd", "level": 1}},
    }
    return store.open(spec, create=True, shape=shape, dtype=str(dtype)[6:]).result()


def _to_numpy(tensor: Tensor, store: Any) -> Any:
    if tensor.dtype == torch.bfloat16:  # which numpy itself does not have
        return tensor.view(torch.int16).numpy().view(store.bfloat16.numpy_dtype)
    return tensor.numpy()


def _describe_tree(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return Orbax's description of a tree of dictionaries whose leaves are these arrays."""
    tree = {}
    for path, shape in shapes.items():
        keys = (_ROOT, *path.split("/"))
        value = {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": shape}
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": value,
        }
    options = {"use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return {"tree_metadata": tree, **options, "custom_metadata": None}
