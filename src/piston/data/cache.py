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

import functools
import hashlib
import logging
import math
import re
import shutil
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from piston.assets import home
from piston.data.check import worker_threads
from piston.data.protocol import Dataset, Episode, episode_bounds, locate_frame
from piston.data.view import frame, frame_files, select
from piston.files import atomic_file, write_json
from piston.progress import ProgressBar
from piston.transforms.images import resize_with_pad

logger = logging.getLogger(__name__)

FORMAT = 3

# A camera's frames of an episode, and the number of the first one.
_Missing = tuple[str, Episode, int]


@functools.lru_cache(maxsize=4096)  # below the number of files that a process may map
def _open_frames(path: str) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r"))


class CachedFrames:
    """A data set whose images come from a cache, of `pixels` squared; nothing else differs."""

    def __init__(self, dataset: Dataset, pixels: int, folder: Path | None = None) -> None:
        where = home() / "frames" if folder is None else folder
        self._dataset, self._without_images = dataset, select(dataset, cameras=())
        self._stops = episode_bounds(dataset)[:, 1]
        self._pixels = pixels
        self.folders = {c: where / _folder_name(dataset, c, pixels) for c in dataset.cameras}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        episode, step = locate_frame(index, self._dataset.episodes, self._stops)
        item = self._without_images[index]
        for camera in self.folders:
            item[camera] = _open_frames(self._path(camera, episode))[step].copy()
        return item

    def _path(self, camera: str, episode: Episode) -> str:  # a Path costs several µs per frame
        return f"{self.folders[camera]}/episode_{episode.index:06d}.npy"

    def missing(self) -> list[list[_Missing]]:
        """Return what has to be decoded, file by file, in the order of the file."""
        files: dict[tuple[str, str], list[tuple[float, _Missing]]] = {}
        starts = episode_bounds(self._dataset)[:, 0].tolist()
        for camera in self.folders:
            places = {one[0]: one for one in frame_files(self._dataset, camera)}
            for episode, start in zip(self._dataset.episodes, starts):
                if not Path(self._path(camera, episode)).exists():
                    unknown = episode.index, 0, f"episode {episode.index}", None
                    _, _, path, times = places.get(episode.index, unknown)
                    inside = files.setdefault((camera, path), [])
                    inside.append((times[0] if times else 0.0, (camera, episode, start)))
        ordered = (sorted(inside, key=lambda one: one[0]) for inside in files.values())
        return [[place for _, place in inside] for inside in ordered]

    def build(self) -> None:
        """Decode what is missing. Safe in several processes: one works, the others wait."""
        if not self.missing():
            return
        # Not in the folder of all caches: those of other data sets are built at the same time.
        folder = min(self.folders.values())
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / "lock")
        try:
            held = lock.acquire(timeout=0)
        except filelock.Timeout:
            logger.info("Waiting for another process that builds %s", folder)
            held = lock.acquire()
        with held:
            if missing := self.missing():
                self._decode(missing, folder.parent)

    def _decode(self, missing: list[list[_Missing]], folder: Path) -> None:
        total = sum(episode.length for inside in missing for _, episode, _ in inside)
        num_bytes = total * self._pixels**2 * 3
        if num_bytes > (free := shutil.disk_usage(folder).free):
            raise OSError(
                f"The frame cache needs {num_bytes / 1e9:.1f} GB in {folder}, where only "
                f"{free / 1e9:.1f} GB are free. Make room, set PISTON_HOME to a larger disk, or "
                "train without the cache."
            )
        logger.info("Decoding frames once into %s (%d MB)", folder, math.ceil(num_bytes / 1e6))
        for camera, folder in self.folders.items():
            about = {"data set": str(self._dataset.root.resolve()), "camera": camera}
            write_json(folder / "about.json", {**about, "pixels": self._pixels})

        def decode(inside: list[_Missing]) -> None:
            for camera, episode, start in inside:
                shape = (episode.length, self._pixels, self._pixels, 3)
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                path = Path(self._path(camera, episode))
                with atomic_file(path) as temporary, temporary.open("wb") as file:
                    np.lib.format.write_array_header_1_0(file, header)
                    for row in range(start, start + episode.length):
                        if stopped.is_set():
                            raise InterruptedError
                        image = frame(self._dataset, row, [camera])[camera]
                        small = resize_with_pad(image, self._pixels, self._pixels)
                        file.write(np.ascontiguousarray(small).data)
                        bar.advance(1)

        with ProgressBar("decoding", "frames", total) as bar, worker_threads() as (pool, stopped):
            list(pool.map(decode, missing))


def _folder_name(dataset: Dataset, camera: str, pixels: int) -> str:
    """Return a name that changes if any file of the camera changes."""
    root, spans = dataset.root.resolve(), frame_files(dataset, camera)
    files: dict[str, tuple[int, int] | None] = {}
    for _, _, path, _ in spans:
        if path not in files:
            stat = (root / path).stat() if (root / path).exists() else None
            files[path] = stat and (stat.st_size, stat.st_mtime_ns)
    content = repr((FORMAT, str(root), dataset.fps, spans, sorted(files.items())))
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    name, camera = (re.sub(r"[^\w.-]", "_", part) for part in (root.name, camera))
    return f"{name}/{camera}-{pixels}-{key}"
