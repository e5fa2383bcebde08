"""Decoded frames on disk: every frame of a camera once, at the model's image size, uint8.

    <home>/frames/<data set>/<camera>-<pixels>-<key>/
        frames.npy      (frames of the whole set, pixels, pixels, 3), sparse: only what is built
        built.npy       which episodes are in it
        about.json      for people

The key changes with the files of the data set. Each video is decoded once, in order. Several
processes may ask for a cache at the same time: one builds it and the others wait. What was built
before a crash is kept. Frames are resized by the function that `ResizeImages` uses, which then
leaves them as they are.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import filelock
import numpy as np
from jaxtyping import Bool, UInt8

from piston.assets import home
from piston.data.dataset import LeRobotDataset
from piston.data.format import Episode, Metadata
from piston.data.processors import num_usable_cpus
from piston.files import atomic_file, write_json
from piston.progress import ProgressBar
from piston.transforms.images import resize_with_pad

logger = logging.getLogger(__name__)

FORMAT = 2


class CameraCache:
    """The resized frames of one camera. Picklable; opens its file where it is used."""

    def __init__(self, metadata: Metadata, camera: str, pixels: int, home_folder: Path) -> None:
        self.camera, self.pixels, self._root = camera, pixels, metadata.root
        self.folder = home_folder / _folder_name(metadata, camera, pixels)
        self._num_frames = metadata.total_frames
        self._positions = {episode.index: i for i, episode in enumerate(metadata.episodes)}
        self._frames: np.ndarray | None = None

    def __getitem__(self, row: int) -> UInt8[np.ndarray, "p p 3"]:
        """Return a copy of the frame in this row of the file, see `first_rows`."""
        if self._frames is None:
            self._frames = np.load(self.folder / "frames.npy", mmap_mode="r")
        return np.array(self._frames[row])

    def missing(self, episodes: Sequence[Episode]) -> list[Episode]:
        built = self._built()
        return [episode for episode in episodes if not built[self._positions[episode.index]]]

    def num_bytes(self, episodes: Sequence[Episode]) -> int:
        return sum(episode.length for episode in episodes) * self.pixels**2 * 3

    def open_for_writing(self) -> FrameWriter:
        """Open the file of frames, or create it. The caller holds the lock."""
        path, shape = self.folder / "frames.npy", (self._num_frames, self.pixels, self.pixels, 3)
        if not path.exists():
            about = {"data set": str(self._root.resolve()), "camera": self.camera}
            write_json(self.folder / "about.json", {**about, "pixels": self.pixels})
            with atomic_file(path) as temporary:
                np.lib.format.open_memmap(temporary, "w+", np.uint8, shape).flush()
        return FrameWriter(path, self.pixels)

    def mark_built(self, episode: Episode) -> None:
        built = self._built()
        built[self._positions[episode.index]] = True
        with atomic_file(self.folder / "built.npy") as temporary, temporary.open("wb") as file:
            np.save(file, built)

    def _built(self) -> Bool[np.ndarray, " episodes"]:
        path = self.folder / "built.npy"
        return np.load(path) if path.exists() else np.zeros(len(self._positions), bool)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_frames": None}


class FrameWriter:
    """Writes with `pwrite`: a full disk is an error here, where a memory map would crash."""

    def __init__(self, path: Path, pixels: int) -> None:
        self._frame_bytes = pixels**2 * 3
        self._begin = np.load(path, mmap_mode="r").offset
        self._file = os.open(path, os.O_RDWR)

    def write(self, row: int, frame: UInt8[np.ndarray, "p p 3"]) -> None:
        data = memoryview(np.ascontiguousarray(frame).tobytes())
        offset = self._begin + row * self._frame_bytes
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written

    def flush(self) -> None:
        os.fsync(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


class CachedFrames:
    """A data set whose images come from caches, of `pixels` squared; nothing else differs."""

    def __init__(self, dataset: LeRobotDataset, pixels: int, folder: Path | None = None) -> None:
        where = home() / "frames" if folder is None else folder
        self.metadata = dataset.metadata
        self._dataset, self._numbers = dataset, dataset.without_cameras()
        self.caches = {c: CameraCache(self.metadata, c, pixels, where) for c in dataset.cameras}
        self._starts = dataset.episode_bounds[:, 0]
        in_file = first_rows(self.metadata)
        self._in_file = np.array([in_file[episode.index] for episode in dataset.episodes])

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self._numbers[index]  # raises IndexError
        index %= len(self)
        episode = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index + int(self._in_file[episode] - self._starts[episode])
        return item | {camera: cache[row] for camera, cache in self.caches.items()}

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
            self._decode(missing)

    def _decode(self, missing: Mapping[CameraCache, Sequence[Episode]]) -> None:
        stopped, marking = threading.Event(), threading.Lock()
        places = zip(self._dataset.episodes, self._starts.tolist(), self._in_file.tolist())
        starts = {episode.index: (start, in_file) for episode, start, in_file in places}
        total = sum(episode.length for episodes in missing.values() for episode in episodes)

        def decode(work: tuple[CameraCache, FrameWriter, Sequence[Episode]]) -> None:
            cache, writer, episodes = work
            for episode in episodes:
                start, in_file = starts[episode.index]
                for frame in range(episode.length):
                    if stopped.is_set():
                        return
                    image = self._dataset.frame(start + frame, [cache.camera])[cache.camera]
                    small = resize_with_pad(image, cache.pixels, cache.pixels)
                    writer.write(in_file + frame, small)
                    bar.advance(1)
                writer.flush()
                with marking:
                    cache.mark_built(episode)

        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(ProgressBar("decoding", "frames", total))
            work = []
            for cache, episodes in missing.items():
                writer = stack.enter_context(cache.open_for_writing())
                work += [(cache, writer, file) for file in _by_file(episodes, cache.camera)]
            pool = stack.enter_context(ThreadPoolExecutor(num_usable_cpus()))
            try:
                for _ in pool.map(decode, work):
                    pass
            except BaseException:
                stopped.set()
                pool.shutdown(cancel_futures=True)
                raise


def first_rows(metadata: Metadata) -> dict[int, int]:
    """Return where each episode begins in a file of all frames.

    Counted here, since `dataset_from_index` of a data set may repeat or leave gaps.
    """
    ends = np.cumsum([episode.length for episode in metadata.episodes])
    return {e.index: int(end) - e.length for e, end in zip(metadata.episodes, ends)}


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
