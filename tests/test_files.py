"""Atomic files and folders: complete or absent, whatever happens while they are written."""

import signal
import subprocess
import sys

import pytest

from piston import files


def _names(folder):
    return [path.name for path in folder.iterdir()]


def _fail():
    raise RuntimeError


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), files.atomic_file(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        _fail()
    assert files.read_json(path) == {"a": 1}
    assert _names(tmp_path) == ["a.json"]


def test_folder_appears_complete_or_not_at_all(tmp_path):
    target = tmp_path / "target"
    with pytest.raises(RuntimeError), files.atomic_folder(target) as folder:  # noqa: PT012
        (folder / "x").write_text("1")
        _fail()
    assert not _names(tmp_path)
    with files.atomic_folder(target) as folder:
        (folder / "x").write_text("1")
        assert not target.exists()
    assert (target / "x").read_text() == "1"


def test_existing_folder_is_replaced_only_when_asked(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("precious")
    with pytest.raises(FileExistsError, match="--overwrite"), files.atomic_folder(target):
        pass
    with pytest.raises(RuntimeError), files.atomic_folder(target, overwrite=True):
        _fail()
    assert (target / "mine").read_text() == "precious"
    with files.atomic_folder(target, overwrite=True) as folder:
        (folder / "new").touch()
    assert _names(target) == ["new"]
    assert _names(tmp_path) == ["target"]


def test_killed_writer_leaves_only_a_temporary_name(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from piston import files\n"
        "with files.atomic_file(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path / "a.txt"])
    assert ended.returncode == -signal.SIGKILL
    assert _names(tmp_path) == [".a.txt.tmp"]
    files.remove_leftovers(tmp_path)
    assert _names(tmp_path) == []


def test_json_lines_that_are_not_whole_are_marked(tmp_path):
    path = tmp_path / "lines.jsonl"
    files.append_json_lines(path, [{"a": "ä"}, {"b": 2}])
    with path.open("ab") as file:
        file.write(b'\n[1]\n{"c": 3}\n{"d": \xff')
    assert list(files.read_json_lines(path)) == [
        (1, {"a": "ä"}),
        (2, {"b": 2}),
        (4, None),
        (5, {"c": 3}),
        (6, None),
    ]
    assert list(files.read_json_lines(tmp_path / "absent")) == []
