"""Files that appear whole or not at all.

Knows temporary names, flushing and renaming. Knows nothing of what is written. Every temporary name
starts with a dot and ends in `.tmp`, so that no reader takes one for data and a crashed recorder
can be cleaned up.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it becomes `path` in one step, on error it
    goes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Flushes a finished file to disk and gives it its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)  # the rename itself survives a power cut only once its folder is flushed


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """JSON as LeRobot lays it out: four spaces, non-ASCII kept."""
    write_text(path, json.dumps(value, indent=4, ensure_ascii=False))


def append_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Adds JSON lines to a file that stays whole at every moment.

    A plain append could be cut in the middle of a line. The copy makes the cost grow with the file;
    it is a plain byte copy inside the kernel, a few milliseconds for the statistics of a thousand
    episodes.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with replacing(path) as temporary:
        if path.exists():
            shutil.copyfile(path, temporary)
        with temporary.open("a", encoding="utf-8") as file:
            file.write(text)


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for the same bytes where the file system allows it, else a copy.

    Safe because no file here is ever changed in place.
    """
    with replacing(target) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def remove_leftovers(root: Path) -> None:
    """Deletes the temporary files of a writer that was killed."""
    for leftover in root.rglob(".*.tmp"):
        leftover.unlink()


def sync(path: Path) -> None:
    """Brings a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
