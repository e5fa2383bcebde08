"""Datasets: reading, checking, writing, loading in batches, statistics.

`protocol` says what a dataset is, `open` has a row for each format, `view` makes chunks of actions.
`format` and `metadata` read what a LeRobot folder declares, `columns` and `video` read its files,
`findings` and `check` find what is wrong (`problems`), `dataset` is the open data set, and
`pipeline` makes it what the model sees. `record`, `convert` and `aloha_hdf5` make new sets.

What is not of `record` is imported when it is asked for: a robot's computer records without it.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from piston.data.check import check_dataset
    from piston.data.dataset import LeRobotDataset, open_dataset
    from piston.data.metadata import Metadata
    from piston.data.problems import Problem

__all__ = ["LeRobotDataset", "Metadata", "Problem", "check_dataset", "open_dataset"]

_MODULES = {
    "LeRobotDataset": "dataset",
    "Metadata": "metadata",
    "Problem": "problems",
    "check_dataset": "check",
    "open_dataset": "dataset",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'piston.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"piston.data.{_MODULES[name]}"), name)
