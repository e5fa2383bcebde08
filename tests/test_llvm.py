"""Rendering with Mesa and Triton in one process. Each program runs in a process of its own."""

import importlib.util
import signal
import subprocess
import sys

import pytest

pytest.importorskip("mujoco", reason="renders with MuJoCo")
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton, which comes with PyTorch's CUDA build, is not installed", True)

# What a user's own program may do, without anything of Piston.
RENDER = """
import os
os.environ["MUJOCO_GL"] = "egl"
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
renderer = mujoco.Renderer(model)
renderer.update_scene(data)
renderer.render()
"""
IMPORT_DYNAMO = """
import torch._dynamo, triton, triton._C.libtriton
print("works")
"""
COMPILE = """
import torch
assert torch.compile(lambda x: 2 * x)(torch.ones(3)).sum() == 6
"""
PISTON_RENDERS = """
from piston.sim import make_environment
environment = make_environment("aloha_transfer_cube")
environment.reset(0)
environment.observe()
"""


def run(program: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_rendering_before_triton_crashes_without_piston():
    plain = run(RENDER + "print('LLVM' if 'libLLVM' in open('/proc/self/maps').read() else '')")
    assert plain.returncode == 0, plain.stderr
    if "LLVM" not in plain.stdout:
        pytest.skip("OpenGL on this machine does not use LLVM")
    result = run(RENDER + IMPORT_DYNAMO)
    if result.returncode == 0:
        pytest.skip("This version of Mesa keeps LLVM's symbols to itself")
    assert result.returncode == -signal.SIGSEGV


@pytest.mark.usefixtures("compiler")
def test_compiling_works_after_rendering():
    result = run(RENDER + "import piston.models.model" + COMPILE)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "program",
    [
        PISTON_RENDERS + IMPORT_DYNAMO,
        RENDER + "import piston.models.model" + IMPORT_DYNAMO,
        RENDER + "import piston; piston.load_policy" + IMPORT_DYNAMO,
        RENDER + PISTON_RENDERS + IMPORT_DYNAMO,
        "import piston.models.model" + RENDER + IMPORT_DYNAMO,
        "import piston.sim" + RENDER + IMPORT_DYNAMO,
    ],
    ids=[
        *("piston renders", "own, then a model", "own, then a policy", "own and piston"),
        *("a model first", "piston.sim first"),
    ],
)
def test_piston_works_in_any_order(program):
    result = run(program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("works\n")
