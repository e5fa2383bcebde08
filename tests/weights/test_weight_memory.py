"""Memory, in processes of their own: conversion needs one tensor, loading needs the model."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

from piston.models.configs import GemmaSize, Pi0Config, VisionSize
from piston.weights import expected_shapes
from piston.weights.models import describe
from piston.weights.tensors import write_tensor_file

MIB = 2**20
MANY_LAYERS = Pi0Config(
    vision=VisionSize(width=32, depth=1, mlp_dim=32, num_heads=2, patch=56),
    vlm=GemmaSize(width=512, depth=12, mlp_dim=4608, num_heads=2, num_kv_heads=1, head_dim=128),
    action_expert=GemmaSize(
        width=32, depth=12, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=128
    ),
    vocab_size=8192,
)

MEASURED = """
import json, sys, threading, time
from pathlib import Path
import torch
from piston.inference.packing import quantizer
from piston.weights import build_on_meta, convert, load_model, open_checkpoint
from piston.weights.openpi_jax import read_arrays

def convert_all(folder): convert(folder, folder + "-converted", torch.bfloat16)
def copy_all(folder): convert(folder, folder + "-copied")
def load_same(folder): return load_model(folder)
def load_narrow(folder): return load_model(folder, dtype=torch.bfloat16)
def load_int8(folder):
    config = open_checkpoint(folder).config
    return load_model(folder, dtype=torch.bfloat16, replace=quantizer(config))
def read_all(folder):
    for entry in read_arrays(Path(folder))[0].values():
        entry.read(torch.bfloat16)

def resident(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(kind)) * 1024

def growth(job, folder):
    # Mapped pages may be dropped by the system at any time: where files are mapped, count the rest.
    kind = "RssAnon" if job is read_all else "VmRSS"
    before, peak, running = resident(kind), 0, True
    def watch():
        nonlocal peak
        while running:
            peak = max(peak, resident(kind))
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    kept = job(folder)
    running = False
    thread.join()
    return max(peak, resident(kind)) - before

folder, *jobs = sys.argv[1:]
if "read_all" not in jobs:
    build_on_meta(open_checkpoint(folder).config)  # torch imports what this needs only now
print(json.dumps({job: growth(globals()[job], folder) for job in jobs}))
"""

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc/self/status"
)


def measure(folder, *jobs: str) -> dict[str, int]:
    """By how many bytes a fresh process grew in each job."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED), str(folder), *jobs],
        # What is freed goes back to the system at once, so that one job does not feed the next.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_converting_holds_one_tensor_and_loading_the_model(tmp_path):
    """A checkpoint of 360 MB whose largest tensor has 16 MB."""
    tensors = {
        name: torch.empty(shape, device="meta")
        for name, shape in expected_shapes(MANY_LAYERS).items()
    }
    folder = tmp_path / "large"
    folder.mkdir()
    write_tensor_file(
        folder / "model.safetensors", tensors, lambda name: torch.full(tensors[name].shape, 0.5)
    )
    (folder / "config.json").write_text(json.dumps(describe(MANY_LAYERS, {})))
    size = (folder / "model.safetensors").stat().st_size
    assert size > 340 * MIB
    assert max(tensor.nbytes for tensor in tensors.values()) == 16 * MIB

    grown = measure(folder, "convert_all", "copy_all", "load_int8", "load_narrow", "load_same")
    for place in tmp_path.iterdir():  # pytest would keep them for a while
        shutil.rmtree(place)
    assert 0 < grown["convert_all"] < (16 + 64) * MIB
    assert grown["copy_all"] < (16 + 64) * MIB
    assert grown["load_int8"] < size / 4 + 64 * MIB
    assert grown["load_narrow"] < size / 2 + 64 * MIB
    assert grown["load_same"] < size + 64 * MIB


@pytest.mark.slow
def test_stacked_layers_are_decoded_once_and_one_array_at_a_time(tmp_path):
    ts = pytest.importorskip("tensorstore", reason="needs piston[jax-weights]")
    stacks = {"mlp.gating_einsum": (12, 2, 512, 4096), "mlp.linear": (12, 4096, 512)}
    for name, shape in stacks.items():
        path = {"driver": "ocdbt", "base": f"file://{tmp_path}/"}
        store = ts.open(
            {"driver": "zarr", "kvstore": {**path, "path": f"params.PaliGemma.llm.layers.{name}/"}},
            create=True,
            dtype=ts.float32,
            shape=shape,
            chunk_layout=ts.ChunkLayout(chunk_shape=shape),
        ).result()
        store.write(torch.randn(shape).numpy()).result()
    largest = 12 * 2 * 512 * 4096 * 4  # bytes: 192 MiB
    grown = measure(tmp_path, "read_all")
    assert grown["read_all"] < largest + 128 * MIB
