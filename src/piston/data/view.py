"""Some episodes and cameras of any dataset, with chunks of actions.

    select(dataset, "0:5")                a dataset of some episodes
    frame(dataset, 3, ["wrist"])          only these images of a frame
    View(dataset, {"action": 50})[i]      the next 50 actions, and "action_is_pad"

A dataset that can select by itself, such as LeRobot's, does; others are seen through a `View`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from piston.data.format import Feature
from piston.data.mixture import EpisodeChoice, choose_episodes
from piston.data.protocol import (
    Dataset,
    Episode,
    FrameFile,
    Texts,
    blocks_of,
    episode_bounds,
    locate_frame,
)


def select(
    dataset: Dataset, episodes: EpisodeChoice = None, *, cameras: Iterable[str] | None = None
) -> Dataset:
    """Return a dataset of some episodes and cameras (None: all of them)."""
    own = getattr(dataset, "select", None)
    if own is None and not dataset.episodes:
        return dataset
    return own(episodes, cameras=cameras) if own else View(dataset, {}, episodes, cameras)


def frame(dataset: Dataset, index: int, cameras: Sequence[str]) -> dict[str, np.ndarray]:
    """Return only these images of one frame."""
    if not cameras:
        return {}
    own = getattr(dataset, "frame", None)
    if own is not None:
        return own(index, cameras)
    item = dataset[index]
    return {camera: item[camera] for camera in cameras}


def frame_files(dataset: Dataset, camera: str) -> list[FrameFile]:
    """Return where the frames are; without knowing it, any file of the folder may have them all."""
    own = getattr(dataset, "frame_files", None)
    if own is not None:
        return own(camera)
    paths = sorted(path for path in dataset.root.rglob("*") if path.is_file())
    return [(-1, 0, path.relative_to(dataset.root).as_posix(), None) for path in paths]


def features_of(dataset: Dataset) -> Mapping[str, Feature]:
    """Return the declared features, or those of the columns, whose dimensions have no names."""
    declared = getattr(dataset, "features", None)
    if declared is not None:
        return declared
    columns = {key: dataset.column(key) for key in dataset.keys}
    return {c: Feature(c, "image", ()) for c in dataset.cameras} | {
        key: Feature(key, str(column.dtype), column.shape[1:] or (1,))
        for key, column in columns.items()
    }


class View(Sequence[dict[str, Any]]):
    """A dataset whose items have chunks: `sequences` gives the number of steps of each key.

    Steps beyond the end of an episode repeat its last value, and `{key}_is_pad` is True for them.
    Columns that are asked for stay in memory, or memory-mapped if the dataset maps them.
    """

    def __init__(
        self,
        dataset: Dataset,
        sequences: Mapping[str, int],
        episodes: EpisodeChoice = None,
        cameras: Iterable[str] | None = None,
    ) -> None:
        self._dataset, self._sequences = dataset, dict(sequences)
        self.root, self.fps, self.keys = dataset.root, dataset.fps, tuple(dataset.keys)
        self.cameras = tuple(dataset.cameras if cameras is None else cameras)
        chosen = choose_episodes(dataset.episodes, episodes)
        self.episodes: tuple[Episode, ...] = tuple(chosen)
        self._stops = episode_bounds(self)[:, 1]
        indices = {episode.index for episode in chosen}
        kept = [episode.index in indices for episode in dataset.episodes]
        # The frames' numbers in the whole dataset.
        self._rows = np.concatenate([np.arange(*edges) for edges in episode_bounds(dataset)[kept]])
        self._columns: dict[str, np.ndarray] = {}

    def select(
        self, episodes: EpisodeChoice = None, *, cameras: Iterable[str] | None = None
    ) -> View:
        indices = [episode.index for episode in choose_episodes(self.episodes, episodes)]
        shown = self.cameras if cameras is None else cameras
        return View(self._dataset, self._sequences, indices, shown)

    def __len__(self) -> int:
        return sum(episode.length for episode in self.episodes)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:  # type: ignore[override]
        episode, step = locate_frame(index, self.episodes, self._stops)
        row = index.__index__() % len(self)
        item: dict[str, Any] = dict(self.frame(row))
        for key in self.keys:
            column, num_steps = self.column(key), self._sequences.get(key)
            if num_steps is None:
                item[key] = column[row].copy()
                continue
            steps, last = np.arange(num_steps), episode.length - 1 - step
            item[key] = column[row + np.minimum(steps, last)]
            item[f"{key}_is_pad"] = steps > last
        for name, (values, numbers) in self.texts.items():
            item[name] = values[numbers[row]] if numbers[row] >= 0 else ""
        number = int(self._rows[row])
        return {**item, "episode_index": episode.index, "frame_index": step, "index": number}

    def frame(
        self, index: SupportsIndex, cameras: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        shown = self.cameras if cameras is None else cameras
        return frame(self._dataset, int(self._rows[index]), shown)

    def column(self, key: str) -> np.ndarray:
        if key not in self._columns:
            column = self._dataset.column(key)
            column = column.view() if len(self) == len(column) else column[self._rows]
            column.flags.writeable = False
            self._columns[key] = column
        return self._columns[key]

    @functools.cached_property
    def texts(self) -> dict[str, Texts]:
        found = self._dataset.texts
        return {name: Texts(one.values, one.numbers[self._rows]) for name, one in found.items()}

    @functools.cached_property
    def features(self) -> Mapping[str, Feature]:
        return features_of(self._dataset)

    @functools.cached_property
    def blocks(self) -> np.ndarray | None:
        blocks = blocks_of(self._dataset)
        if blocks is None:
            return None
        own = np.searchsorted(self._rows, blocks)
        return own[own[:, 0] < own[:, 1]]

    def frame_files(self, camera: str) -> list[FrameFile]:
        return frame_files(self._dataset, camera)
