"""Presets: named TrainConfigs, found by name or read from a checkpoint.

The presets of each robot family are in a file of their own.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any

import tyro

from piston.config import TrainConfig
from piston.presets import aloha, droid, simple, small
from piston.robots.description import DescribedRobotDataConfig
from piston.serialization import from_json, import_file
from piston.suggestions import did_you_mean

_BY_NAME: dict[str, TrainConfig] = {
    preset.name: preset for family in (aloha, droid, simple, small) for preset in family.PRESETS
}


class UnknownPreset(ValueError):
    """No preset has this name; the message suggests the nearest one."""


@functools.cache
def import_user_presets() -> None:
    """Import the modules and files that PISTON_PRESETS names, which register presets and robots.

    The path of modules stays as it is. If the current folder were added to it, which can be that of
    a checkpoint, any later import of a module that is not installed would run files there.
    """
    named = os.environ.get("PISTON_PRESETS", "").split(",")
    for module in (name.strip() for name in named if name.strip()):
        try:
            if module.endswith(".py"):
                import_file(module)
            else:
                importlib.import_module(module)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            beside = f" Did you mean the file: PISTON_PRESETS={module}.py?"
            raise ValueError(
                f"PISTON_PRESETS names {module!r}, which cannot be imported ({reason})."
                f"{beside if Path(f'{module}.py').is_file() else ''} Name files (/path/my_arm.py), "
                "or modules that are installed or whose folder is in PYTHONPATH, separated by "
                "commas."
            ) from error


def names() -> list[str]:
    import_user_presets()
    return list(_BY_NAME)


def register(preset: TrainConfig) -> TrainConfig:
    """Make a preset of your own known by its name.

    Every command knows it if PISTON_PRESETS names the module that calls this function.
    """
    if preset.name in _BY_NAME:
        raise ValueError(f"A preset named {preset.name!r} exists already. Choose another name.")
    _BY_NAME[preset.name] = preset
    return preset


def get(name: str) -> TrainConfig:
    import_user_presets()
    if name not in _BY_NAME:
        hint = did_you_mean(name, _BY_NAME, cutoff=0.4)
        raise UnknownPreset(f"No preset is named {name!r}.{hint} `piston presets` lists them all.")
    return _BY_NAME[name]


def train_config_from_json(data: Any, where: str) -> TrainConfig:
    """Read the configuration of a run or checkpoint, with robots that PISTON_PRESETS defines.

    `where` is the file, for messages.
    """
    import_user_presets()
    config: TrainConfig = from_json(data, TrainConfig, where)
    return config


def purpose(preset: TrainConfig) -> str:
    """Return "inference" for a preset that only says how to serve a released checkpoint."""
    trains = preset.weights is not None or any(
        one.repo_id is not tyro.MISSING or isinstance(one, DescribedRobotDataConfig)
        for one in preset.data.entries.values()
    )
    return "training" if trains else "inference"
