"""Loads Triton so that its LLVM and that of Mesa's software renderer do not meet.

The CUDA build of PyTorch brings Triton, which contains LLVM and which `torch._dynamo` imports. Mesa
renders on the CPU with another version of LLVM and makes its symbols global to the process. If
Triton is loaded after that, its calls reach Mesa's LLVM, and the process dies with a segmentation
fault.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path


def load_triton() -> None:
    """Load Triton, where it is installed. Call this before rendering and before torch._dynamo."""
    if not sys.platform.startswith("linux") or "triton" in sys.modules:
        return
    flags = sys.getdlopenflags()
    if "libLLVM" in Path("/proc/self/maps").read_text():
        # Something rendered before Piston was imported: Triton has to prefer its own symbols to
        # the global ones. Memory from an allocator in LD_PRELOAD would then be freed by another.
        if "malloc" in os.environ.get("LD_PRELOAD", ""):
            raise ImportError(
                "Triton cannot be loaded after rendering, with an allocator in LD_PRELOAD. Import "
                "piston.sim before anything is rendered, or unset LD_PRELOAD."
            )
        sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
    try:
        with contextlib.suppress(ImportError):  # not installed, as with the CPU build
            importlib.import_module("triton")
    finally:
        sys.setdlopenflags(flags)
