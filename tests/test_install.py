"""What `make setup` refuses, and how it says so."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "install.py"


NO_NETWORK = (
    "error: No package index replies. Check the network and run the same command again; "
    "it goes on where it stopped."
)
NOWHERE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_NO_INDEX": "0",
    # The settings of this machine may name other places where packages are.
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
    "PIP_EXTRA_INDEX_URL": "",
}


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


def test_a_file_in_the_place_of_the_folder_is_refused_and_kept(tmp_path):
    file = tmp_path / "venv"
    file.write_text("mine")
    result = install(file)
    assert result.returncode == 1
    assert result.stderr == f"error: {file} is not a folder. Name another one (VENV=…).\n"
    assert file.read_text() == "mine"


def test_without_a_network_one_line_says_so(tmp_path):
    result = install(tmp_path / "venv", **NOWHERE)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [NO_NETWORK]


@pytest.mark.parametrize("pip", ["none", "interrupted"])
def test_pip_is_restored_and_other_packages_are_kept(tmp_path, pip):
    """uv makes environments without pip; Ctrl-C while pip replaces itself leaves half of it."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=pip == "interrupted")
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "mine.py").touch()
    for record in packages.glob("pip-*.dist-info/RECORD"):
        record.unlink()
        (packages / "pip" / "_internal" / "build_env.py").write_text("from pip import nothing\n")
        (packages / "~ip").mkdir()
    result = install(folder, **NOWHERE)
    assert "Successfully installed pip" in result.stdout
    assert result.stderr.splitlines() == [NO_NETWORK]
    assert (packages / "mine.py").exists()
    assert not (packages / "~ip").exists()


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
    with pytest.raises(SystemExit, match=r"with 3\.9 GB free; Piston needs 4\.0 GB"):
        check_disk(tmp_path / "new" / "venv", 4, "Piston")


@pytest.mark.parametrize("same_disk", [True, False])
def test_downloads_count_on_the_disk_where_they_are_kept(tmp_path, monkeypatch, same_disk):
    """/tmp, where pip unpacks what it downloads, is often a small disk in memory."""
    script = runpy.run_path(str(SCRIPT))
    names = script["check_disk_for_torch"].__globals__
    report = {"install": [{"metadata": {"name": name}} for name in ("torch", "nvidia-cudnn")]}
    monkeypatch.setitem(names, "ask_index", lambda _: json.dumps(report))
    monkeypatch.setitem(names, "output", lambda *_: str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    class Folder:
        def __init__(self, path):
            self.path = path

        def stat(self):
            disk = 0 if same_disk else self.path.name
            return SimpleNamespace(st_dev=disk)

    monkeypatch.setitem(names, "first_existing", Folder)
    checked = {}
    monkeypatch.setitem(
        names, "check_disk", lambda folder, size, _: checked.update({folder.name: size})
    )
    script["check_disk_for_torch"](tmp_path / "venv", (), ())
    environment, wheels = script["GIGABYTES"]["CUDA"]
    if same_disk:
        assert checked == {"venv": pytest.approx(environment + 2 * wheels)}
    else:
        assert checked == {"venv": environment, "tmp": wheels, "cache": wheels}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "uninstalled")
    command = ["make", "-n", "setup", f"VENV={tmp_path}"]
    # `make test`, which may run this test, passes its own options on in the environment.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=own)
    assert result.stdout.startswith("python3 scripts/install.py"), result.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_folder_with_a_space_is_refused_by_make(tmp_path):
    command = ["make", "-n", "setup", f"VENV={tmp_path}/a b"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "VENV must be the name of one folder" in result.stderr
