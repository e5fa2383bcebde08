"""Files that are complete or absent, JSON lines, and manifests of folders.

A writer that is killed leaves only names that start with a dot and end in `.tmp`; no reader takes
one of those for data. What is written in the files is left to others.
"""

import contextlib
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"

# Returns why a folder must not be replaced, as "it holds no run.json", or None if it may be.
Objection = Callable[[Path], str | None]


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. It takes that name on success, and is deleted on error.

    The temporary name ends in `.tmp`: tell libraries that choose a format by the ending which one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(
    path: Path, *, overwrite: Objection | None = None, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """Yield a new folder beside `path`. It takes that name on success, and is deleted on error.

    What may be at `path` is decided by `check_new_folder`, at the beginning and once more at the
    end: something else may have been put there meanwhile. The old folder is kept until the new one
    is complete; then it is renamed, and deleted when the new one has its name.
    """
    inputs = tuple(inputs)
    temporary, old = _temporary(path), path.with_name(f".{path.name}.old.tmp")
    _restore(old, path)  # after a writer that was killed
    check_new_folder(path, overwrite=overwrite, inputs=inputs)
    _remove(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_tree(temporary)
        check_new_folder(path, overwrite=overwrite, inputs=inputs)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        sync(path.parent)
    finally:
        _remove(temporary)
        _restore(old, path)


def check_new_folder(
    path: Path, *, overwrite: Objection | None = None, inputs: Iterable[Path] = ()
) -> None:
    """Raise an error if something is at `path` that a new folder must not replace.

    A folder is replaced if it is empty. Any other one is replaced only with `overwrite`, if that
    has no objection to it: the folder must be one that Piston wrote. A folder that contains an
    input, or something that a link in an input leads to, is never replaced. A link is not replaced.
    """
    if path.name in ("", ".."):
        raise ValueError(f"{path} cannot be a new folder: give it a name, such as {path}/new.")
    if path.is_symlink():
        raise FileExistsError(
            f"{path} is a link, which is not replaced. Choose another folder, or give the one that "
            "the link leads to."
        )
    for one in _with_links(inputs):
        if is_really_in(path, one):
            raise ValueError(
                f"{path} contains {one}, which is read: it is not replaced. Choose another folder."
            )
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if overwrite is None:
        raise FileExistsError(
            f"{path} exists already. Choose another folder, or replace it with --overwrite "
            "(overwrite=True) where the command has that option."
        )
    objection = overwrite(path) if path.is_dir() else "it is no folder"
    if objection is not None:
        raise FileExistsError(
            f"{path} is not replaced: {objection}. --overwrite replaces only what Piston wrote. "
            "Choose another folder, or move this one away yourself."
        )


def _with_links(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths, and the links below them, such as a data set's folder on another disk."""
    for path in paths:
        yield path
        for folder, *names in os.walk(path):
            children = (Path(folder, name) for name in itertools.chain(*names))
            yield from (child for child in children if child.is_symlink())


def _restore(old: Path, path: Path) -> None:
    """Give a folder that was renamed its name back if no new one has taken it; else delete it."""
    if old.exists() and not path.exists():
        old.rename(path)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, path: Path) -> None:
    """Flush a finished file to disk and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)  # a rename survives a power cut only after its folder is flushed


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any, indent: int = 4) -> None:
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False))


def read_json(path: Path) -> Any:
    """Read a JSON file; a ValueError names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError
        raise ValueError(f"{path} is not a JSON file: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; a ValueError names the file."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}; expected a JSON object.")
    return data


def json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number of each line (from 1) and its object, or None if it is not a whole object.

    A process that is killed while it appends leaves part of a line at the end. Empty lines and a
    missing file yield nothing.
    """
    if not path.is_file():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            row = None
        yield number, row if isinstance(row, dict) else None


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of JSON lines."""
    write_text(path, "".join(map(json_line, rows)))


def append_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add JSON lines to a file that is complete at every moment.

    The file is copied, appended to and renamed: a plain append could be cut within a line. The
    copy takes a few milliseconds for thousands of lines.
    """
    with atomic_file(path) as temporary:
        if path.exists():
            shutil.copyfile(path, temporary)
        with temporary.open("a", encoding="utf-8") as file:
            file.write("".join(map(json_line, rows)))


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name where the file system allows it, else copy it.

    This is safe for files that are replaced, never changed in place.
    """
    with atomic_file(target) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def remove_leftovers(root: Path) -> None:
    """Delete the temporary files that `atomic_file` left when it was killed; follow no link."""
    for leftover in list(root.rglob(".*.tmp")):
        if leftover.is_file() and not leftover.is_symlink():
            leftover.unlink()


def is_really_in(root: Path, path: Path) -> bool:
    """Return whether a path lies in a folder also where links lead."""
    return path.resolve().is_relative_to(root.resolve())


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            sync(path)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def write_manifest(folder: Path) -> None:
    """Write `manifest.json`, which lists every file with its size and checksum, and flush all."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = {path.relative_to(folder).as_posix(): _size_and_checksum(path) for path in files}
    write_json(folder / MANIFEST, contents)
    sync_tree(folder)


def find_damage(folder: Path, *, only_sizes: bool = False) -> str | None:
    """Compare a folder with its manifest and return what is wrong, or None."""
    try:
        contents = read_json(folder / MANIFEST)
        for name, expected in contents.items():
            path = folder / name
            if path.stat().st_size != expected["size"] or not (
                only_sizes or _size_and_checksum(path) == expected
            ):
                return f"{name} is not as it was written"
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        return f"it is not complete ({error})"
    return None


def _size_and_checksum(path: Path) -> dict[str, int]:
    checksum, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return {"size": size, "crc32": checksum}
