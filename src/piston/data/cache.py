"""Decoded frames on disk: every frame of a camera once, at the model's image size, uint8.

    <home>/frames/<data set>/<camera>-<pixels>-<key>/
        episode_000012.npy   (frames, pixels, pixels, 3)
        about.json           for people

The key changes with the files of the data set. Each video is decoded once, in order. Several
processes may ask for a cache at the same time: one builds it and the others wait. Episodes that
were complete before a crash are kept. Frames are resized by the function that `ResizeImages` uses,
which then leaves them as they are.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import logging
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from jaxtyping import UInt8

from piston.assets import home
from piston.data.dataset import LeRobotDataset
from piston.data.format import Episode, Metadata
from piston.data.video import num_usable_cpus
from piston.files import atomic_file, write_json
from piston.progress import ProgressBar
from piston.transforms.images import resize_with_pad

logger = logging.getLogger(__name__)

FORMAT = 3


class CameraCache:
    """The resized frames of one camera."""

    def __init__(self, metadata: Metadata, camera: str, pixels: int, home_folder: Path) -> None:
        self.camera, self.pixels = camera, pixels
        self.folder = home_folder / _folder_name(metadata, camera, pixels)

    def frame(self, episode: Episode, step: int) -> UInt8[np.ndarray, "p p 3"]:
        """Return a copy of a frame."""
        return _open_frames(self._path(episode))[step].copy()

    def missing(self, episodes: Sequence[Episode]) -> list[Episode]:
        return [episode for episode in episodes if not Path(self._path(episode)).exists()]

    def num_bytes(self, episodes: Sequence[Episode]) -> int:
        return sum(episode.length for episode in episodes) * self.pixels**2 * 3

    def write(self, episode: Episode, images: Iterable[np.ndarray]) -> None:
        """Resize and store the images of an episode. The caller holds the lock."""
        shape = (episode.length, self.pixels, self.pixels, 3)
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        with atomic_file(Path(self._path(episode))) as temporary, temporary.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for image in images:
                small = resize_with_pad(image, self.pixels, self.pixels)
                file.write(np.ascontiguousarray(small).data)

    def _path(self, episode: Episode) -> str:  # a Path costs several µs for every frame
        return f"{self.folder}/episode_{episode.index:06d}.npy"


@functools.lru_cache(maxsize=4096)  # below the number of files that a process may map
def _open_frames(path: str) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r"))


class CachedFrames:
    """A data set whose images come from caches, of `pixels` squared; nothing else differs."""

    def __init__(self, dataset: LeRobotDataset, pixels: int, folder: Path | None = None) -> None:
        where = home() / "frames" if folder is None else folder
        self.metadata = dataset.metadata
        self._dataset, self._numbers = dataset, dataset.without_cameras()
        self.caches = {c: CameraCache(self.metadata, c, pixels, where) for c in dataset.cameras}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = self._dataset.place(index)
        frames = {camera: cache.frame(*place) for camera, cache in self.caches.items()}
        return self._numbers[index] | frames

    def preload(self) -> None:
        self._numbers.preload()

    def build(self) -> None:
        """Decode what is missing. Safe in several processes: one works, the others wait."""
        caches = sorted(self.caches.values(), key=lambda cache: cache.folder)
        with contextlib.ExitStack() as locks:
            for cache in caches:  # always in this order, so that two processes cannot block
                _acquire(cache, locks)
            missing = {cache: cache.missing(self._dataset.episodes) for cache in caches}
            if not any(missing.values()):
                return
            num_bytes = sum(cache.num_bytes(episodes) for cache, episodes in missing.items())
            require_space(caches[0].folder, num_bytes)
            logger.info(
                "Decoding frames once into %s (%.1f GB)", caches[0].folder.parent, num_bytes / 1e9
            )
            for cache in caches:
                about = {"data set": str(self.metadata.root.resolve()), "camera": cache.camera}
                write_json(cache.folder / "about.json", {**about, "pixels": cache.pixels})
            self._decode(missing)

    def _decode(self, missing: Mapping[CameraCache, Sequence[Episode]]) -> None:
        stopped = threading.Event()
        bounds = zip(self._dataset.episodes, self._dataset.episode_bounds[:, 0].tolist())
        starts = {episode.index: start for episode, start in bounds}
        total = sum(episode.length for episodes in missing.values() for episode in episodes)

        def images(camera: str, episode: Episode) -> Iterator[np.ndarray]:
            for row in range(starts[episode.index], starts[episode.index] + episode.length):
                if stopped.is_set():
                    raise InterruptedError
                yield self._dataset.frame(row, [camera])[camera]
                bar.advance(1)

        def decode(work: tuple[CameraCache, Sequence[Episode]]) -> None:
            cache, episodes = work
            for episode in episodes:
                cache.write(episode, images(cache.camera, episode))

        work = [
            (c, file) for c, episodes in missing.items() for file in _by_file(episodes, c.camera)
        ]
        with (
            ProgressBar("decoding", "frames", total) as bar,
            ThreadPoolExecutor(num_usable_cpus()) as pool,
        ):
            try:
                list(pool.map(decode, work))
            except BaseException:
                stopped.set()
                pool.shutdown(cancel_futures=True)
                raise


def _acquire(cache: CameraCache, locks: contextlib.ExitStack) -> None:
    cache.folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(cache.folder / "lock")
    try:
        locks.enter_context(lock.acquire(timeout=0))
    except filelock.Timeout:
        logger.info("Waiting for another process that builds %s", cache.folder)
        locks.enter_context(lock.acquire())


def require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise OSError(
            f"The frame cache needs {num_bytes / 1e9:.1f} GB in {folder}, where only "
            f"{free / 1e9:.1f} GB are free. Make room, set PISTON_HOME to a larger disk, or train "
            "without the cache."
        )


def _by_file(episodes: Sequence[Episode], camera: str) -> list[list[Episode]]:
    """Group episodes by their file, in the order of the file, so that it is decoded in order."""
    files: dict[str, list[tuple[float, Episode]]] = collections.defaultdict(list)
    for episode in episodes:
        span = episode.videos.get(camera)
        path, start = (
            (episode.data_path, episode.start) if span is None else (span.path, span.start)
        )
        files[path].append((start, episode))
    by_start = (sorted(inside, key=lambda pair: pair[0]) for inside in files.values())
    return [[episode for _, episode in inside] for inside in by_start]


def _folder_name(metadata: Metadata, camera: str, pixels: int) -> str:
    """Return a name that changes if any file of the camera changes."""
    spans: list[tuple[Any, ...]] = []
    for episode in metadata.episodes:
        span = episode.videos.get(camera)
        path = episode.data_path if span is None else span.path
        spans.append((episode.index, episode.length, path, span and (span.start, span.stop)))
    files = {span[2]: _stamp(metadata.root / span[2]) for span in spans}
    content = repr(
        (FORMAT, str(metadata.root.resolve()), metadata.fps, spans, sorted(files.items()))
    )
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    readable = [re.sub(r"[^\w.-]", "_", name) for name in (metadata.root.resolve().name, camera)]
    return f"{readable[0]}/{readable[1]}-{pixels}-{key}"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns
