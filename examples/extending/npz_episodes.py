"""A dataset format of its own: a folder of .npz files, each with one episode."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from piston.data.mixture import BLOCKS_PER_WINDOW
from piston.data.open import FORMATS, Format
from piston.data.protocol import Episode, Texts, episode_bounds


@functools.lru_cache(maxsize=BLOCKS_PER_WINDOW)
def read_block(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


class NpzEpisodes:
    """Files with image (frames, height, width, 3), state, actions (frames, …) and task."""

    fps = 10.0
    cameras = ("image", "wrist_image")
    keys = ("state", "actions")

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files = sorted(root.glob("*.npz"))
        tasks = [str(np.load(path)["task"]) for path in self._files]
        lengths = [len(np.load(path)["actions"]) for path in self._files]
        pairs = enumerate(zip(lengths, tasks))
        self.episodes = tuple(Episode(index, length, (task,)) for index, (length, task) in pairs)
        self.texts = {"task": Texts.of(np.repeat(tasks, lengths).tolist())}
        self.blocks = episode_bounds(self)  # a file is read as a whole

    def __len__(self) -> int:
        return int(self.blocks[-1, 1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        block = int(np.searchsorted(self.blocks[:, 1], index, side="right"))
        file, step = read_block(self._files[block]), index - self.blocks[block, 0]
        item = {key: file[key][step] for key in (*self.cameras, *self.keys)}
        return {**item, "task": self.episodes[block].tasks[0]}

    def column(self, key: str, /) -> np.ndarray:
        return np.concatenate([np.load(path)[key] for path in self._files])


def is_npz(root: Path) -> bool:
    return any(root.glob("*.npz"))


FORMATS.append(Format("npz episodes", is_npz, NpzEpisodes))
