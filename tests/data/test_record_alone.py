"""Recording needs NumPy and the packages of the extra `record`, and nothing else."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import piston
from piston.data import check_dataset, open_dataset

SOURCE = Path(piston.__file__).parents[1]
PACKAGES = ("numpy", "pyarrow", "pyarrow.parquet", "av", "av.error", "PIL.Image", "filelock")
# What a process has imported, without the standard library.
SHOW = """
import json, sys
own = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(json.dumps(sorted(own)))
"""
PROGRAM = """
import sys
import numpy as np
from piston.data.record import Question, Recorder

features = {
    "camera": {"dtype": "video", "shape": (32, 48, 3)},
    "still": {"dtype": "image", "shape": (8, 8, 3)},
    "state": {"dtype": "float32", "shape": (2,)},
    "action": {"dtype": "float32", "shape": (2,)},
}
for resume in (False, True):
    options = {"language": True, "resume": resume}
    with Recorder(sys.argv[1], 10, features, "arm", "h264", **options) as recorder:
        for step in range(6):
            frame = {
                "camera": np.full((32, 48, 3), 40 * step, np.uint8),
                "still": np.full((8, 8, 3), 40 * step, np.uint8),
                "state": np.full(2, step, np.float32),
                "action": np.full(2, step + 1, np.float32),
            }
            asked = [Question("camera", "Is it dark?", "yes")] if step == 0 else []
            recorder.add_frame(frame, "lift it", subtask="reach", questions=asked)
        recorder.save_episode()
assert "torch" not in sys.modules
"""


def run(program: str, *options: str, python: str = sys.executable, **environment: str) -> str:
    done = subprocess.run(
        [python, "-c", program, *options], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_imports_nothing_else():
    imports = "".join(f"import {name}\n" for name in PACKAGES)
    allowed = set(json.loads(run(imports + SHOW)))
    found = set(json.loads(run("import piston.data.record\n" + SHOW, PYTHONPATH=str(SOURCE))))
    assert found - allowed == {"piston"}


def test_the_old_name_says_the_new_one():
    program = "import piston.data.recorder as old, piston.data.record as new\n"
    program += "assert old.Recorder is new.Recorder"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("piston.data.recorder is named piston.data.record now") == 1


def extra() -> list[str]:
    """The requirements of the extra `record`, by name."""
    lines = importlib.metadata.requires("piston") or []
    return [line.partition(";")[0] for line in lines if re.search(r"extra == .record.", line)]


@pytest.mark.slow
def test_a_computer_with_this_extra_alone_records(tmp_path):
    """The environment has Piston's files, NumPy and what the extra installs."""
    names = {re.match(r"[\w-]+", line)[0].lower() for line in extra()}
    assert names == {"numpy", "pyarrow", "av", "pillow", "filelock"}
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in names:
        files = importlib.metadata.files(name) or []
        for top in {Path(str(file)).parts[0] for file in files} - {"..", "__pycache__"}:
            target = Path(importlib.metadata.distribution(name).locate_file(top))
            (packages / top).symlink_to(target)
    # Without site-packages (-S), so that only these packages can be imported.
    start = f"import sys; sys.path[1:1] = {[str(packages), str(SOURCE)]!r}\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + PROGRAM + SHOW, str(tmp_path / "set")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "piston" in json.loads(done.stdout)
    assert [one for one in check_dataset(tmp_path / "set") if one.severity == "error"] == []
    dataset = open_dataset(tmp_path / "set", language=True)
    assert (len(dataset), len(dataset.episodes), dataset.subtasks) == (12, 2, ("reach",))
    np.testing.assert_array_equal(dataset.column("action")[:, 0], [*range(1, 7)] * 2)
    assert abs(dataset[3]["camera"].mean() - 120) < 8
