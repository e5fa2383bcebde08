"""Named configurations: look-up, and suggestions for a wrong name.

Presets are data. Those of each robot family are in a file of their own.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path

import tyro

from piston.config import TrainConfig
from piston.presets import aloha, debug, droid, libero, tiny, ur5
from piston.suggestions import did_you_mean

_ALL: tuple[TrainConfig, ...] = (
    *aloha.PRESETS,
    *droid.PRESETS,
    *libero.PRESETS,
    *ur5.PRESETS,
    *tiny.PRESETS,
    *debug.PRESETS,
)
_BY_NAME: dict[str, TrainConfig] = {preset.name: preset for preset in _ALL}


class UnknownPreset(ValueError):
    """No preset has this name; the message suggests the nearest."""


@functools.cache
def import_user_presets() -> None:
    """Import the modules that PISTON_PRESETS names, which `register` presets of their own."""
    modules = [name.strip() for name in os.environ.get("PISTON_PRESETS", "").split(",")]
    if any(modules):
        # A command has no current folder on its path, where such a module usually is.
        sys.path.append(str(Path.cwd()))
    for module in filter(None, modules):
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueError(
                f"PISTON_PRESETS names {module!r}, which cannot be imported "
                f"({type(error).__name__}: {error}). It is a comma-separated list of modules, "
                "found in the current folder or installed."
            ) from error


def names() -> list[str]:
    import_user_presets()
    return list(_BY_NAME)


def register(preset: TrainConfig) -> TrainConfig:
    """Make a preset of your own known by its name.

    Put the call in a module and name it in PISTON_PRESETS, and every command knows the preset.
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


def purpose(preset: TrainConfig) -> str:
    """A preset without weights or a data set only describes how to serve a released checkpoint."""
    trains = preset.weights is not None or preset.data.repo_id is not tyro.MISSING
    return "training" if trains else "inference"
