"""Where a dataset is: a folder, `owner/name` on the Hugging Face hub, or a location such as hf://…"""

from __future__ import annotations

import os
import re
from pathlib import Path

from piston.assets import resolve

_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def locate(path_or_repo_id: str | os.PathLike[str], *, only_meta: bool = False) -> Path:
    """Return the folder of a data set; download it (or only its `meta/`) if it is not local."""
    name = os.fspath(path_or_repo_id).rstrip("/")
    is_address = "://" in name
    tried = [] if is_address else [Path(name).expanduser(), lerobot_home() / name]
    for folder in tried:
        if folder.is_dir():
            return folder
    places = " and ".join(dict.fromkeys(map(str, tried)))
    if not is_address and not _REPO_ID.fullmatch(name):
        raise FileNotFoundError(
            f"There is no data set {name}; looked for {places}. Give a folder with "
            "meta/info.json, a name owner/name on the Hugging Face hub, or hf://…"
        )
    address = name if is_address else f"hf://datasets/{name}"
    try:
        return resolve(f"{address}/meta").parent if only_meta else resolve(address)
    except Exception as error:
        if tried:
            error.add_note(f"{name} is not a local data set either; looked for {places}.")
        raise


def lerobot_home() -> Path:
    """Return the folder where LeRobot's own tools keep data sets."""
    if home := os.environ.get("HF_LEROBOT_HOME"):
        return Path(home).expanduser()
    hub = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(hub).expanduser() / "lerobot"
