"""A folder that says of itself whether it is whole: `manifest.json`, written last.

It lists every file with its size and checksum. A folder without it was not finished; one that it
does not fit has been damaged. Knows files; knows nothing of what is in them.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from piston.files import sync

_NAME = "manifest.json"
_BLOCK = 2**22


def seal(folder: Path) -> None:
    """Write down what is in the folder, and bring all of it to the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = {path.relative_to(folder).as_posix(): _facts(path) for path in files}
    manifest = folder / _NAME
    manifest.write_text(json.dumps(contents, indent=2), encoding="utf-8")
    for path in (*files, manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def find_damage(folder: Path, *, only_sizes: bool = False) -> str | None:
    """What is wrong with the folder's files, if anything is; by their sizes alone it is quick."""
    try:
        contents = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        for name, facts in contents.items():
            path = folder / name
            same = path.stat().st_size == facts["size"] and (only_sizes or _facts(path) == facts)
            if not same:
                return f"{name} is not as it was written"
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        return f"it is not complete ({error})"
    return None


def _facts(path: Path) -> dict[str, int]:
    checksum, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return {"size": size, "crc32": checksum}
