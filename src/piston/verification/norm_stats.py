"""Norm-stats folders: a released file is read and written back byte for byte."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from piston.transforms.normalize import read_norm_stats, write_norm_stats
from piston.verification.quantity import Quantity, equal

_FILE = "norm_stats.json"


def matches(path: Path) -> bool:
    return (path / _FILE).is_file()


def replay(path: Path) -> Iterator[Quantity]:
    with tempfile.TemporaryDirectory() as folder:
        write_norm_stats(Path(folder), read_norm_stats(path))
        written = np.frombuffer((Path(folder) / _FILE).read_bytes(), np.uint8)
    expected = np.frombuffer((path / _FILE).read_bytes(), np.uint8)
    yield equal("bytes written back", written, expected)
