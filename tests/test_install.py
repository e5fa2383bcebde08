"""What `make setup` refuses, and how it says so."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "install.py"


def install(folder: Path, python: str = sys.executable, **environment: str):
    return subprocess.run(
        [python, SCRIPT, folder], capture_output=True, text=True, env=os.environ | environment
    )


def older_python() -> str:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python3.{minor}") for minor in range(6, 11)]
    found += [str(path) for path in pyenv.glob("versions/3.[6-9].*/bin/python")]
    for python in filter(None, found):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    pytest.skip("No Python older than 3.11 is on this machine")


def test_an_older_python_is_refused_in_one_line_before_anything_is_made(tmp_path):
    result = install(tmp_path / "venv", older_python())
    assert result.returncode == 1
    assert result.stderr.startswith("error: Piston needs Python 3.11 or newer; ")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = install(tmp_path)
    assert result.returncode == 1
    assert "is not a virtual environment" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_without_a_network_one_line_says_so(tmp_path):
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "0"}
    # The settings of this machine may name other places where packages are.
    nowhere |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    result = install(tmp_path / "venv", **nowhere)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "error: No package index replies. Check the network and run the same command again; "
        "it goes on where it stopped."
    ]


@pytest.mark.parametrize(("free", "is_enough"), [(3.9e9, False), (4.1e9, True)])
def test_a_disk_that_is_too_small_is_refused_with_both_numbers(
    tmp_path, monkeypatch, free, is_enough
):
    check_disk = runpy.run_path(str(SCRIPT))["check_disk"]
    usage = shutil.disk_usage(tmp_path)._replace(free=int(free))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    if is_enough:
        check_disk(tmp_path / "new" / "venv", 4, "Piston")
        return
    with pytest.raises(SystemExit, match=r"with 3\.9 GB free; Piston needs 4 GB"):
        check_disk(tmp_path / "new" / "venv", 4, "Piston")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_folder_with_a_space_is_refused_by_make(tmp_path):
    command = ["make", "-n", "setup", f"VENV={tmp_path}/a b"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "VENV must be the name of one folder" in result.stderr
