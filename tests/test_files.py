"""Atomic files and folders: complete or absent, whatever happens while they are written."""

import signal
import subprocess
import sys
from pathlib import Path

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
    with pytest.raises(RuntimeError), files.atomic_folder(target, overwrite=lambda _: None):
        _fail()
    assert (target / "mine").read_text() == "precious"
    with files.atomic_folder(target, overwrite=lambda _: None) as folder:
        (folder / "new").touch()
    assert _names(target) == ["new"]
    assert _names(tmp_path) == ["target"]


def _linked(link, target):
    link.symlink_to(target)
    return link


def _replace(target, objection=None, inputs=()):
    with files.atomic_folder(target, overwrite=lambda _: objection, inputs=inputs) as folder:
        (folder / "new").touch()


def test_only_a_folder_that_piston_wrote_is_replaced(tmp_path):
    target = tmp_path / "target"
    witness = target / "mine"
    target.mkdir()
    witness.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(FileExistsError, match="not replaced: it has no mark.*Choose another"):
        _replace(target, "it has no mark")
    with pytest.raises(FileExistsError, match="it is no folder"):
        _replace(witness)
    for other in (link, _linked(tmp_path / "dangling", tmp_path / "nowhere")):
        with pytest.raises(FileExistsError, match="is a link, which is not replaced"):
            _replace(other)
        other.unlink()
    with pytest.raises(ValueError, match="cannot be a new folder: give it a name"):
        files.check_new_folder(Path())
    source = tmp_path / "source"
    source.mkdir()
    (source / "below").mkdir()
    _linked(source / "below/data", target)
    for inputs in ([target], [tmp_path / "elsewhere", witness], [source / "below/data"], [source]):
        with pytest.raises(ValueError, match="contains .*, which is read"):
            _replace(target, None, inputs)
    assert witness.read_text() == "precious"
    (source / "below/data").unlink()
    _replace(target, None, [tmp_path])  # an input around it stays
    assert _names(target) == ["new"]
    assert sorted(_names(tmp_path)) == ["source", "target"]


def test_what_appears_while_a_folder_is_written_stays(tmp_path):
    target = tmp_path / "target"
    with pytest.raises(FileExistsError, match="exists already"), files.atomic_folder(target):  # noqa: PT012
        target.mkdir()
        (target / "mine").write_text("precious")
    assert (target / "mine").read_text() == "precious"
    assert _names(tmp_path) == ["target"]


def test_leftovers_behind_links_stay(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root, other):
        folder.mkdir()
        (folder / ".a.json.tmp").write_text("half")
    _linked(root / "folder", other)
    _linked(root / ".b.json.tmp", other / ".a.json.tmp")
    _linked(root / ".c.json.tmp", other)
    files.remove_leftovers(root)
    assert sorted(_names(root)) == [".b.json.tmp", ".c.json.tmp", "folder"]
    assert _names(other) == [".a.json.tmp"]


def test_json_that_is_nested_too_deeply_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"a\.json is not a JSON file"):
        files.read_json(path)
    assert list(files.read_json_lines(path)) == [(1, None)]


def test_a_folder_is_kept_if_the_new_one_cannot_take_its_name(tmp_path, monkeypatch):
    target = tmp_path / "target"
    _replace(target)
    (target / "mine").write_text("precious")
    rename = Path.rename

    def fail(path, to):
        if path.name == ".target.tmp":
            raise OSError(28, "full")
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="full"):
            _replace(target)
    assert (target / "mine").read_text() == "precious"
    assert _names(tmp_path) == ["target"]
    # Killed between the two renames: the next writer finds the old folder, and needs it to decide.
    target.rename(tmp_path / ".target.old.tmp")
    with pytest.raises(FileExistsError, match="it has no mark"):
        _replace(target, "it has no mark")
    assert (target / "mine").read_text() == "precious"
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
