"""The precision policy, where it can be seen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from piston import weights
from piston.models import cpu, precision
from piston.models.configs import LoRA
from piston.models.gemma import RMSNorm
from piston.models.lora import merge_adapters
from piston.models.siglip import LayerNorm

from . import tiny


@pytest.mark.parametrize("masked", [False, True])
def test_bfloat16_attention_accumulates_in_float32(masked):
    """Thousands of nearly equal logits and values: bfloat16 sums would stop growing long before."""
    generator = torch.Generator().manual_seed(0)
    size, dim = 4096, 64
    query = torch.randn(1, 1, 8, dim, generator=generator).bfloat16()
    key = (torch.randn(1, 1, size, dim, generator=generator) * 0.1 + query[:, :, :1]).bfloat16()
    value = (1 + torch.rand(1, 1, size, dim, generator=generator)).bfloat16()
    mask = (torch.arange(size) < size - 5).expand(1, 1, 8, size) if masked else None
    found = precision.attention(query, key, value, mask)
    assert found.dtype == torch.bfloat16
    logits = query.double() @ key.double().transpose(-1, -2) / dim**0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    exact = logits.softmax(-1) @ value.double()
    # One rounding of the result (2⁻⁸ relative), and rounded weights that average out.
    assert_close(found.double(), exact, atol=0, rtol=2**-7)


def test_attention_sees_through_expanded_masks_and_heads():
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 5, 8)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])[:, None, None]
    found = precision.attention(query, key.expand(2, 4, 5, 8), key.expand(2, 4, 5, 8), mask)
    logits = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(~mask, -torch.inf)
    assert_close(found, logits.softmax(-1) @ key)


@pytest.mark.parametrize("norm", [RMSNorm(512), LayerNorm(512, eps=1e-6)])
def test_norms_of_bfloat16_are_computed_in_float32(norm):
    x = (torch.randn(1, 4, 512) * 3 + 100).bfloat16()
    found, exact = norm(x), norm(x.float())
    if isinstance(found, tuple):
        found, exact = found[0], exact[0]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())


def test_linear_follows_its_input_and_keeps_its_weight():
    linear = precision.Linear(8, 4)
    x = torch.randn(3, 8)
    low = linear(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert linear.weight.dtype == torch.float32
    assert_close(low.float(), linear(x), atol=0.05, rtol=0.05)
    low.sum().backward()
    assert linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_in_float32_differ_by_rounding_only(held, bias, monkeypatch):
    linear = precision.Linear(40, 30, bias=bias)
    if bias:
        torch.nn.init.normal_(linear.bias)
    precision.cast_for_inference(linear, torch.bfloat16)
    precision.cast_for_inference(linear, held)  # numbers that bfloat16 holds exactly, either way
    x = torch.randn(2, 64, 40).bfloat16()
    assert x.shape[0] * x.shape[1] == precision._MIN_ROWS_IN_FLOAT32
    exact = torch.nn.functional.linear(
        x.double(), linear.weight.double(), linear.bias.double() if bias else None
    )
    monkeypatch.setattr(precision, "_MAX_CONVERTED_NUMBERS", 7 * 40)  # several pieces, one uneven
    for product in ("torch", "float32"):
        monkeypatch.setattr(cpu, "choose_product", lambda product=product: product)
        precision.use_fastest_products(linear)
        found = linear(x)
        assert found.dtype == torch.bfloat16
        assert_close(found.double(), exact, atol=2**-8, rtol=2**-7)
    found.sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == held


def test_bfloat16_products_do_not_kill_the_process():
    """Some virtual machines show matrix tiles that cannot be used; building a model handles it."""
    code = (
        "import piston.models.cpu, torch\n"
        "piston.models.cpu.choose_product()\n"
        "a = torch.ones(64, 64, dtype=torch.bfloat16)\n"
        "raise SystemExit(int((a @ a)[0, 0]) != 64)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_importing_and_constructing_change_nothing_global():
    code = (
        "import os\nbefore = dict(os.environ)\n"
        "from piston import weights\nfrom piston.models import precision\n"
        "linear = precision.Linear(4, 4)\n"
        "raise SystemExit(dict(os.environ) != before or linear.cpu_product != 'torch')"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_built_models_use_the_fastest_products(monkeypatch):
    monkeypatch.setattr(cpu, "choose_product", lambda: "float32")
    adapted = tiny.gemma(lora=LoRA(rank=2, alpha=2.0))
    merged = weights.build_model(tiny.flow(vlm=adapted).config)
    merge_adapters(merged)
    for built in (merged, weights.build_on_meta(tiny.fast().config)):
        linears = [one for one in built.modules() if isinstance(one, precision.Linear)]
        assert {linear.cpu_product for linear in linears} == {"float32"}
