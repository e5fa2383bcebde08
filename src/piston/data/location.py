"""Where a data set lies: a folder, the cache of LeRobot's own tools, or the Hugging Face hub.

Knows places only. Downloads through `piston.assets`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from piston.assets import resolve

_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def locate(path_or_repo_id: str | os.PathLike[str], *, only_meta: bool = False) -> Path:
    """The local folder; downloads it (or only its `meta/`) if it is nowhere on this machine."""
    name = os.fspath(path_or_repo_id)
    if "://" in name:
        return _download(name, only_meta)
    tried = [Path(name).expanduser(), lerobot_home() / name]
    for folder in tried:
        if folder.is_dir():
            return folder
    if _REPO_ID.fullmatch(name):
        try:
            return _download(f"hf://datasets/{name}", only_meta)
        except Exception as error:
            error.add_note(f"{name} is also not at {' or '.join(map(str, tried))}.")
            raise
    raise FileNotFoundError(
        f"There is no data set {name}: looked at {' and '.join(map(str, tried))}. Expected is a "
        "folder with meta/info.json, a name owner/name on the Hugging Face hub, or hf://…"
    )


def lerobot_home() -> Path:
    """Where LeRobot's own tools keep data sets."""
    if home := os.environ.get("HF_LEROBOT_HOME"):
        return Path(home).expanduser()
    hub = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(hub).expanduser() / "lerobot"


def _download(location: str, only_meta: bool) -> Path:
    location = location.rstrip("/")
    return resolve(f"{location}/meta").parent if only_meta else resolve(location)
