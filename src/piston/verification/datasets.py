"""Data sets: items read equal the items written down beside them, frames included.

    lerobot_v30/                     the data set
    lerobot_v30_expected_items.npz   "<index>/<field>": what item <index> holds

A field is a key of the item, or the last part of a camera's name (frames as channels × h × w). A
sequence is as long as its `<key>_is_pad`. A data set without such a file is compared with itself:
frames found by seeking against the same frames decoded in order.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from piston.verification.quantity import Quantity, equal, failed

# Decoders and parquet are imported by who replays a data set: other cases do without them.
if TYPE_CHECKING:
    from piston.data.dataset import LeRobotDataset

_SUFFIX = "_expected_items.npz"
_PAD = "_is_pad"


def matches(path: Path) -> bool:
    """The folder, or the file beside it."""
    return (_folder(path) / "meta" / "info.json").is_file()


def replay(path: Path) -> Iterator[Quantity]:
    from piston.data.dataset import open_dataset

    folder = _folder(path)
    expected_file = folder.with_name(folder.name + _SUFFIX)
    if expected_file.is_file():
        expected = _read_expected(expected_file)
        dataset = open_dataset(folder, sequences=_sequences(expected))
        if beyond := [name for name in expected if int(name.partition("/")[0]) >= len(dataset)]:
            raise ValueError(
                f"{expected_file} holds {beyond[0]!r}, but {folder} has only {len(dataset)} frames."
            )
        yield from _items(dataset, expected)
    else:
        yield from _seeking(open_dataset(folder))


def _read_expected(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as stored:
            expected = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for name in expected:
        index, _, field = name.partition("/")
        if not index.isdecimal() or not field:
            raise ValueError(f"{path} holds {name!r}; expected names are <index>/<field>.")
    return expected


def _folder(path: Path) -> Path:
    if path.name.endswith(_SUFFIX):
        return path.with_name(path.name.removesuffix(_SUFFIX))
    return path


def _sequences(expected: dict[str, np.ndarray]) -> dict[str, int]:
    pads = {name.partition("/")[2]: value for name, value in expected.items()}
    return {f.removesuffix(_PAD): len(v) for f, v in pads.items() if f.endswith(_PAD)}


def _items(dataset: LeRobotDataset, expected: dict[str, np.ndarray]) -> Iterator[Quantity]:
    by_field: dict[str, dict[int, np.ndarray]] = {}
    for name, value in expected.items():
        index, _, field = name.partition("/")
        by_field.setdefault(field, {})[int(index)] = value
    indices = sorted({index for values in by_field.values() for index in values})
    items = {index: dataset[index] for index in indices}
    for field, values in by_field.items():
        yield _compare(dataset, field, items, values)


def _compare(
    dataset: LeRobotDataset,
    field: str,
    items: dict[int, dict[str, Any]],
    expected: dict[int, np.ndarray],
) -> Quantity:
    camera = next((c for c in dataset.cameras if c == field or c.endswith(f".{field}")), None)
    name = f"{field} ({len(expected)} items)"
    if camera is None and field not in items[next(iter(expected))]:
        return failed(name, f"items have no {field!r}")
    wrong = 0.0
    for index, value in expected.items():
        actual = items[index][camera or field]
        quantity = equal(name, np.moveaxis(actual, -1, -3) if camera else actual, value)
        if not np.isfinite(quantity.error):
            return quantity
        wrong += quantity.error
    return Quantity(name, wrong, 0.0, "entries that differ")


def _seeking(dataset: LeRobotDataset) -> Iterator[Quantity]:
    for camera in dataset.cameras:
        wrong, count = 0.0, 0
        for episode, (start, _) in zip(dataset.episodes, dataset.episode_bounds):
            if camera not in episode.videos or episode.videos[camera].start > 0:
                continue
            steps = sorted({0, episode.length // 3, episode.length - 1})
            path = dataset.metadata.root / episode.videos[camera].path
            in_order = _decode_in_order(path, steps)
            for step in reversed(steps):  # backwards: each is sought anew
                frame = dataset.frame(int(start) + step, [camera])[camera]
                wrong += equal(camera, frame, in_order[step]).error
                count += 1
        if count:
            yield Quantity(f"{camera} ({count} frames)", wrong, 0.0, "by seeking and in order")
    rows = [len(dataset.column(key)) for key in dataset.keys]
    yield equal("rows of every column", rows, [len(dataset)] * len(rows))


def _decode_in_order(path: Path, steps: list[int]) -> dict[int, np.ndarray]:
    """As plainly as can be, to have something to compare with."""
    import av

    frames = {}
    try:
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in steps:
                    frames[number] = frame.to_ndarray(format="rgb24")
    except av.FFmpegError as error:
        raise ValueError(f"{path} cannot be decoded: {error}") from None
    if missing := [step for step in steps if step not in frames]:
        raise ValueError(f"{path} ends before frame {missing[0]}.")
    return frames
