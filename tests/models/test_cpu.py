"""Products on CPUs: which way is chosen, and MKL's against exact ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from piston.models import cpu, precision
from piston.models.cpu import read_cpuinfo

TILES = "sse2 avx512_bf16 amx_bf16 amx_tile"
# A result is rounded once to bfloat16: half a unit in the last of its 8 bits.
ROUNDED = {"rtol": 2**-8, "atol": 2**-12}


def exact(x: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
    weight = linear.weight.bfloat16().double()
    bias = None if linear.bias is None else linear.bias.double()
    return torch.nn.functional.linear(x.double(), weight, bias)


@pytest.fixture
def make_linear():
    """Linear maps through MKL."""
    if cpu._mkl_product() is None:
        pytest.skip("this build of PyTorch carries no MKL")

    def make(*sizes, **options):
        linear = precision.Linear(*sizes, **options)
        linear.cpu_product = "tiles"
        return linear

    return make


@pytest.mark.parametrize("part", [2**21, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "out"),
    [
        ((3,), 5),
        ((1, 1), 1),
        ((7, 1), 4),
        ((4, 3), 1),
        ((2, 5, 33), 17),
        ((90, 8), 3),
        ((2, 9), 70),
    ],
)
def test_equals_the_exact_product_rounded_once(shape, out, bias, part, monkeypatch, make_linear):
    monkeypatch.setattr(cpu, "_PART", part)
    linear = make_linear(shape[-1], out, bias=bias)
    if bias:
        torch.nn.init.normal_(linear.bias)
    x = torch.randn(shape).bfloat16()
    found = linear(x)
    assert found.dtype == torch.bfloat16
    assert_close(found.double(), exact(x, linear), **ROUNDED)


def test_reads_inputs_that_are_not_contiguous(make_linear):
    linear = make_linear(6, 4)
    wide = torch.randn(5, 3, 12).bfloat16()
    for x in (wide[..., ::2], wide[..., :6], wide[:, :, 6:].transpose(0, 1), wide[:1, :, :6]):
        assert_close(linear(x).double(), exact(x, linear), **ROUNDED)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_product(held, make_linear):
    linear = make_linear(24, 9)
    precision.cast_for_inference(linear, torch.bfloat16)
    precision.cast_for_inference(linear, held)
    x = torch.randn(4, 10, 24).bfloat16().requires_grad_()
    outer = torch.randn(4, 10, 9).bfloat16()
    linear(x).backward(outer)

    rows, gradient = x.detach().double().flatten(0, 1), outer.double().flatten(0, 1)
    unrounded = {"rtol": 1e-5, "atol": 1e-5} if held == torch.float32 else ROUNDED
    assert linear.weight.grad.dtype == linear.bias.grad.dtype == held
    assert_close(linear.weight.grad.double(), gradient.T @ rows, **unrounded)
    assert_close(linear.bias.grad.double(), gradient.sum(0), **unrounded)
    assert_close(x.grad.double().flatten(0, 1), gradient @ linear.weight.double(), **ROUNDED)


def test_the_gradient_of_a_weight_has_its_layout(make_linear):
    # PyTorch would copy another one for every weight and step, transposed, which takes long.
    linear = make_linear(24, 9)
    outputs = linear(torch.randn(10, 24).bfloat16())
    (gradient,) = torch.autograd.grad(outputs.sum(), linear.weight)
    assert gradient.stride() == linear.weight.stride()


def test_a_frozen_weight_gets_no_gradient_and_passes_one_on(make_linear):
    linear = make_linear(8, 4).requires_grad_(False)
    x = torch.randn(3, 8).bfloat16().requires_grad_()
    linear(x).sum().backward()
    assert linear.weight.grad is None
    assert x.grad.abs().sum() > 0


def test_no_rows(make_linear):
    linear = make_linear(8, 4)
    found = linear(torch.empty(0, 8, dtype=torch.bfloat16))
    assert found.shape == (0, 4)
    found.sum().backward()
    assert linear.weight.grad.abs().sum() == 0


@pytest.mark.usefixtures("make_linear", "compiler")
def test_compiled_as_a_whole():
    code = (
        "import torch\nfrom piston.models import cpu, precision\ncpu.choose_product()\n"
        "linear = precision.Linear(16, 8)\nlinear.cpu_product = 'tiles'\n"
        "x = torch.randn(4, 16).bfloat16()\n"
        "compiled = torch.compile(lambda y: torch.tanh(linear(y)), fullgraph=True)\n"
        "torch.testing.assert_close(compiled(x), torch.tanh(linear(x)))"
    )
    # In a process of its own: what checks shapes in tests cannot be compiled.
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_do_not_share_scratch_memory(make_linear):
    linear, results = make_linear(64, 64), {}
    inputs = [torch.randn(200, 64).bfloat16() for _ in range(8)]

    def work(index: int) -> None:
        results[index] = all(torch.equal(linear(inputs[index]), expected[index]) for _ in range(50))

    with torch.no_grad():
        expected = [linear(x) for x in inputs]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] for i in range(8))


def facts(vendor: str, flags: str, level: int = 32) -> dict[str, str]:
    return {"vendor_id": vendor, "flags": flags, "cpuid level": str(level)}


def test_reads_the_first_processor(tmp_path: Path):
    file = tmp_path / "cpuinfo"
    file.write_text("vendor_id\t: A\nflags\t\t: sse2 fma\n\nvendor_id\t: B\n")
    assert read_cpuinfo(file) == {"vendor_id": "A", "flags": "sse2 fma"}
    assert read_cpuinfo(tmp_path / "absent") == {}


BROKEN = facts("GenuineIntel", TILES, level=28)  # CPUID ends before the sizes of tiles
# The processor, the user's limit for oneDNN, and what is chosen with MKL and without it.
CHOICES = {
    "working tiles": (facts("GenuineIntel", TILES), None, "torch", "torch"),
    "broken tiles": (BROKEN, None, "tiles", "float32"),
    "broken tiles that the user insists on": (BROKEN, "AVX512_CORE_AMX", "torch", "torch"),
    "no tiles to break": (
        facts("GenuineIntel", "sse2 avx512_bf16", level=28),
        None,
        "float32",
        "float32",
    ),
    "no bfloat16": (facts("AuthenticAMD", "sse2 avx2"), None, "float32", "float32"),
    "fast bfloat16 units": (facts("AuthenticAMD", "sse2 avx512_bf16"), None, "torch", "torch"),
    "ARM": ({"Features": "asimd bf16"}, None, "torch", "torch"),
    "unknown": ({}, None, "torch", "torch"),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("has_mkl", [True, False])
def test_the_choice_of_a_product(name, has_mkl, monkeypatch):
    processor, allowed, with_mkl, without = CHOICES[name]
    monkeypatch.setattr(cpu, "read_cpuinfo", lambda: processor)
    monkeypatch.setattr(cpu, "_mkl_product", lambda: print if has_mkl else None)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if allowed is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
    monkeypatch.delenv(cpu.SWITCH, raising=False)
    assert cpu.choose_product.__wrapped__() == (with_mkl if has_mkl else without)
    limit = "AVX512_CORE_BF16" if name == "broken tiles" else allowed
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == limit
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)


@pytest.mark.parametrize("asked", ["torch", "tiles", "float32"])
def test_the_choice_can_be_overridden(asked, monkeypatch):
    monkeypatch.setattr(cpu, "read_cpuinfo", lambda: facts("GenuineIntel", TILES))
    monkeypatch.setattr(cpu, "_mkl_product", lambda: print)
    monkeypatch.setenv("PISTON_CPU_PRODUCT", asked)
    assert cpu.choose_product.__wrapped__() == asked


@pytest.mark.parametrize(
    ("asked", "message"), [("amx", "expected one of torch, tiles, float32"), ("tiles", "no MKL")]
)
def test_an_override_that_cannot_work(asked, message, monkeypatch):
    monkeypatch.setattr(cpu, "_mkl_product", lambda: None)
    monkeypatch.setenv("PISTON_CPU_PRODUCT", asked)
    with pytest.raises(ValueError, match=message):
        cpu.choose_product.__wrapped__()
