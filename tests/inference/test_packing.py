"""Packed and eight-bit products: equal to exact ones up to their rounding, with derivatives."""

import os
import subprocess
import sys

import pytest
import torch
from tests.models import tiny
from torch.testing import assert_close

from piston.inference.packing import (
    Int8Linear,
    PackedLinear,
    largest_token_number,
    pack_for_inference,
    quantize_for_inference,
    quantizer,
)
from piston.models import cpu, precision
from piston.models.configs import LoRA
from piston.models.precision import Linear, cast_for_inference
from piston.weights import load_model, save_model

# A result is rounded once to bfloat16: half a unit in the last of its 8 bits.
ROUNDED = {"rtol": 2**-8, "atol": 2**-12}
SHAPES = pytest.mark.parametrize("shape", [(3,), (1, 1, 24), (51, 24), (2, 70, 40)])
BIAS = pytest.mark.parametrize("bias", [False, True])

BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU has no bfloat16 products in oneDNN",
)


def make(width, out, bias):
    linear = Linear(width, out, bias=bias)
    if bias:
        torch.nn.init.normal_(linear.bias)
    # Numbers that bfloat16 holds exactly.
    cast_for_inference(linear, torch.bfloat16)
    return linear


def exact(linear, x):
    bias = None if linear.bias is None else linear.bias.double()
    return torch.nn.functional.linear(x.double(), linear.weight.double(), bias)


@BFLOAT16
@SHAPES
@BIAS
@torch.no_grad()
def test_packed_products_are_rounded_once(shape, bias):
    linear = make(shape[-1], 33, bias)
    packed, x = PackedLinear(linear), torch.randn(shape).bfloat16()
    assert packed(x).dtype == torch.bfloat16
    product = exact(linear, x)
    assert_close(packed(x).double(), product, **ROUNDED)
    gelu = torch.nn.functional.gelu(product, approximate="tanh")
    assert_close(packed.gelu(x).double(), gelu, rtol=2**-8, atol=2**-9)
    factor = torch.randn(product.shape).bfloat16()
    # oneDNN may round the product before it is multiplied.
    found = packed.times(x, factor).double()
    assert_close(found, product * factor.double(), rtol=2**-7, atol=2**-10)
    assert torch.equal(packed.dense(), linear.weight)


@pytest.mark.parametrize("made", [pytest.param(PackedLinear, marks=BFLOAT16), Int8Linear])
@BIAS
def test_derivatives_are_those_of_the_linear_map(made, bias):
    linear = make(40, 24, bias)
    other, x = made(linear), torch.randn(2, 5, 40).bfloat16().requires_grad_()
    outer = torch.randn(2, 5, 24).bfloat16()
    (found,) = torch.autograd.grad(other(x), x, outer)
    expected = outer.double() @ other.dense().double()
    assert_close(found.double(), expected, rtol=2**-6, atol=2**-6)
    for ours, theirs in ((other.gelu, linear.gelu), (other.times, linear.times)):
        more = () if ours == other.gelu else (outer,)
        found, expected = (torch.autograd.grad(f(x, *more).sum(), x)[0] for f in (ours, theirs))
        assert_close(found.double(), expected.double(), rtol=0.1, atol=0.1)


def whole(*shape, scale):
    """Whole numbers up to 127, which each row has, times a power of two."""
    numbers = torch.randint(-127, 128, shape).float()
    numbers[..., 0] = 127
    return numbers * scale


@SHAPES
@BIAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_eight_bits_are_whole_numbers_with_a_scale_per_row(shape, bias, dtype):
    linear = make(shape[-1], 33, bias)
    linear.weight.copy_(whole(33, shape[-1], scale=2.0 ** torch.randint(-9, -4, (33, 1))))
    other, x = (
        Int8Linear(linear),
        whole(*shape, scale=2.0 ** torch.randint(-6, 3, (*shape[:-1], 1))),
    )
    if x.ndim > 1:
        x[..., 0, :] = 0  # a token that is zero
    x = x.to(dtype)
    assert torch.equal(other.dense(), linear.weight.float())
    found = other(x)
    assert found.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else ROUNDED
    assert_close(found.double(), exact(linear, x), **tolerance)


@torch.no_grad()
def test_other_numbers_are_rounded_to_the_nearest():
    linear, x = make(40, 33, bias=False), torch.randn(20, 40)
    x[:, :1] *= 30  # a large number in each token
    other = Int8Linear(linear)
    of_weight, of_token = (
        one.float().abs().amax(1, keepdim=True) / 127 for one in (linear.weight, x)
    )
    assert ((other.dense() - linear.weight).abs() <= 0.5001 * of_weight).all()
    same = make(40, 40, bias=False)
    same.weight.copy_(torch.eye(40))
    assert ((Int8Linear(same)(x) - x).abs() <= 0.5001 * of_token).all()


@torch.no_grad()
def test_without_vnni_products_do_not_overflow():
    """All large and positive: two products of eight-bit numbers are more than 16 bits hold."""
    code = (
        "import torch\n"
        "from piston.inference import packing\n"
        "from piston.models.precision import Linear\n"
        "packing.cpu.read_cpuinfo = lambda: {'flags': 'sse2 avx2'}\n"
        "linear = Linear(256, 64, bias=False)\n"
        "with torch.no_grad():\n"
        "    linear.weight.fill_(0.5)\n"
        "    x = 1 + torch.rand(20, 256)\n"
        "    found, exact = packing.Int8Linear(linear)(x), linear(x)\n"
        "torch.testing.assert_close(found, exact, rtol=0.01, atol=0)\n"
    )
    own = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=own)


def test_how_many_bits_a_token_has(monkeypatch):
    for flags, largest in (("sse2 avx2", 63), ("sse2 avx2 avx_vnni", 127), ("asimd", 127)):
        monkeypatch.setattr(cpu, "read_cpuinfo", lambda flags=flags: {"flags": flags})
        assert largest_token_number.__wrapped__() == largest


@BFLOAT16
@pytest.mark.parametrize("pi05", [False, True], ids=["π0", "π0.5"])
@torch.no_grad()
def test_a_packed_model_acts_as_before(pi05):
    model = tiny.flow(pi05=pi05, dtype="bfloat16")
    cast_for_inference(model, torch.bfloat16)
    for module in model.modules():
        if isinstance(module, Linear):
            module.cpu_product = "torch"
    observation, noise = tiny.observe(model, [[True] * 3] * 2, (2, 5)), tiny.chunk(model, 2)
    before = model.act(observation, noise)
    pack_for_inference(model)
    linears = [one for one in model.modules() if isinstance(one, Linear | PackedLinear)]
    assert linears
    assert all(isinstance(one, PackedLinear) for one in linears)
    assert_close(model.act(observation, noise), before, atol=0.03, rtol=0.03)


@BFLOAT16
def test_what_is_not_packed():
    """Adapters, other precisions, and products that do not go through PyTorch."""
    computed = tiny.flow()  # held in bfloat16, computed in float32
    cast_for_inference(computed, torch.bfloat16)
    adapted = tiny.flow(dtype="bfloat16", vlm=tiny.gemma(lora=LoRA(rank=2, alpha=2.0)))
    cast_for_inference(adapted, torch.bfloat16)
    tiles, plain = tiny.flow(dtype="bfloat16"), tiny.flow()
    cast_for_inference(tiles, torch.bfloat16)
    for module in tiles.modules():
        if isinstance(module, Linear):
            module.cpu_product = "tiles"
    for model in (adapted, tiles, plain, computed):
        before = {name: type(module) for name, module in model.named_modules()}
        pack_for_inference(model)
        after = {name: type(module) for name, module in model.named_modules()}
        changed = {name for name in before if after[name] is not before[name]}
        if model is adapted:
            assert "action_expert.layers.0.mlp.up" in changed
            assert "vlm.layers.0.mlp.up" not in changed
        else:
            assert not changed


@pytest.mark.parametrize("changes", [{}, {"targets": ("text",)}], ids=["actions", "words"])
@torch.no_grad()
def test_eight_bits_made_while_reading_equal_those_made_of_a_model(tmp_path, changes):
    """Adapters become part of both."""
    built = tiny.flow(vlm=tiny.gemma(lora=LoRA(rank=2, alpha=2.0)), **changes)
    save_model(built, built.config, tmp_path)
    whole = load_model(tmp_path, dtype=torch.bfloat16)
    quantize_for_inference(whole)
    read = load_model(tmp_path, dtype=torch.bfloat16, replace=quantizer(built.config))
    observation, noise = tiny.observe(whole, [[True] * 3], (5,)), tiny.chunk(whole, 1)
    assert torch.equal(read.act(observation, noise), whole.act(observation, noise))
    for model in (whole, read):
        assert not [module for module in model.modules() if isinstance(module, precision.Linear)]
        assert (model.vlm.embedding.weight.dtype == torch.int8) == (not changes)


@torch.no_grad()
def test_an_embedding_in_eight_bits_is_near_and_only_where_no_words_are_written():
    model, ids = tiny.flow(), torch.tensor([[1, 5], [0, 3]])
    before = model.vlm.embedding(ids)
    quantize_for_inference(model)
    step = before.abs().amax(-1, keepdim=True) / 127
    assert model.vlm.embedding.weight.dtype == torch.int8
    assert ((model.vlm.embedding(ids) - before).abs() <= 0.5001 * step).all()
    for writes in (tiny.flow(targets=("text",)), tiny.fast()):
        quantize_for_inference(writes)
        assert writes.vlm.embedding.weight.dtype == torch.float32
