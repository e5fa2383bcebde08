"""A policy as one compiled file: written, served, and refused where it does not fit."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.models import tiny

import piston
from piston.cli import main
from piston.inference.compiled import Buckets
from piston.inference.exported import export_graphs
from piston.models.precision import Linear


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_what_is_compiled_computes_what_the_model_does():
    """The tests in two other files, in a process without checks of shapes.

    What checks shapes in tests cannot be compiled.
    """
    root = Path(__file__).parents[2]
    files = ("tests/models/compiled_graphs.py", "tests/inference/exported_files.py")
    options = ("-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, *files]
    # Inductor compiles programs to find out which vector instructions work, though torch knows it.
    own = {**os.environ, "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    result = subprocess.run(command, cwd=root, env=own, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6_000:] + result.stderr[-2_000:]


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "policy.pt2"
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a whole exported policy"):
        piston.load_policy(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("policy/data/extra/config.json", json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="Export the checkpoint again"):
        piston.load_policy(file)


def test_products_that_depend_on_the_batch_are_refused():
    model = tiny.flow(dtype="bfloat16")
    for module in model.modules():
        if isinstance(module, Linear):
            module.cpu_product = "float32"
    buckets = Buckets.of(model.config, {3}, max_batch=2)
    with pytest.raises(ValueError, match="Export with --dtype float32"):
        export_graphs(model, buckets, num_steps=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "somewhere", "policy.zip"], "expected a name that ends in .pt2"),
        (["export", "somewhere", "policy.pt2", "--num-steps", "0"], "--num-steps must be at least"),
        (["export", "/nowhere/at/all", "policy.pt2"], "/nowhere/at/all"),
        (["serve", "policy.pt2", "--compile"], "leave out --preset, --dtype and --compile"),
        (["inspect", "policy.pt2"], "cannot be looked into"),
    ],
)
def test_command_lines_that_cannot_work(words, message, capsys):
    assert main(words) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
