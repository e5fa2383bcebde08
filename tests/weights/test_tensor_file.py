"""Safetensors files: exact, checked before use, exchanged with the library's own functions."""

import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piston.weights import CheckpointError, tensors
from piston.weights.tensors import DTYPES, read_tensor_file, write_tensor_file


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(math.prod(shape)).reshape(shape) * 37 % 101 - 20
    return numbers.to(dtype)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    values = {
        "vlm.a": sample((3, 5), torch.float32),
        "vlm.layers.0.b": sample((4,), torch.bfloat16),
        "suffix.scalar": torch.tensor(2.5),
    }
    write_tensor_file(tmp_path / "small.safetensors", values)
    return tmp_path / "small.safetensors", values


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.lists(st.integers(0, 5), max_size=4).map(tuple), st.sampled_from([*DTYPES.values()])
        ),
        max_size=6,
    )
)
def test_the_library_reads_what_is_written_and_the_reverse(tmp_path_factory, described):
    folder = tmp_path_factory.mktemp("files")
    values = {name: sample(shape, dtype) for name, (shape, dtype) in described.items()}
    write_tensor_file(folder / "ours", values)
    theirs = safetensors.torch.load_file(folder / "ours")
    safetensors.torch.save_file(values, folder / "theirs")
    files = read_tensor_file(folder / "ours"), read_tensor_file(folder / "theirs")
    assert theirs.keys() == files[0].keys() == files[1].keys() == values.keys()
    for name, tensor in values.items():
        for found in (theirs[name], *(file[name].read() for file in files)):
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [8, 24, 2**20])
def test_reading_in_chunks_equals_reading_at_once(tmp_path, monkeypatch, chunk, dtype):
    tensor = torch.randn(7, 11)
    monkeypatch.setattr(tensors, "CHUNK", chunk)
    write_tensor_file(tmp_path / "file", {"a": tensor})
    entry = read_tensor_file(tmp_path / "file")["a"]
    assert torch.equal(entry.read(dtype), tensor.to(dtype))
    turned = torch.empty(11, 7, dtype=dtype).mT  # memory in another order
    entry.read_into(turned)
    assert torch.equal(turned, tensor.to(dtype))
    assert torch.equal(torch.cat([c.clone() for c in entry.chunks()]), tensor.flatten())


def test_data_is_aligned_for_readers_that_map(small):
    path, _ = small
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 0


def test_every_truncation_is_found_on_opening(small):
    path, _ = small
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            read_tensor_file(path)


def test_bytes_too_many_are_found(small):
    path, _ = small
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_tensor_file(path)


@pytest.mark.parametrize("mask", [0x01, 0x20, 0xFF])
def test_a_damaged_header_never_gives_other_values_under_the_same_names(small, mask):
    path, values = small
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for position in range(header):
        damaged = bytearray(whole)
        damaged[position] ^= mask
        path.write_bytes(damaged)
        try:
            found = {name: entry.read() for name, entry in read_tensor_file(path).items()}
        except CheckpointError:
            continue
        for name in found.keys() & values.keys():
            assert found[name].dtype == values[name].dtype
            assert torch.equal(found[name], values[name])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["a"].update(dtype="F7"),
        lambda h: h["a"].update(dtype="C64", shape=[1]),
        lambda h: h["a"].update(shape=[3]),
        lambda h: h["a"].update(shape=[-2]),
        lambda h: h["a"].update(shape="2"),
        lambda h: h["a"].update(data_offsets=[0]),
        lambda h: h.update(b=h["a"]),
        lambda h: h.update(a=[1]),
        lambda h: h.update(__metadata__={"x": 1}),
    ],
)
def test_malformed_headers_are_an_error_that_names_the_file(tmp_path, change):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    change(header)
    text = json.dumps(header).encode()
    path = tmp_path / "file"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match="file"):
        read_tensor_file(path)


def test_a_file_replaced_while_open_is_still_the_old_one(small):
    path, values = small
    file = read_tensor_file(path)
    write_tensor_file(path.with_suffix(".new"), {"vlm.a": torch.zeros(90)})
    path.with_suffix(".new").replace(path)
    assert torch.equal(file["vlm.a"].read(), values["vlm.a"])


def test_a_file_that_shrinks_while_open_is_an_error(small):
    path, _ = small
    file = read_tensor_file(path)
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size - 6)
    with pytest.raises(CheckpointError, match="became shorter"):
        list(file.values())[-1].read()


def test_dtypes_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a has dtype torch.complex64"):
        write_tensor_file(tmp_path / "file", {"a": torch.zeros(2, dtype=torch.complex64)})
