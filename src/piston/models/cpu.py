"""Products of bfloat16 matrices on CPUs: which way is the fastest here, and the way through MKL.

    matrix tiles (AMX)                   bfloat16 products are several times faster than float32
    AVX-512 bfloat16, not Intel          about twice as fast
    any other x86                        slower than float32: emulated, or at half rate (measured:
                                         165 against 300 GFLOP/s on a Xeon without its tiles)

PyTorch multiplies bfloat16 with oneDNN. Some virtual machines show matrix tiles that oneDNN cannot
use; MKL, which PyTorch carries too, still can: measured 1,200 to 1,900 GFLOP/s for the products of
these models on two cores, where float32 reached 300 and oneDNN's bfloat16 165. Products accumulate
in float32 and are rounded once; the gradient of a float32 weight is not rounded at all.

Nothing happens at import: `choose_product` is called when a model is built. `PISTON_CPU_PRODUCT` in
the environment overrides its choice.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

# How bfloat16 is multiplied: by PyTorch, in matrix tiles through MKL, or in float32 and rounded.
Product = Literal["torch", "tiles", "float32"]
# The environment variable that chooses one of them.
SWITCH = "PISTON_CPU_PRODUCT"

# The CPUID leaf that holds the sizes of tiles.
_TILE_LEAF = 0x1D
# Rounding works on parts of this many numbers, small enough to stay in the cache.
_PART = 2**21
# The C interface's constants for row-major matrices, as they are and transposed.
_ROW_MAJOR, _AS_IS, _TRANSPOSED = 101, 111, 112


def read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the entries of the first processor; none where there is no such file."""
    if not path.is_file():
        return {}
    lines = path.read_text().split("\n\n", 1)[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (ln.partition(":") for ln in lines)}


@functools.cache
def choose_product() -> Product:
    """Choose the product of bfloat16 matrices: what `PISTON_CPU_PRODUCT` names, or the fastest."""
    fastest = _fastest_product()
    asked = os.environ.get(SWITCH)
    if not asked:
        return fastest
    if asked not in get_args(Product):
        raise ValueError(f"{SWITCH} is {asked!r}; expected one of {', '.join(get_args(Product))}.")
    if asked == "tiles" and _mkl_product() is None:
        raise ValueError(
            f"{SWITCH} is tiles, but this build of PyTorch has no MKL to multiply with. Set it to "
            "torch or float32, or leave it out."
        )
    return cast(Product, asked)


def _fastest_product() -> Product:
    """Return the fastest product on this CPU.

    Some virtual machines show tiles but end CPUID before the leaf of their sizes: oneDNN then reads
    zeros, and its first product dies with an illegal instruction. There it is kept from trying,
    through its environment variable, which it reads before its first product; a value that the user
    has set is respected.
    """
    facts = read_cpuinfo()
    flags = facts.get("flags", "").split()
    has_tiles = "amx_bf16" in flags
    if "amx_tile" in flags and int(facts.get("cpuid level", _TILE_LEAF)) < _TILE_LEAF:
        allowed = os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        has_tiles = "AMX" in allowed or allowed == "DEFAULT"
        if not has_tiles and _mkl_product() is not None:
            return "tiles"
    has_fast_units = "avx512_bf16" in flags and facts.get("vendor_id") != "GenuineIntel"
    return "float32" if "sse2" in flags and not has_tiles and not has_fast_units else "torch"


@functools.cache
def _mkl_product() -> Callable[..., None] | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.is_file():
        return None
    product: Any = getattr(ctypes.CDLL(str(library)), "cblas_gemm_bf16bf16f32", None)
    if product is not None:
        whole, real, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        product.argtypes = [whole] * 6 + [real, *[address, whole] * 2, real, address, whole]
        product.restype = None
    return product


_scratch = threading.local()


def _multiply(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], out: Float[Tensor, "m n"]) -> None:
    """Write the float32 product of two bfloat16 matrices to `out`, which is contiguous."""
    product = _mkl_product()
    assert product is not None
    layouts, operands = [], []
    for matrix in (a, b):
        by_rows, by_columns = matrix.stride()
        as_is = by_columns == 1 and by_rows >= matrix.shape[1]
        layouts.append(_AS_IS if as_is else _TRANSPOSED)
        operands += [matrix.data_ptr(), by_rows if as_is else by_columns]
    sizes = (*out.shape, a.shape[1])
    product(_ROW_MAJOR, *layouts, *sizes, 1.0, *operands, 0.0, out.data_ptr(), out.shape[1])


@torch.library.custom_op(
    "piston::tile_product",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor a, Tensor b, Tensor? bias, ScalarType dtype) -> Tensor",
)
def tile_product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a (m, k) · b (k, n) + bias (n) in `dtype`; a and b are rounded to bfloat16 before."""
    rows, columns = len(a), b.shape[1]
    out = a.new_empty(rows, columns, dtype=dtype)
    if not a.numel() or not b.numel():
        return out.zero_()
    # Dense matrices keep their layout, be it transposed.
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    a, b = (x if x.t().is_contiguous() else x.contiguous() for x in (a, b))
    if dtype == torch.float32 and bias is None:
        _multiply(a, b, out)
        return out
    # Otherwise in parts along the longer side, which are rounded while they are in the cache.
    size = max(1, _PART // min(rows, columns))
    for start in range(0, max(rows, columns), size):
        of_a, of_b = slice(None), slice(start, start + size)
        if columns < rows:
            of_a, of_b = of_b, of_a
        place = out[of_a, of_b]
        # Each thread keeps its memory: page faults of new memory cost more than a product.
        memory: Tensor | None = getattr(_scratch, "memory", None)
        if memory is None or memory.numel() < place.numel():
            memory = _scratch.memory = torch.empty(max(place.numel(), _PART))
        part = memory[: place.numel()].view(place.shape)
        _multiply(a[of_a], b[:, of_b], part)
        if bias is not None:
            part += bias[of_b]
        place.copy_(part)
    return out


@tile_product.register_fake
def _shape(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    a, b, bias, _ = inputs
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[0]:
        of_a = tile_product(gradient, b.t(), None, a.dtype)
    if ctx.needs_input_grad[1]:
        # As rows of `bᵀ`, which is a weight: of other gradients, PyTorch makes a transposed copy.
        of_b = tile_product(gradient.t(), a, None, b.dtype).t()
    if ctx.needs_input_grad[2]:
        of_bias = gradient.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return of_a, of_b, of_bias, None


tile_product.register_autograd(_backward, setup_context=_save_inputs)
