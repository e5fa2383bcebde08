"""Checkpoints of the JAX trainer: the same tensors as the PyTorch files, however stored."""

import json
import random
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from piston.weights import CheckpointError, load_model, open_checkpoint

ts = pytest.importorskip("tensorstore", reason="needs piston[jax-weights]")

MODELS = ["pi0", "pi05", "pi0_lora", "pi0_fast"]


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_equals_the_pytorch_file_of_the_same_weights(reference, reference_config, name):
    folder = reference / "models" / name
    jax = open_checkpoint(folder / "params")
    pytorch = open_checkpoint(folder / "model.safetensors", reference_config(name))
    assert (jax.format, pytorch.format) == ("jax", "openpi-pytorch")
    assert set(jax.names()) == set(pytorch.names())
    for tensor in jax.names():
        assert jax.tensor(tensor).dtype == pytorch.tensor(tensor).dtype == torch.float32
        assert torch.equal(jax.tensor(tensor), pytorch.tensor(tensor)), tensor


@pytest.mark.parametrize("name", MODELS)
def test_every_reference_model_loads_strictly(reference, reference_config, name):
    params = reference / "models" / name / "params"
    model = load_model(params, reference_config(name))
    checkpoint = open_checkpoint(params)
    state = model.state_dict()
    assert state.keys() == set(checkpoint.names())
    for tensor, value in state.items():
        assert torch.equal(value, checkpoint.tensor(tensor))


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_inferred_heads_and_adapters_included(reference, reference_config, name):
    found = open_checkpoint(reference / "models" / name / "params").config
    stated = reference_config(name)
    assert type(found) is type(stated)
    assert found.family == stated.family
    fields = ["vision", "vlm", "vocab_size", "image_size"]
    fields += ["action_expert", "action_dim"] if hasattr(stated, "action_expert") else []
    for field in fields:
        assert getattr(found, field) == getattr(stated, field)


def test_a_step_folder_and_its_params_are_the_same(reference, tmp_path):
    params = reference / "models" / "pi0" / "params"
    shutil.copytree(params, tmp_path / "29999" / "params")
    (tmp_path / "29999" / "train_state").mkdir()
    step = open_checkpoint(tmp_path / "29999")
    assert torch.equal(
        step.tensor("vlm.norm.scale"), open_checkpoint(params).tensor("vlm.norm.scale")
    )


def arrays_of(params: Path) -> dict[str, np.ndarray]:
    keys = {"driver": "ocdbt", "base": f"file://{params}/"}
    names = ts.KvStore.open(keys).result().list().result()
    return {
        name: ts.open({"driver": "zarr", "kvstore": {**keys, "path": f"{name}/"}})
        .result()
        .read()
        .result()
        for name in (
            raw.decode().removesuffix("/.zarray") for raw in names if raw.endswith(b"/.zarray")
        )
    }


def write_arrays(
    folder,
    arrays,
    *,
    ocdbt=True,
    driver="zarr",
    chunk=None,
    layers=False,
    dtype=None,
    fill_value=None,
    codecs=None,
) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    base = {"driver": "file", "path": f"{folder}/"}
    for name, array in arrays.items():
        path = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        if not ocdbt:
            path = {"driver": "file", "path": f"{folder}/{name}/"}
        spec = {"driver": driver, "kvstore": path}
        shape = [min(chunk, size) for size in array.shape] if chunk else list(array.shape)
        if layers:
            shape = [1, *array.shape[1:]]
        store = ts.open(
            spec,
            create=True,
            dtype=dtype or ts.float32,
            shape=array.shape,
            fill_value=fill_value,
            chunk_layout=ts.ChunkLayout(chunk_shape=shape),
            codec=codecs and ts.CodecSpec({"driver": driver, "codecs": codecs}),
        ).result()
        store.write(ts.cast(ts.array(array), dtype or ts.float32)).result()


@pytest.mark.parametrize(
    "how",
    [
        {"layers": True, "name": "one chunk per layer"},
        {"chunk": 5, "name": "chunks across layers"},
        {"ocdbt": False, "name": "plain files"},
        {"driver": "zarr3", "name": "zarr 3"},
    ],
    ids=lambda how: how["name"],
)
def test_every_way_of_storing_gives_the_same(reference, tmp_path, how):
    params = reference / "models" / "pi0_lora" / "params"
    options = {option: value for option, value in how.items() if option != "name"}
    write_arrays(tmp_path / "params", arrays_of(params), **options)
    expected = open_checkpoint(params)
    found = open_checkpoint(tmp_path, expected.config)
    assert found.names()
    for name in found.names():
        assert torch.equal(found.tensor(name), expected.tensor(name)), name


def test_bfloat16_arrays_stay_bfloat16(reference, tmp_path):
    params = reference / "models" / "pi0" / "params"
    write_arrays(tmp_path / "params", arrays_of(params), dtype=ts.bfloat16)
    expected, found = open_checkpoint(params), open_checkpoint(tmp_path)
    for name in expected.names():
        assert found.entries[name].dtype == torch.bfloat16
        assert torch.equal(found.tensor(name), expected.tensor(name).bfloat16()), name
    model = load_model(tmp_path)
    assert model.vlm.layers[0].mlp.up.weight.dtype == torch.bfloat16
    for name in ("vision.norm.weight", "vlm.norm.scale", "suffix.action_in.weight"):
        assert model.state_dict()[name].dtype == torch.float32  # as every model holds them
        assert torch.equal(model.state_dict()[name], found.tensor(name).float())


def with_own_keys(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same model with a key head per head."""
    changed = {name: array for name, array in arrays.items() if "kv_einsum" not in name}
    for name, array in arrays.items():
        if "kv_einsum" in name:
            heads = arrays[name.replace("kv_einsum", "q_einsum")].shape[1]
            changed[name] = np.repeat(array, heads, axis=2)
    return changed


def join_projections(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Queries beside keys and values in one array, as the trainer stores such models."""
    joined = {name: array for name, array in arrays.items() if "kv_einsum" not in name}
    for name, array in arrays.items():
        if "kv_einsum" in name:
            query = joined.pop(name.replace("kv_einsum", "q_einsum"))
            both = np.concatenate([query[:, None], array], axis=1)
            joined[name.replace("kv_einsum", "qkv_einsum")] = both
    return joined


@pytest.mark.parametrize("name", ["pi0", "pi0_lora"])
def test_joined_projections_of_models_with_a_key_head_per_head(reference, tmp_path, name):
    split = with_own_keys(arrays_of(reference / "models" / name / "params"))
    joined = join_projections(split)
    assert any("qkv_einsum" in path for path in joined)
    write_arrays(tmp_path / "split", split)
    write_arrays(tmp_path / "joined", joined)
    expected, found = open_checkpoint(tmp_path / "split"), open_checkpoint(tmp_path / "joined")
    assert found.config == expected.config
    assert found.config.vlm.num_kv_heads == found.config.vlm.num_heads
    assert set(found.names()) == set(expected.names())
    for tensor in found.names():
        assert torch.equal(found.tensor(tensor), expected.tensor(tensor)), tensor
    write_arrays(tmp_path / "joined", {n: a for n, a in split.items() if "kv_einsum" in n})
    with pytest.raises(CheckpointError, match=r"holds vlm\.layers\.0\.attention.* twice"):
        open_checkpoint(tmp_path / "joined")


def test_unknown_names_are_listed_when_sizes_cannot_be_inferred(reference, tmp_path):
    arrays = arrays_of(reference / "models" / "pi0" / "params")
    renamed = {name.replace("q_einsum", "queries"): array for name, array in arrays.items()}
    write_arrays(tmp_path / "params", renamed)
    with pytest.raises(CheckpointError, match=r"(?s)2 unexpected:.*layers/attn/queries/w \(3, 8"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"shape": [2, "x"], "dtype": "<f4"}', '{"shape": [2], "dtype": 3}']
)
def test_a_damaged_description_of_an_array_is_an_error(tmp_path, text):
    name = "params.PaliGemma.llm.final_norm.scale"
    write_arrays(tmp_path / "params", {name: np.zeros(4, np.float32)}, ocdbt=False)
    (tmp_path / "params" / name / ".zarray").write_text(text)
    with pytest.raises(CheckpointError, match=rf"cannot be read as an Orbax.*{name}"):
        open_checkpoint(tmp_path)


def test_large_tables_are_read_in_blocks(reference, monkeypatch):
    from piston.weights import openpi_jax

    params = reference / "models" / "pi0" / "params"
    whole = open_checkpoint(params).tensor("vlm.embedding.weight")
    monkeypatch.setattr(openpi_jax, "_BLOCK", 1000)  # bytes, of rows of 256
    assert torch.equal(open_checkpoint(params).tensor("vlm.embedding.weight"), whole)


def test_an_unknown_array_is_an_error_that_names_it(reference, tmp_path):
    params = writable_copy(reference, tmp_path)
    write_arrays(params, {"params.critic.kernel.value": np.zeros((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"1 unexpected:\s+critic/kernel \(2, 2\)"):
        open_checkpoint(tmp_path)


def test_every_missing_or_short_file_is_an_error(reference, reference_config, tmp_path):
    """Whatever of the database is lost, no model is made; other than from files not needed."""
    params = tmp_path / "params"
    expected = load_model(reference / "models" / "pi0" / "params").state_dict()
    shutil.copytree(reference / "models" / "pi0" / "params", params)
    files = [p for p in params.rglob("*") if p.is_file() and "ocdbt" in str(p.relative_to(params))]
    files += list((params / "d").iterdir())
    assert len(files) > 5
    needed = 0
    for path in files:
        path.parent.chmod(0o755)
        path.chmod(0o644)
        whole = path.read_bytes()
        for damage in (None, whole[: len(whole) // 2], whole[:-1]):
            path.unlink() if damage is None else path.write_bytes(damage)
            try:
                model = load_model(params, reference_config("pi0"))
            except (CheckpointError, FileNotFoundError):
                needed += 1
            else:
                assert all(torch.equal(v, expected[n]) for n, v in model.state_dict().items())
            path.write_bytes(whole)
    assert needed >= 6


def writable_copy(reference: Path, folder: Path) -> Path:
    shutil.copytree(reference / "models" / "pi0" / "params", folder / "params")
    for path in (folder / "params").rglob("*"):
        path.chmod(0o755)
    return folder / "params"


def byte_ranges(params: Path) -> dict[str, dict[str, list[range]]]:
    """Where the database keeps what: "manifest", "btreenode" or "value" → file → positions."""
    base = ts.KvStore.open(f"file://{params}/").result()
    ranges: dict[str, dict[str, list[range]]] = defaultdict(lambda: defaultdict(list))
    ranges["manifest"]["manifest.ocdbt"] = [range((params / "manifest.ocdbt").stat().st_size)]

    def add(location: str) -> None:
        kind, folder, file, offset, length = location.split(":")
        ranges[kind][folder + file].append(range(int(offset), int(offset) + int(length)))
        for entry in ts.ocdbt.dump(base, location).result()["entries"] if kind != "value" else ():
            if "inline_value" not in entry:
                add(entry.get("indirect_value") or entry["location"])

    add(ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"])
    return ranges


def result_after_each_change(params, expected, places, seed=0):
    """Yield file and outcome for one changed bit at each place: an error, or the tensors read."""
    rng = random.Random(seed)
    for file, position in places:
        path, data = params / file, bytearray((params / file).read_bytes())
        original = bytes(data)
        data[position] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            found = open_checkpoint(params, expected.config)
            yield file, {name: found.tensor(name) for name in found.names()}
        except CheckpointError as error:
            yield file, error
        path.write_bytes(original)


def sample(ranges: dict[str, list[range]], count: int) -> list[tuple[str, int]]:
    places = [(file, position) for file, parts in ranges.items() for p in parts for position in p]
    return random.Random(0).sample(places, count)


@pytest.mark.parametrize("kind", ["manifest", "btreenode", "value"])
def test_changed_bytes_are_found_where_the_database_has_checksums(reference, tmp_path, kind):
    params = writable_copy(reference, tmp_path)
    ranges, checkpoint = byte_ranges(params), open_checkpoint(params)
    assert {*ranges} == {"manifest", "btreenode", "value"}
    expected = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    places = sample(ranges[kind], 20)
    different = 0
    for file, result in result_after_each_change(params, checkpoint, places):
        if kind != "value":
            assert isinstance(result, CheckpointError)
            assert str(params / file) in str(result)
        elif not isinstance(result, CheckpointError):
            # Values of more than 1 kB are outside the nodes, and neither OCDBT nor the zstd
            # frames that the trainer writes have a checksum for them: docs/checkpoints.md says so.
            different += any(not torch.equal(result[name], expected[name]) for name in expected)
    assert (different > 0) == (kind == "value")


def test_changed_bytes_outside_of_the_newest_tree_change_nothing(reference, tmp_path):
    params = writable_copy(reference, tmp_path)
    used, checkpoint = byte_ranges(params), open_checkpoint(params)
    expected = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    unused: dict[str, list[range]] = defaultdict(list)
    for path in [*params.glob("**/d/*"), params / "ocdbt.process_0" / "manifest.ocdbt"]:
        file = str(path.relative_to(params))
        taken = {p for kind in used.values() for part in kind.get(file, ()) for p in part}
        unused[file] = [range(p, p + 1) for p in range(path.stat().st_size) if p not in taken]
    for _, result in result_after_each_change(params, checkpoint, sample(unused, 10)):
        assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_checksums_of_zarr_chunks_are_compared(reference, tmp_path):
    """Zarr 3 can have a checksum per chunk: no changed byte of such a chunk is read."""
    params, source = tmp_path / "params", reference / "models" / "pi0" / "params"
    codecs = [{"name": "bytes"}, {"name": "crc32c"}]
    write_arrays(params, arrays_of(source), driver="zarr3", codecs=codecs)
    checkpoint, places = open_checkpoint(params), sample(byte_ranges(params)["value"], 20)
    for _, result in result_after_each_change(params, checkpoint, places):
        assert isinstance(result, CheckpointError)
        assert "checksum" in str(result)
        assert str(params) in str(result)


def test_every_lost_chunk_of_plain_files_is_an_error(reference, reference_config, tmp_path):
    params, config = tmp_path / "params", reference_config("pi0")
    write_arrays(params, arrays_of(reference / "models" / "pi0" / "params"), ocdbt=False)
    load_model(params, config)
    chunks = [path for path in params.glob("*/*") if not path.name.startswith(".")]
    assert len(chunks) > 40
    for path in chunks:
        path.rename(tmp_path / "lost")
        with pytest.raises(CheckpointError, match="(?s)cannot be read: .*is missing.*fetch all"):
            load_model(params, config)
        (tmp_path / "lost").rename(path)


def test_chunks_that_a_declared_fill_value_stands_for_may_be_absent(
    reference, reference_config, tmp_path
):
    params, config = tmp_path / "params", reference_config("pi0")
    name = "params.action_in_proj.kernel.value"
    arrays = arrays_of(reference / "models" / "pi0" / "params")
    arrays[name] = np.zeros_like(arrays[name])
    write_arrays(params, arrays, ocdbt=False, fill_value=0.0)
    assert [path.name for path in (params / name).iterdir()] == [".zarray"]
    assert not load_model(params, config).state_dict()["suffix.action_in.weight"].any()
    # The trainer states that it writes such chunks too: then an absent one was lost.
    (params / "_METADATA").write_text('{"store_array_data_equal_to_fill_value": true}')
    with pytest.raises(CheckpointError, match="action_in_proj/kernel .*is missing"):
        load_model(params, config)


def test_without_tensorstore_the_extra_is_named(reference, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match=r"pip install 'piston\[jax-weights\]'"):
        open_checkpoint(reference / "models" / "pi0" / "params")


def test_reference_metadata_lists_what_is_found(reference):
    """The trainer's own list of arrays and ours agree: nothing is overlooked."""
    for name in MODELS:
        params = reference / "models" / name / "params"
        listed = json.loads((params / "_METADATA").read_text())["tree_metadata"]
        assert len(listed) == len(arrays_of(params))
