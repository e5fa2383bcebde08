"""What this CPU can and cannot do with bfloat16, found once from /proc/cpuinfo.

    matrix tiles (AMX)                   bfloat16 products are several times faster than float32
    AVX-512 bfloat16, not Intel          about twice as fast
    any other x86                        slower than float32: emulated, or at half rate (measured:
                                         165 against 300 GFLOP/s on a Xeon without its tiles)

Knows the processor; knows nothing of tensors. Elsewhere than on Linux it assumes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
# The CPUID leaf that holds the sizes of tiles.
_TILE_LEAF = 0x1D


def read_cpuinfo(path: Path = _CPUINFO) -> dict[str, str]:
    """The facts of the first processor; empty where there is no such file."""
    if not path.is_file():
        return {}
    lines = path.read_text().split("\n\n", 1)[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (ln.partition(":") for ln in lines)}


def tiles_are_broken(facts: dict[str, str]) -> bool:
    """A virtual machine that shows matrix tiles but ends CPUID before the leaf with their sizes.

    oneDNN then reads zeros and the first bfloat16 product dies with an illegal instruction.
    """
    last_leaf = int(facts.get("cpuid level", _TILE_LEAF))
    return "amx_tile" in facts.get("flags", "").split() and last_leaf < _TILE_LEAF


def prefers_float32(facts: dict[str, str], has_tiles: bool) -> bool:
    flags = set(facts.get("flags", "").split())
    is_x86 = "sse2" in flags
    has_fast_units = "avx512_bf16" in flags and facts.get("vendor_id") != "GenuineIntel"
    return is_x86 and not has_tiles and not has_fast_units


def _choose() -> tuple[bool, bool]:
    facts = read_cpuinfo()
    has_tiles = "amx_bf16" in facts.get("flags", "").split()
    if tiles_are_broken(facts):
        # A user who set the variable knows better; it works only before the first product.
        chosen = os.environ.setdefault(_ISA_VARIABLE, "AVX512_CORE_BF16")
        has_tiles = "AMX" in chosen or chosen == "DEFAULT"
    broken = tiles_are_broken(facts) and not has_tiles
    return prefers_float32(facts, has_tiles), broken


# Whether oneDNN, and so PyTorch, multiplies bfloat16 slower than float32; and whether the reason is
# tiles that are there, but that oneDNN cannot use.
FLOAT32_IS_FASTER, TILES_NEED_MKL = _choose()
