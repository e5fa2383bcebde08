"""What a dataset is to everything that trains on it, computes its statistics or checks it.

A format is a class with the members of `Dataset`, and a row in `open.FORMATS`. Images and texts
without a robot are a dataset without episodes. These members may be there as well, for datasets
that can do better than the general way (`view`):

    blocks                       (start, stop) of indices that are read together: the sampler
                                 permutes blocks, then frames within a window of blocks
    select(episodes, *, cameras) a dataset of some of the episodes and cameras
    frame(index, cameras)        only the images of a frame
    features                     declared types, shapes and names of dimensions, by key
    frame_files(camera)          where the frames of each episode are: see `cache`

This module imports NumPy only: a robot's computer records without the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Episode:
    """`index` is its number in the whole dataset, of which some episodes may not be read."""

    index: int
    length: int
    tasks: tuple[str, ...] = ()


class Texts(NamedTuple):
    """One text per frame: `numbers[i]` is the place of frame i's text in `values`, -1 for none."""

    values: tuple[str, ...]
    numbers: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Number the texts in the order of first appearance; an empty text is none."""
        known: dict[str, int] = {}
        numbers = [known.setdefault(text, len(known)) if text else -1 for text in texts]
        return cls(tuple(known), np.array(numbers, np.int32))


# Where a camera's frames of an episode are: its number, its length, the file below the root, and
# their times in the file (the end may be unknown), or None if they are not a video.
FrameFile = tuple[int, int, str, tuple[float, float | None] | None]


@runtime_checkable
class Samples(Protocol):
    """A dataset as it is, or after its robot's transforms."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class Dataset(Samples, Protocol):
    """`dataset[i]` is a dictionary: images by camera, values by key, texts by name.

    Frames are counted over `episodes`, in their order. Columns are read when they are asked for.
    """

    @property
    def root(self) -> Path:
        """The folder; messages name it, and the same folder has the same episodes."""
        ...

    @property
    def fps(self) -> float: ...

    @property
    def episodes(self) -> Sequence[Episode]: ...

    @property
    def cameras(self) -> Sequence[str]: ...

    @property
    def keys(self) -> Sequence[str]:
        """The names of the columns."""
        ...

    @property
    def texts(self) -> Mapping[str, Texts]:
        """The texts of the frames, such as "task" and "subtask", or "question" and "answer"."""
        ...

    def column(self, key: str, /) -> np.ndarray:
        """Return (frames, …): the values of all frames, read-only. No image is decoded."""
        ...


def episode_bounds(dataset: Dataset) -> np.ndarray:
    """Return (episodes, 2): the first frame of each episode and the one after its last."""
    stops = np.cumsum([episode.length for episode in dataset.episodes], dtype=np.int64)
    return np.stack([np.concatenate([[0], stops[:-1]]), stops], axis=1)


def locate_frame(
    index: SupportsIndex, episodes: Sequence[Any], stops: np.ndarray
) -> tuple[Any, int]:
    """Return the episode of a frame and its number there; `stops` are the ends of the episodes."""
    row, count = index.__index__(), int(stops[-1])
    if not -count <= row < count:
        raise IndexError(f"There is no frame {row}; the data set has {count}.")
    position = int(np.searchsorted(stops, row % count, side="right"))
    episode = episodes[position]
    return episode, row % count - int(stops[position]) + episode.length


def blocks_of(samples: Samples) -> np.ndarray | None:
    """Return the blocks (n, 2) of samples; None if reading at random costs nothing extra."""
    blocks = getattr(samples, "blocks", None)
    if blocks is None:
        return None
    edges = np.asarray(blocks, np.int64).reshape(-1, 2)
    starts, stops = np.concatenate([edges[1:, 0], [len(samples)]]), edges[:, 1]
    if not len(edges) or edges[0, 0] != 0 or (starts != stops).any() or (np.diff(edges) < 1).any():
        raise ValueError(
            f"The blocks of {type(samples).__name__} are {edges.tolist()[:5]} …; expected "
            f"(start, stop) of ascending ranges that are not empty and together have all "
            f"{len(samples)} samples."
        )
    return edges
