"""Some episodes and cameras of any dataset, with chunks of actions.

    select(dataset, "0:5")                a dataset of some episodes
    frame(dataset, 3, ["wrist"])          only these images of a frame
    View(dataset, {"action": 50})[i]      the next 50 actions, and "action_is_pad"

A dataset that can select by itself, such as LeRobot's, does; others are seen through a `View`.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, SupportsIndex

import numpy as np
from jaxtyping import Int64

from piston.data.format import Feature
from piston.data.mixture import EpisodeChoice, choose_episodes
from piston.data.problems import unknown_key
from piston.data.protocol import (
    Dataset,
    Episode,
    FrameFile,
    Texts,
    blocks_of,
    episode_bounds,
    locate_frame,
)
from piston.data.video import TOLERANCE_S

Sequences = Mapping[str, Sequence[float] | int]  # key → seconds from now, or a number of steps


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
    """Some episodes and cameras of any dataset, with chunks of values or images.

    Steps beyond the ends of an episode repeat its first or last value, and `{key}_is_pad` is True
    for them. Columns that are asked for stay in memory, or memory-mapped if the dataset maps them.
    """

    episodes: tuple[Any, ...]

    def __init__(
        self,
        dataset: Dataset,
        sequences: Sequences,
        episodes: EpisodeChoice = None,
        cameras: Iterable[str] | None = None,
    ) -> None:
        self._dataset, self._columns = dataset, dict[str, np.ndarray]()
        self.root, self.fps, self.keys = dataset.root, dataset.fps, tuple(dataset.keys)
        self.cameras = tuple(dataset.cameras if cameras is None else cameras)
        self._place_episodes(dataset.episodes, sequences)
        self._set_episodes(choose_episodes(dataset.episodes, episodes))

    def _place_episodes(self, episodes: Iterable[Episode], sequences: Sequences) -> None:
        """Set the episodes that the columns have, and the steps of sequences."""
        self._set_episodes(episodes)
        starts = self.episode_bounds[:, 0].tolist()
        self._starts = {episode.index: start for episode, start in zip(self.episodes, starts)}
        self._offsets = _offsets(sequences, self.fps)
        for key in self._offsets:
            if key not in (*self.keys, *self.cameras):
                raise self._unknown(key)

    def _set_episodes(self, episodes: Iterable[Episode]) -> None:
        self.episodes = tuple(episodes)
        self._ends = episode_bounds(self)[:, 1]

    def select(
        self, episodes: EpisodeChoice = None, *, cameras: Iterable[str] | None = None
    ) -> Self:
        """Return a dataset of some of these episodes and cameras (None: all of them, `()`: none).

        It shares the columns and the decoders with this one.
        """
        selected = copy.copy(self)
        selected._set_episodes(choose_episodes(self.episodes, episodes))
        if cameras is not None:
            selected.cameras = tuple(self._known_camera(camera) for camera in cameras)
        return selected

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:  # type: ignore[override]
        episode, step = self.place(index)
        start = self._starts[episode.index]
        item: dict[str, Any] = {}
        steps: dict[str, np.ndarray] = {}  # of sequences
        for key, offsets in self._offsets.items():
            if key in self.keys or key in self.cameras:
                numbers = step + offsets
                steps[key] = np.minimum(np.maximum(numbers, 0), episode.length - 1)
                item[f"{key}_is_pad"] = numbers != steps[key]
        for key in self.keys:
            column = self._whole_column(key)
            value = column[start + steps.get(key, step)]
            # A copy, so that changing an item does not change the dataset.
            item[key] = value.copy() if column.ndim > 1 and key not in steps else value
        item |= self._texts_at(episode, start + step)
        if self.cameras:
            now = np.array([step])
            wanted = {camera: steps.get(camera, now) for camera in self.cameras}
            for camera, images in self._read(episode, wanted).items():
                item[camera] = np.asarray(images) if camera in steps else images[0]
        place = {"episode_index": episode.index, "frame_index": step, "index": start + step}
        return place | item

    @property
    def episode_bounds(self) -> Int64[np.ndarray, "episodes 2"]:
        """The first row of each episode and the row after its last, in this set's numbering."""
        return episode_bounds(self)

    def place(self, index: SupportsIndex) -> tuple[Any, int]:
        """Return the episode of a frame and its number within the episode."""
        return locate_frame(index, self.episodes, self._ends)

    def column(self, key: str) -> np.ndarray:
        """Return (frames, dim), or (frames,) for plain values, read-only. Nothing is decoded."""
        if key not in self.keys:
            raise self._unknown(key)
        return self._of_episodes(self._whole_column(key))

    def _of_episodes(self, column: np.ndarray) -> np.ndarray:
        """Return the rows of this set's episodes, in their order, read-only."""
        if len(self) == len(column):
            return column
        starts = ((self._starts[episode.index], episode.length) for episode in self.episodes)
        part = np.concatenate([column[start : start + length] for start, length in starts])
        part.flags.writeable = False
        return part

    def frame(
        self, index: SupportsIndex, cameras: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Return only the images of one frame."""
        wanted = self.cameras if cameras is None else map(self._known_camera, cameras)
        episode, step = self.place(index)
        frames = self._read(episode, dict.fromkeys(wanted, np.array([step])))
        return {camera: images[0] for camera, images in frames.items()}

    def _known_camera(self, camera: str) -> str:
        if camera not in self.cameras:
            raise self._unknown(camera, is_camera=True)
        return camera

    def _unknown(self, key: str, *, is_camera: bool = False) -> KeyError:
        # It may have been opened without some of the cameras of the folder.
        source = f"The open data set {self.root}"
        return unknown_key(source, key, self.cameras, self.keys, is_camera=is_camera)

    def _whole_column(self, key: str) -> np.ndarray:
        """Return a column of all episodes that can be selected, read-only."""
        if key not in self._columns:
            self._columns[key] = self._dataset.column(key).view()
            self._columns[key].flags.writeable = False
        return self._columns[key]

    def _texts_at(self, episode: Any, row: int) -> dict[str, str]:  # noqa: ARG002
        """Return the texts of a frame; `row` is its place in the columns."""
        found = self._all_texts.items()
        return {name: t.values[t.numbers[row]] if t.numbers[row] >= 0 else "" for name, t in found}

    def _read(
        self, episode: Any, steps: Mapping[str, np.ndarray]
    ) -> Mapping[str, Sequence[np.ndarray] | np.ndarray]:
        """Return the images of each camera at these frames of an episode."""
        cameras: dict[int, list[str]] = collections.defaultdict(list)  # by step
        for camera, numbers in steps.items():
            for step in numbers.tolist():
                cameras[step].append(camera)
        start = self._starts[episode.index]
        read = {step: frame(self._dataset, start + step, shown) for step, shown in cameras.items()}
        return {c: [read[step][c] for step in numbers.tolist()] for c, numbers in steps.items()}

    @functools.cached_property
    def _all_texts(self) -> Mapping[str, Texts]:
        return self._dataset.texts

    @property
    def texts(self) -> dict[str, Texts]:
        found = self._all_texts.items()
        return {name: Texts(t.values, self._of_episodes(t.numbers)) for name, t in found}

    @functools.cached_property
    def features(self) -> Mapping[str, Feature]:
        return features_of(self._dataset)

    @property
    def blocks(self) -> np.ndarray | None:
        blocks = blocks_of(self._dataset)
        if blocks is None:
            return None
        rows = self._of_episodes(np.arange(len(self._dataset)))
        own = np.searchsorted(rows, blocks)
        return own[own[:, 0] < own[:, 1]]

    def frame_files(self, camera: str) -> list[FrameFile]:
        return frame_files(self._dataset, camera)


def _offsets(sequences: Sequences, fps: float) -> dict[str, np.ndarray]:
    """Return steps from now. Raise ValueError if the seconds are not those of frames."""
    offsets = {}
    for key, wanted in sequences.items():
        if isinstance(wanted, int | np.integer):
            if wanted < 1:
                raise ValueError(
                    f"The sequence of {key!r} has {wanted} steps; expected at least 1."
                )
            offsets[key] = np.arange(wanted)
            continue
        seconds = np.asarray(wanted, np.float64)
        steps = np.rint(np.nan_to_num(seconds, posinf=0, neginf=0) * fps).astype(np.int64)
        on_frames = np.abs(seconds - steps / fps) <= TOLERANCE_S  # False for NaN and infinity
        if seconds.ndim != 1 or not len(seconds) or not on_frames.all():
            raise ValueError(
                f"The sequence of {key!r} asks for {list(np.atleast_1d(seconds))} s from now; at "
                f"{fps} frames per second there are only multiples of {1 / fps:.6g} s."
            )
        offsets[key] = steps
    return offsets
