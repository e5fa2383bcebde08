"""States and actions as training sees them, block by block, from columns alone.

Every frame's chunk is built with the real end-of-episode repetition and passed through the same
repack and data transforms as in training. Images are black placeholders of one pixel that occupy no
memory: nothing is decoded. Knows nothing of what is computed from the blocks.

Dims: n frames of the block, h horizon, a action dim, s state dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Int
from numpy.lib.stride_tricks import sliding_window_view

from piston.config import DataConfig
from piston.data.pipeline import PADDING_KEY, advising, keys_used, leave_out
from piston.transforms import Data, compose, missing_key

STATISTICS_KEYS = ("state", "actions")
PIXEL = np.zeros((1, 1, 3), np.uint8)


class Columns(Protocol):
    """What is needed of a data set."""

    metadata: Any

    @property
    def keys(self) -> tuple[str, ...]: ...

    @property
    def cameras(self) -> tuple[str, ...]: ...

    @property
    def episodes(self) -> tuple[Any, ...]: ...

    @property
    def episode_bounds(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def column(self, key: str) -> np.ndarray: ...


class TransformedColumns:
    """`block(frames)` gives state (n, s) and actions (n, h, a) after the data transforms."""

    def __init__(self, dataset: Columns, config: DataConfig, horizon: int) -> None:
        if not config.action_sequence_keys:
            raise ValueError(f"The pipeline of {config.repo_id!r} names no action_sequence_keys.")
        self._horizon = horizon
        self._config, self._name = config, str(config.repo_id)
        self._sequence_keys = config.action_sequence_keys
        self._transform = compose(
            (*config.repack_transforms.inputs, *config.data_transforms.inputs)
        )
        bounds = np.asarray(dataset.episode_bounds)
        lengths = bounds[:, 1] - bounds[:, 0]
        self._starts = bounds[:, 0]
        self._last = np.repeat(bounds[:, 1] - 1, lengths)
        # In a column of which every episode is `horizon − 1` longer.
        self._places = np.arange(len(self._last)) + np.repeat(
            np.arange(len(bounds)) * (horizon - 1), lengths
        )
        self._episodes = dataset.episodes
        self._cameras = dataset.cameras
        used = keys_used(config)
        wanted = None if used is None else {*used, *self._sequence_keys, "task_index"}
        with advising(config):
            self._columns = _read_columns(dataset, wanted, self._sequence_keys, horizon)
        self._tasks = dataset.metadata.tasks if config.prompt_from_task else None

    def __len__(self) -> int:
        return len(self._last)

    @property
    def values_per_frame(self) -> int:
        """How many numbers a frame's chunks hold, before the transforms."""
        sizes = (self._columns[key][..., 0].size for key in self._sequence_keys)
        return sum(sizes) * self._horizon

    def block(self, frames: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """`frames` ascending. An error names the first frame that the transforms refuse."""
        try:
            return self._transformed(frames)
        except Exception as error:
            self._locate(frames, error)
            raise

    def place(self, frame: int) -> str:
        """Where a frame is, in words."""
        episode = self._episode_of(frame)
        within = frame - self._starts[episode]
        return f"frame {within} of episode {self._episodes[episode].index} of {self._name}"

    def how_to_leave_out(self, frame: int) -> str:
        """The option that leaves a frame's episode out."""
        return leave_out(self._config, [self._episodes[self._episode_of(frame)].index])

    def _episode_of(self, frame: int) -> int:
        return int(np.searchsorted(self._starts, frame, side="right")) - 1

    def _transformed(self, frames: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        data = self._transform(self._gather(frames))
        for key in STATISTICS_KEYS:
            if key not in data:
                raise missing_key(key, data, f"Statistics of {self._name}")
        return {key: np.asarray(data[key]) for key in STATISTICS_KEYS}

    def _gather(self, frames: Int[np.ndarray, " n"]) -> Data:
        last = self._last[frames]
        data: Data = {
            camera: np.broadcast_to(PIXEL, (len(frames), *PIXEL.shape)) for camera in self._cameras
        }
        for key, column in self._columns.items():
            if key in self._sequence_keys:
                windows = sliding_window_view(column, self._horizon, axis=-1)
                chunks = windows[..., self._places[frames], :]
                data[key] = np.moveaxis(chunks, (-2, -1), (0, 1))
            else:
                data[key] = np.moveaxis(column[..., frames], -1, 0)
        is_pad: Bool[np.ndarray, "n h"] = np.arange(self._horizon) > (last - frames)[:, np.newaxis]
        data |= {f"{key}_is_pad": is_pad for key in self._sequence_keys}
        data[PADDING_KEY] = is_pad
        if self._tasks is not None:
            data["prompt"] = self._prompts(data["task_index"].reshape(-1), frames)
        return data

    def _prompts(self, task_index: np.ndarray, frames: Int[np.ndarray, " n"]) -> np.ndarray:
        assert self._tasks is not None
        # Once per task, not once per frame.
        numbers, which = np.unique(task_index, return_inverse=True)
        texts = [self._tasks.get(int(number)) for number in numbers]
        if None not in texts:
            return np.array(texts)[which]
        # Not in the table: the episode's first task, as in the items of a data set.
        first = [next(iter(episode.tasks), "") for episode in self._episodes]
        own = np.searchsorted(self._starts, frames, side="right") - 1
        pairs = zip(which.tolist(), own.tolist())
        return np.array([first[e] if (text := texts[w]) is None else text for w, e in pairs])

    def _locate(self, frames: Int[np.ndarray, " n"], error: Exception) -> None:
        """Adds a note that says which of the frames the error comes from."""
        for frame in frames:
            try:
                self._transformed(np.array([frame]))
            except type(error) as same:
                error.args, notes = same.args, getattr(same, "__notes__", [])
                error.__notes__ = [*notes, f"in {self.place(frame)}"]
                return
        error.add_note(f"in {self.place(frames[0])}, or up to {len(frames) - 1} frames later")


def _read_columns(
    dataset: Columns, keys: Collection[str] | None, sequence_keys: Sequence[str], horizon: int
) -> dict[str, np.ndarray]:
    """Numbers with the frames as the last axis: of these keys, or of all.

    With the frames last in memory, NumPy runs through the transforms along frames and steps rather
    than along a few dimensions at a time, which is several times faster. In sequence keys, every
    episode's last value is repeated `horizon − 1` times: a frame's chunk is a window of the column.
    """
    bounds = np.asarray(dataset.episode_bounds)
    longer = bounds[:, 1] - bounds[:, 0] + horizon - 1
    shift = np.repeat(np.arange(len(bounds)) * (horizon - 1), longer)
    rows = np.minimum(np.arange(len(shift)) - shift, np.repeat(bounds[:, 1] - 1, longer))
    columns = {}
    for key in dataset.keys if keys is None else [key for key in dataset.keys if key in keys]:
        column = np.moveaxis(np.asarray(dataset.column(key)), 0, -1)
        if column.dtype.kind not in "biuf":
            continue  # text
        if key in sequence_keys:
            column = column[..., rows]
        columns[key] = np.ascontiguousarray(column)
    for key in sequence_keys:
        if key not in columns:
            raise missing_key(key, columns, f"Statistics of {dataset.metadata.root}")
    return columns
