"""What is concluded from /proc/cpuinfo."""

from __future__ import annotations

from pathlib import Path

from piston.models.processor import prefers_float32, read_cpuinfo, tiles_are_broken

TILES = "sse2 avx512_bf16 amx_bf16 amx_tile"


def facts(vendor: str, flags: str, level: int = 32) -> dict[str, str]:
    return {"vendor_id": vendor, "flags": flags, "cpuid level": str(level)}


def test_reads_the_first_processor(tmp_path: Path):
    file = tmp_path / "cpuinfo"
    file.write_text("vendor_id\t: A\nflags\t\t: sse2 fma\n\nvendor_id\t: B\n")
    assert read_cpuinfo(file) == {"vendor_id": "A", "flags": "sse2 fma"}
    assert read_cpuinfo(tmp_path / "absent") == {}


def test_tiles_without_their_sizes_are_broken():
    assert tiles_are_broken(facts("GenuineIntel", TILES, level=28))
    assert not tiles_are_broken(facts("GenuineIntel", TILES, level=32))
    assert not tiles_are_broken(facts("GenuineIntel", "sse2 avx512_bf16", level=28))
    assert not tiles_are_broken({})


def test_where_float32_products_are_the_faster_ones():
    assert not prefers_float32(facts("GenuineIntel", TILES), has_tiles=True)
    assert prefers_float32(facts("GenuineIntel", TILES), has_tiles=False)
    assert not prefers_float32(facts("AuthenticAMD", "sse2 avx512_bf16"), has_tiles=False)
    assert prefers_float32(facts("AuthenticAMD", "sse2 avx2"), has_tiles=False)
    assert not prefers_float32({"Features": "asimd bf16"}, has_tiles=False)
    assert not prefers_float32({}, has_tiles=False)
