"""Samples per second of a data set, all cameras, frames resized.

    naive    every frame: open the file, decode from its start, close it
    cold     this reader, nothing open yet
    warm     the same, its decoders open
    cached   frames decoded and resized once, then read from disk

The order is random; all in one process and one run, so that the ratios hold on any machine.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import av
import numpy as np
import tyro
from rich.table import Table

from common import main
from piston.cli.console import console
from piston.data import LeRobotDataset, open_dataset
from piston.data.cache import CachedFrames
from piston.data.loader import Loader, Order
from piston.transforms.images import resize_with_pad


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Samples per second: naive, cold, warm, cached."""

    # The data set: a folder, or owner/name.
    path: Annotated[str, tyro.conf.Positional]
    # Seconds for each measurement.
    seconds: float = 5.0
    # Images are resized to this many pixels square.
    pixels: int = 224
    # Actions per sample, where the set has "action" or "actions".
    horizon: int = 50
    # At most this many episodes (for the cache, all of their frames are decoded once).
    episodes: int = 20
    # Where the cache is kept meanwhile.
    cache_dir: str | None = None
    # Also measure the cached set through this many worker processes.
    num_workers: int = 0


@dataclasses.dataclass(frozen=True)
class Measured:
    rate: float
    decoding: float | None = None


class Resized:
    """A data set's numbers, and its frames resized."""

    def __init__(self, dataset: Any, pixels: int) -> None:
        self.dataset, self.pixels = dataset, pixels

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.dataset[index]
        return {
            key: resize_with_pad(value, self.pixels, self.pixels) if _is_image(value) else value
            for key, value in item.items()
            if not isinstance(value, str)
        }


def _is_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 3 and value.dtype == np.uint8


def run(options: Arguments) -> None:
    dataset, numbers = _open(options)
    indices = np.random.default_rng(0).permutation(len(dataset))
    screen = console()
    screen.print(
        f"{options.path}: {len(dataset):,} frames, {len(dataset.cameras)} cameras, resized to "
        f"{options.pixels} × {options.pixels}",
        highlight=False,
    )
    results = {"naive": _measure(lambda i: _naive(dataset, numbers, i, options), indices, options)}
    plain = Resized(dataset, options.pixels)
    results["cold"] = Measured(_first(plain, indices))
    results["warm"] = dataclasses.replace(
        _measure(plain.__getitem__, indices, options),
        decoding=_share_of_decoding(dataset, plain, indices),
    )
    with tempfile.TemporaryDirectory(dir=options.cache_dir) as folder:
        cached = CachedFrames(dataset, options.pixels, Path(folder))
        begun = time.perf_counter()
        cached.build()
        built = len(dataset) / (time.perf_counter() - begun)
        results["cached"] = _measure(Resized(cached, options.pixels).__getitem__, indices, options)
        if options.num_workers:
            name = f"cached, {options.num_workers} workers"
            results[name] = _through_workers(Resized(cached, options.pixels), options)
    screen.print(_table(results))
    screen.print(f"The cache was built at {built:,.0f} samples/s.", highlight=False)


def _open(options: Arguments) -> tuple[LeRobotDataset, LeRobotDataset]:
    """The set with its images, and its numbers alone."""
    whole = open_dataset(options.path)
    if not any(episode.videos for episode in whole.episodes):
        raise ValueError(f"{options.path} holds no videos; what is measured here is decoding them.")
    episodes = [episode.index for episode in whole.episodes[: options.episodes]]
    sequences = {key: options.horizon for key in whole.keys if key in ("action", "actions")}
    dataset = open_dataset(whole.metadata, sequences=sequences, episodes=episodes)
    return dataset, dataset.select(cameras=())


def _measure(
    read: Callable[[int], Any], indices: np.ndarray, options: Arguments, least: int = 3
) -> Measured:
    count, begun = 0, time.perf_counter()
    while count < least or time.perf_counter() - begun < options.seconds:
        read(int(indices[count % len(indices)]))
        count += 1
    return Measured(count / (time.perf_counter() - begun))


def _first(samples: Resized, indices: np.ndarray, count: int = 8) -> float:
    """The first samples after opening: no decoder is open."""
    samples.dataset.close()
    begun = time.perf_counter()
    for index in indices[:count]:
        samples[int(index)]
    return min(count, len(indices)) / (time.perf_counter() - begun)


def _share_of_decoding(dataset: LeRobotDataset, plain: Resized, indices: np.ndarray) -> float:
    """Time for the frames of some samples, over the time for the whole samples."""
    some = [int(index) for index in indices[-32:]]
    seconds = []
    for read in (plain.__getitem__, dataset.frame):
        begun = time.perf_counter()
        for index in some:
            read(index)
        seconds.append(time.perf_counter() - begun)
    return min(1.0, seconds[1] / seconds[0])


def _naive(dataset: LeRobotDataset, numbers: LeRobotDataset, index: int, options: Arguments) -> Any:
    """What a reader without any care does."""
    item = numbers[index]
    position = int(np.searchsorted(dataset.episode_bounds[:, 1], index, side="right"))
    episode = dataset.episodes[position]
    for camera, span in episode.videos.items():
        time_s = span.start + (index - dataset.episode_bounds[position, 0]) / dataset.fps
        frame = _decode_from_start(dataset.metadata.root / span.path, time_s)
        item[camera] = resize_with_pad(frame, options.pixels, options.pixels)
    return item


def _decode_from_start(path: Path, time_s: float) -> np.ndarray:
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            if frame.time is not None and frame.time >= time_s - 1e-4:
                return frame.to_ndarray(format="rgb24")
    raise ValueError(f"{path} has no frame at {time_s:.6f} s.")


def _through_workers(samples: Resized, options: Arguments) -> Measured:
    order = Order(samples, batch_size=32)
    with Loader(samples, order, num_workers=options.num_workers) as loader:
        for _ in range(2 * options.num_workers):  # started and ahead
            next(loader)
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < options.seconds:
            next(loader)
            count += order.batch_size
        return Measured(count / (time.perf_counter() - begun))


def _table(results: dict[str, Measured]) -> Table:
    table = Table("", "samples/s", "× naive", "decoding")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, measured in results.items():
        share = "" if measured.decoding is None else f"{measured.decoding:.0%} of the time"
        ratio = measured.rate / results["naive"].rate
        table.add_row(name, f"{measured.rate:,.1f}", f"{ratio:,.1f}", share)
    return table


if __name__ == "__main__":
    main(run, Arguments)
