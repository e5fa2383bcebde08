"""The JAX tree's layouts: our linear maps compute what its einsums compute."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from piston.models.configs import LoRA
from piston.models.lora import LoRALinear
from piston.weights import CheckpointError
from piston.weights.openpi_jax import TABLE, plain_path, slices

LAYERS = "PaliGemma/llm/layers"
sizes = st.integers(1, 5)


def take(path: str, array: torch.Tensor) -> dict[str, torch.Tensor]:
    found = slices(path, tuple(array.shape))
    tensors = {name: TABLE[path].layout.convert(array[index]) for name, (index, _) in found.items()}
    assert {name: shape for name, (_, shape) in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    return tensors


def randn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes)
def test_attention_projections(b, n, k, d, h):
    x = randn(7, d)
    query = randn(b, n, d, h)
    for name, weight in take(f"{LAYERS}/attn/q_einsum/w", query).items():
        layer = int(name.split(".")[2])
        assert name == f"vlm.layers.{layer}.attention.query.weight"
        expected = torch.einsum("td,ndh->tnh", x, query[layer]).flatten(1)
        torch.testing.assert_close(linear(x, weight), expected)
    key_value = randn(b, 2, k, d, h)
    taken = take(f"{LAYERS}/attn/kv_einsum_1/w", key_value)
    for layer in range(b):
        for at, name in enumerate(("key", "value")):
            expected = torch.einsum("td,kdh->tkh", x, key_value[layer, at]).flatten(1)
            weight = taken[f"action_expert.layers.{layer}.attention.{name}.weight"]
            torch.testing.assert_close(linear(x, weight), expected)
    output = randn(b, n, h, d)
    heads = randn(7, n, h)
    taken = take(f"{LAYERS}/attn/attn_vec_einsum/w", output)
    for layer in range(b):
        expected = torch.einsum("tnh,nhd->td", heads, output[layer])
        weight = taken[f"vlm.layers.{layer}.attention.output.weight"]
        torch.testing.assert_close(linear(heads.flatten(1), weight), expected)


def test_mlp_and_vision_layouts():
    x, gating, down = randn(7, 4), randn(2, 2, 4, 6), randn(2, 6, 4)
    taken = take(f"{LAYERS}/mlp/gating_einsum", gating)
    for layer, at, name in [(0, 0, "gate"), (0, 1, "up"), (1, 0, "gate"), (1, 1, "up")]:
        weight = taken[f"vlm.layers.{layer}.mlp.{name}.weight"]
        torch.testing.assert_close(linear(x, weight), x @ gating[layer, at])
    weight = take(f"{LAYERS}/mlp_1/linear", down)["action_expert.layers.1.mlp.down.weight"]
    torch.testing.assert_close(linear(randn(7, 6), weight), randn(7, 6) @ down[1])

    block = "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0"
    kernel, bias, out = randn(2, 4, 3, 5), randn(2, 3, 5), randn(2, 3, 5, 4)
    weight = take(f"{block}/key/kernel", kernel)["vision.blocks.1.attention.key.weight"]
    offset = take(f"{block}/key/bias", bias)["vision.blocks.1.attention.key.bias"]
    expected = torch.einsum("td,dnh->tnh", x, kernel[1]) + bias[1]
    torch.testing.assert_close(linear(x, weight, offset), expected.flatten(1))
    weight = take(f"{block}/out/kernel", out)["vision.blocks.0.attention.output.weight"]
    expected = torch.einsum("tnh,nhd->td", randn(7, 3, 5), out[0])
    torch.testing.assert_close(linear(randn(7, 3, 5).flatten(1), weight), expected)

    patches, kernel = randn(1, 3, 8, 8), randn(4, 4, 3, 6)
    weight = take("PaliGemma/img/embedding/kernel", kernel)["vision.patch_embedding.weight"]
    expected = torch.einsum("bchiwj,ijcd->bdhw", patches.reshape(1, 3, 2, 4, 2, 4), kernel)
    torch.testing.assert_close(torch.nn.functional.conv2d(patches, weight, stride=4), expected)


@pytest.mark.parametrize("rank", [1, 3])
def test_adapters_compute_what_the_public_ones_do(rank):
    n, d, h, f = 3, 6, 4, 5
    x, heads, wide = randn(7, d), randn(7, n, h), randn(7, f)

    def adapted(inputs, outputs, groups, a, b, values):
        module = LoRALinear(inputs, outputs, LoRA(rank, float(rank)), groups).double()
        with torch.no_grad():
            module.weight.zero_()
            module.lora_a.copy_(a)
            module.lora_b.copy_(b)
            return module(values)

    def pair(path, suffix, a, b):
        first = take(path.format(f"lora_a{suffix}"), a[None])
        second = take(path.format(f"lora_b{suffix}"), b[None])
        return next(iter(first.values())), next(iter(second.values()))

    a, b = randn(n, d, rank), randn(n, rank, h)
    found = adapted(d, n * h, n, *pair(f"{LAYERS}/attn/q_einsum/{{}}", "", a, b), x)
    expected = torch.einsum("td,ndr,nrh->tnh", x, a, b).flatten(1)
    torch.testing.assert_close(found, expected)

    a, b = randn(n, h, rank), randn(n, rank, d)
    found = adapted(
        n * h, d, 1, *pair(f"{LAYERS}/attn/attn_vec_einsum/{{}}", "", a, b), heads.flatten(1)
    )
    expected = torch.einsum("tr,nrd->td", torch.einsum("tnh,nhr->tr", heads, a), b)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    a, b = randn(f, rank), randn(rank, d)
    found = adapted(f, d, 1, *pair(f"{LAYERS}/mlp/linear_{{}}", "", a, b), wide)
    torch.testing.assert_close(found, wide @ a @ b)

    a, b = randn(2, d, rank), randn(2, rank, f)
    firsts = take(f"{LAYERS}/mlp/gating_einsum_lora_a", a[None])
    seconds = take(f"{LAYERS}/mlp/gating_einsum_lora_b", b[None])
    for at, name in enumerate(("gate", "up")):
        layer = f"vlm.layers.0.mlp.{name}"
        found = adapted(d, f, 1, firsts[f"{layer}.lora_a"], seconds[f"{layer}.lora_b"], x)
        torch.testing.assert_close(found, x @ a[at] @ b[at])


def test_no_two_arrays_hold_the_same_tensor():
    # The joined array stands instead of the two others, never beside them.
    names = [n for path, row in TABLE.items() if "qkv_" not in path for n in row.names]
    assert len(names) == len(set(names))


def test_both_key_styles_are_one_path():
    plain = "PaliGemma/llm/final_norm/scale"
    for path in (plain, f"params/{plain}", f"params/{plain}/value", f"{plain}/value"):
        assert plain_path(path) == plain
    # The value projection's own name is not the leaf that some files add.
    block = "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/value/bias"
    assert plain_path(f"params/{block}/value") == plain_path(f"params/{block}") == block


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (f"{LAYERS}/attn/q_einsum/w", (3, 4)),
        (f"{LAYERS}/attn/kv_einsum/w", (3, 3, 1, 4, 4)),  # a third part would be lost
        (f"{LAYERS}/mlp/gating_einsum", (3, 1, 4, 4)),
        ("PaliGemma/img/pos_embedding", (2, 16, 4)),
        ("PaliGemma/img/embedding/kernel", (16, 4)),
        (f"{LAYERS}/mlp/linear", ()),
    ],
)
def test_arrays_of_another_layout_are_refused(path, shape):
    with pytest.raises(CheckpointError, match="not how the JAX models store"):
        slices(path, shape)
