"""Safetensors files: exact, checked before use, found damaged where they are."""

import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piston.weights import CheckpointError, tensor_file
from piston.weights.tensor_file import DTYPES, TensorFile
from piston.weights.tensor_writing import TensorToWrite, write_tensor_file


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_tensor_file(path, {name: TensorToWrite.of(tensor) for name, tensor in tensors.items()})


def read(file: TensorFile, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    info = file.tensors[name]
    tensor = torch.empty(info.shape, dtype=dtype or info.dtype)
    file.read_into(name, tensor)
    return tensor


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(math.prod(shape)).reshape(shape) * 37 % 101 - 20
    return numbers.to(dtype)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {
        "vlm.a": sample((3, 5), torch.float32),
        "vlm.layers.0.b": sample((4,), torch.bfloat16),
        "suffix.scalar": torch.tensor(2.5),
    }
    write(tmp_path / "small.safetensors", tensors)
    return tmp_path / "small.safetensors", tensors


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
def test_others_read_what_is_written_and_the_reverse(tmp_path_factory, described):
    folder = tmp_path_factory.mktemp("files")
    tensors = {name: sample(shape, dtype) for name, (shape, dtype) in described.items()}
    write(folder / "ours", tensors)
    theirs = safetensors.torch.load_file(folder / "ours")
    safetensors.torch.save_file(tensors, folder / "theirs")
    files = TensorFile(folder / "ours"), TensorFile(folder / "theirs")
    assert theirs.keys() == files[0].tensors.keys() == files[1].tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for found in (theirs[name], read(files[0], name), read(files[1], name)):
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [8, 24, 2**20])
def test_reading_in_chunks_equals_reading_at_once(tmp_path, monkeypatch, chunk, dtype):
    tensor = torch.randn(7, 11)
    write(tmp_path / "file", {"a": tensor})
    monkeypatch.setattr(tensor_file, "CHUNK", chunk)
    file = TensorFile(tmp_path / "file")
    assert torch.equal(read(file, "a", dtype), tensor.to(dtype))
    turned = torch.empty(11, 7, dtype=dtype).mT  # memory in another order
    file.read_into("a", turned)
    assert torch.equal(turned, tensor.to(dtype))
    assert torch.equal(
        torch.cat([c.clone() for c in file.chunks("a")]).view(torch.float32), tensor.flatten()
    )


def test_mapped_tensors_are_equal_and_private(small):
    path, tensors = small
    before = path.read_bytes()
    file = TensorFile(path)
    for name, tensor in tensors.items():
        mapped = file.map(name)
        assert torch.equal(mapped, tensor)
        assert mapped.untyped_storage().nbytes() == tensor.nbytes  # its own, not the whole file
        mapped.zero_()
    assert path.read_bytes() == before
    assert all(torch.equal(read(file, name), tensor) for name, tensor in tensors.items())


def test_unaligned_tensors_are_not_mapped(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.arange(2.0), "c": torch.ones(0)}
    write(tmp_path / "file", tensors)
    file = TensorFile(tmp_path / "file")
    assert torch.equal(file.map("a"), tensors["a"])
    assert file.map("b") is None
    assert file.map("c") is None
    assert torch.equal(read(file, "b"), tensors["b"])


def test_data_is_aligned_for_readers_that_map(small):
    path, _ = small
    assert min(info.begin for info in TensorFile(path).tensors.values()) % 64 == 0


def test_every_truncation_is_found_on_opening(small):
    path, _ = small
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            TensorFile(path)


def test_bytes_too_many_are_found(small):
    path, _ = small
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="but the file has"):
        TensorFile(path)


@pytest.mark.parametrize("mask", [0x01, 0x20, 0xFF])
def test_a_damaged_header_never_gives_other_values_under_the_same_names(small, mask):
    path, tensors = small
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for position in range(header):
        damaged = bytearray(whole)
        damaged[position] ^= mask
        path.write_bytes(damaged)
        try:
            file = TensorFile(path)
            found = {name: read(file, name) for name in file.tensors}
        except CheckpointError:
            continue
        for name in found.keys() & tensors.keys():
            assert found[name].dtype == tensors[name].dtype
            assert torch.equal(found[name], tensors[name])


def test_damaged_data_is_found_when_it_is_read(small):
    path, tensors = small
    whole = path.read_bytes()
    infos = TensorFile(path).tensors
    for name in tensors:
        for position in range(infos[name].begin, infos[name].end):
            damaged = bytearray(whole)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            file = TensorFile(path)
            with pytest.raises(CheckpointError, match=f"{name} in .* is damaged"):
                read(file, name)
            with pytest.raises(CheckpointError, match="is damaged"):
                read(file, name, torch.float64)
            with pytest.raises(CheckpointError, match="is damaged"):
                file.map(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["a"].update(dtype="F7"), "dtype 'F7'"),
        (lambda h: h["a"].update(shape=[3]), "cannot take the 8 bytes"),
        (lambda h: h["a"].update(shape=[-2]), "malformed"),
        (lambda h: h["a"].update(shape="2"), "malformed"),
        (lambda h: h["a"].update(data_offsets=[0]), "malformed"),
        (lambda h: h.update(b=h["a"]), "expected"),
        (lambda h: h.update(a=[1]), "malformed"),
        (lambda h: h.update(__metadata__={"x": 1}), "metadata"),
        (lambda h: h.update(__metadata__={"piston.crc32": "0 0"}), "checksums"),
        (lambda h: h.update(__metadata__={"piston.crc32": "xyz"}), "checksums"),
    ],
)
def test_malformed_headers_say_what_is_wrong(tmp_path, change, message):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    change(header)
    text = json.dumps(header).encode()
    path = tmp_path / "file"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=message):
        TensorFile(path)


def test_a_name_that_occurs_twice_is_refused(tmp_path):
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    path = tmp_path / "file"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CheckpointError, match="twice"):
        TensorFile(path)


def test_a_file_replaced_while_open_is_still_the_old_one(small):
    path, tensors = small
    file = TensorFile(path)
    write(path.with_suffix(".new"), {"vlm.a": torch.zeros(90)})
    path.with_suffix(".new").replace(path)
    assert torch.equal(read(file, "vlm.a"), tensors["vlm.a"])


def test_a_file_that_shrinks_while_open_is_an_error(small):
    path, _ = small
    file = TensorFile(path)
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size - 6)
    last = max(file.tensors, key=lambda name: file.tensors[name].end)
    with pytest.raises(CheckpointError, match="became shorter"):
        read(file, last)


def test_a_tensor_unlike_its_announcement_is_refused(tmp_path):
    wrong = TensorToWrite((2,), torch.float32, lambda: torch.zeros(3))
    with pytest.raises(ValueError, match="announced"):
        write_tensor_file(tmp_path / "file", {"a": wrong})
