"""Products through MKL against exact ones: values, gradients, shapes, and under compilation."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.testing import assert_close

from piston.models import precision, tiles

if tiles._mkl_product() is None:
    pytest.skip("this build of PyTorch carries no MKL", allow_module_level=True)

# A result is rounded once to bfloat16: half a unit in the last of its 8 bits.
ROUNDED = {"rtol": 2**-8, "atol": 2**-12}


def exact(x: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
    weight = linear.weight.bfloat16().double()
    bias = None if linear.bias is None else linear.bias.double()
    return torch.nn.functional.linear(x.double(), weight, bias)


@pytest.fixture(autouse=True)
def through_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "available", lambda: True)


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
def test_equals_the_exact_product_rounded_once(shape, out, bias, part, monkeypatch):
    monkeypatch.setattr(tiles, "_PART", part)
    linear = precision.Linear(shape[-1], out, bias=bias)
    if bias:
        torch.nn.init.normal_(linear.bias)
    x = torch.randn(shape).bfloat16()
    found = linear(x)
    assert found.dtype == torch.bfloat16
    assert_close(found.double(), exact(x, linear), **ROUNDED)


def test_reads_inputs_that_are_not_contiguous():
    linear = precision.Linear(6, 4)
    wide = torch.randn(5, 3, 12).bfloat16()
    for x in (wide[..., ::2], wide[..., :6], wide[:, :, 6:].transpose(0, 1), wide[:1, :, :6]):
        assert_close(linear(x).double(), exact(x, linear), **ROUNDED)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_product(held):
    linear = precision.Linear(24, 9)
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


def test_a_frozen_weight_gets_no_gradient_and_passes_one_on():
    linear = precision.Linear(8, 4).requires_grad_(False)
    x = torch.randn(3, 8).bfloat16().requires_grad_()
    linear(x).sum().backward()
    assert linear.weight.grad is None
    assert x.grad.abs().sum() > 0


def test_no_rows():
    linear = precision.Linear(8, 4)
    found = linear(torch.empty(0, 8, dtype=torch.bfloat16))
    assert found.shape == (0, 4)
    found.sum().backward()
    assert linear.weight.grad.abs().sum() == 0


def test_compiled_as_a_whole():
    linear = precision.Linear(16, 8)
    x = torch.randn(4, 16).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(lambda y: torch.tanh(linear(y)), fullgraph=True)
    assert_close(compiled(x), torch.tanh(linear(x)))


def test_threads_do_not_share_scratch_memory():
    linear, results = precision.Linear(64, 64), {}
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
