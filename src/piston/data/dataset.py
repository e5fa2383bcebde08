"""A LeRobot data set as a sequence of samples: numbers, chunks of actions, frames, the task.

    ds = open_dataset("folder or owner/name", sequences={"action": 50})
    ds[i]["action"]         (50, 14); steps beyond the episode repeat its last value …
    ds[i]["action_is_pad"]  (50,)     … and are marked here

Opening finds the episodes that cannot be read and leaves them out with a warning. Knows nothing of
models, of batches or of order: see `loader`. A set can be pickled, forked and used by threads; each
process opens its own decoders when it needs them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int64, UInt8

from piston.data.columns import Columns, find_rows
from piston.data.episodes import Episode, EpisodeError, Problem, episode_problem
from piston.data.images import ImageRows
from piston.data.intact import Findings, look_over
from piston.data.location import locate
from piston.data.metadata import Metadata
from piston.data.subsets import EpisodeChoice, choose_episodes
from piston.data.video import TOLERANCE_S, VideoReaders

logger = logging.getLogger(__name__)

Sequences = Mapping[str, Sequence[float] | int]  # key → seconds from now, or a number of steps


def open_dataset(
    path_or_repo_id: str | os.PathLike[str],
    *,
    sequences: Sequences | None = None,
    episodes: EpisodeChoice = None,
    cameras: Iterable[str] | None = None,
    tolerance_s: float = TOLERANCE_S,
) -> LeRobotDataset:
    """Reads metadata and rows and looks the videos over; frames are read when asked for.

    `cameras=None` means all that have files; `()` none, so that nothing is ever decoded.
    """
    metadata = Metadata.read(locate(path_or_repo_id))
    findings = look_over(metadata, tolerance_s)
    chosen_cameras = _choose_cameras(metadata, findings, cameras)
    chosen = choose_episodes(metadata.episodes, episodes)
    left_out = findings.left_out(chosen_cameras)
    kept = [episode for episode in chosen if episode.index not in left_out]
    columns = Columns(metadata, kept, findings.columns)
    if unreadable := columns.unreadable():
        left_out |= {index: episode_problem(index, what) for index, what in unreadable.items()}
        kept = [episode for episode in kept if episode.index not in unreadable]
        columns = Columns(metadata, kept, findings.columns)
    problems = [left_out[episode.index] for episode in chosen if episode.index in left_out]
    _warn(metadata, problems, len(chosen))
    if not kept:
        raise ValueError(
            f"No episode of {metadata.root} can be read, e.g. {problems[0].where}: "
            f"{problems[0].what}. Run: piston data check {metadata.root}"
        )
    return LeRobotDataset(
        metadata,
        kept,
        columns=columns,
        offsets=_offsets(sequences or {}, metadata.fps, tolerance_s),
        cameras=chosen_cameras,
        tolerance_s=tolerance_s,
    )


class LeRobotDataset(Sequence[dict[str, Any]]):
    """Use `open_dataset`. `ds[i]` counts the frames of `ds.episodes`, one episode after another."""

    def __init__(
        self,
        metadata: Metadata,
        episodes: Sequence[Episode],
        *,
        columns: Columns,
        offsets: Mapping[str, np.ndarray],
        cameras: Sequence[str],
        tolerance_s: float = TOLERANCE_S,
    ):
        self.metadata = metadata
        self.episodes = tuple(episodes)
        self.cameras = tuple(cameras)
        self._offsets = dict(offsets)
        self._tolerance_s = tolerance_s
        self._ends = np.cumsum([episode.length for episode in episodes])
        self._columns = columns
        self._videos = VideoReaders()
        self._images = ImageRows(metadata.root)
        self._threads = CameraThreads()
        self._image_rows: dict[str, dict[int, slice]] = {}
        for key in self._offsets:
            if key not in self._columns.keys and key not in self.cameras:
                raise KeyError(_unknown("a sequence of", key, (*self._columns.keys, *self.cameras)))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:  # type: ignore[override]
        row = self._row(index)
        item = self._numbers(row)
        steps = {camera: self._offsets.get(camera, _NOW) for camera in self.cameras}
        for camera, frames in self._frames(row, steps).items():
            item[camera] = frames if camera in self._offsets else frames[0]
            if camera in self._offsets:
                item[f"{camera}_is_pad"] = self._steps(row, self._offsets[camera])[1]
        return item

    @property
    def fps(self) -> float:
        return self.metadata.fps

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that are not cameras."""
        return self._columns.keys

    @property
    def episode_bounds(self) -> Int64[np.ndarray, "episodes 2"]:
        """First row and the one after the last of each episode, in this set's own numbering."""
        return np.stack([np.concatenate([[0], self._ends[:-1]]), self._ends], axis=1)

    def column(self, key: str) -> np.ndarray:
        """(frames, dim), or (frames,) for plain values; nothing is decoded. Read only."""
        return self._columns[key]

    def task(self, index: SupportsIndex) -> str:
        """The sentence for this step."""
        row = self._row(index)
        text = self.metadata.tasks.get(int(self._columns["task_index"][row]))
        tasks = self._episode(row)[0].tasks
        return text if text is not None else (tasks[0] if tasks else "")

    def frame(
        self, index: SupportsIndex, cameras: Iterable[str] | None = None
    ) -> dict[str, UInt8[np.ndarray, "h w 3"]]:
        """The images of one step, nothing else."""
        wanted = self.cameras if cameras is None else tuple(cameras)
        for camera in wanted:
            if camera not in self.cameras:
                raise KeyError(_unknown("frames of", camera, self.cameras))
        frames = self._frames(self._row(index), dict.fromkeys(wanted, _NOW))
        return {camera: images[0] for camera, images in frames.items()}

    def close(self) -> None:
        """Close the decoders; they open again when needed."""
        self._videos.close()
        self._threads.close()

    def _row(self, index: SupportsIndex) -> int:
        row = index.__index__()
        if not -len(self) <= row < len(self):
            raise IndexError(f"There is no frame {row}; the data set has {len(self)}.")
        return row % len(self)

    def _episode(self, row: int) -> tuple[Episode, int]:
        """The episode of a row and the row at which it starts."""
        position = int(np.searchsorted(self._ends, row, side="right"))
        return self.episodes[position], int(self._ends[position]) - self.episodes[position].length

    def _steps(self, row: int, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows at these offsets, kept inside the episode, and which of them were not."""
        episode, start = self._episode(row)
        rows = row + offsets
        inside = np.clip(rows, start, start + episode.length - 1)
        return inside, rows != inside

    def _numbers(self, row: int) -> dict[str, Any]:
        self._columns.load(self._columns.keys)
        item: dict[str, Any] = {}
        for key in self._columns.keys:
            column = self._columns[key]
            if key in self._offsets:
                rows, is_pad = self._steps(row, self._offsets[key])
                item[key], item[f"{key}_is_pad"] = column[rows], is_pad
            else:
                # A copy: who changes an item must not change the data set.
                item[key] = column[row].copy() if column.ndim > 1 else column[row]
        item["task"] = self.task(row)
        return item

    def _frames(self, row: int, steps: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Each camera in a thread of its own."""
        episode, start = self._episode(row)

        def read(camera: str) -> np.ndarray:
            frames = self._steps(row, steps[camera])[0] - start
            return self._camera_frames(episode, camera, frames)

        return dict(zip(steps, self._threads.map(read, list(steps))))

    def _camera_frames(self, episode: Episode, camera: str, frames: np.ndarray) -> np.ndarray:
        try:
            if self.metadata.features[camera].dtype == "image":
                first = self._first_row(episode)
                images = [self._images.read(episode.data_path, camera, first + k) for k in frames]
                return np.stack(images)
            span = episode.videos[camera]
            # By number, not by the recorded timestamp: frame k belongs to row k, also where the
            # clock began late or jittered. The video's own times are checked against this.
            times = span.start + frames / self.fps
            path = self.metadata.root / span.path
            return self._videos.frames_at(path, times.tolist(), self._tolerance_s)
        except ValueError as error:
            numbers = ", ".join(map(str, frames))
            raise EpisodeError(
                f"episode {episode.index}, frame {numbers}, {camera}: {error} See: piston data "
                f"check {self.metadata.root}",
                episode.index,
            ) from error

    def _first_row(self, episode: Episode) -> int:
        """Where an episode begins in its data file."""
        path = episode.data_path
        if path not in self._image_rows:
            together = [other for other in self.episodes if other.data_path == path]
            whole = self.metadata.root / path
            self._image_rows[path] = find_rows(self.metadata, whole, together, episode.length)
        return int(self._image_rows[path][episode.index].start)


class CameraThreads:
    """A few threads that exist only while they are needed, in the process that needs them."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._lock = threading.Lock()

    def map(self, function: Callable[[str], np.ndarray], names: list[str]) -> list[np.ndarray]:
        if len(names) < 2:
            return [function(name) for name in names]
        if self._process != os.getpid():  # new or forked: threads do not survive a fork
            self._lock = threading.Lock()
            self._process, self._pool = os.getpid(), None
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(thread_name_prefix="camera")
        # The first camera is read here: one hand-over less.
        others = [self._pool.submit(function, name) for name in names[1:]]
        return [function(names[0]), *(other.result() for other in others)]

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, _: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


_NOW = np.zeros(1, np.int64)


def _offsets(sequences: Sequences, fps: float, tolerance_s: float) -> dict[str, np.ndarray]:
    """Steps from now; seconds must fall on frames."""
    offsets = {}
    for key, wanted in sequences.items():
        if isinstance(wanted, int | np.integer):
            if wanted < 1:
                raise ValueError(
                    f"The sequence of {key!r} has {wanted} steps; at least 1 expected."
                )
            offsets[key] = np.arange(wanted)
            continue
        seconds = np.asarray(wanted, np.float64)
        finite = np.where(np.isfinite(seconds), seconds, 0.0)
        steps = np.rint(finite * fps).astype(np.int64)
        on_frames = np.abs(seconds - steps / fps) <= tolerance_s  # never where it is not a number
        if seconds.ndim != 1 or not len(seconds) or not on_frames.all():
            raise ValueError(
                f"The sequence of {key!r} asks for {list(np.atleast_1d(seconds))} s from now; the "
                f"set has {fps} frames per second, so only multiples of {1 / fps:.6g} s are there."
            )
        offsets[key] = steps
    return offsets


def _choose_cameras(
    metadata: Metadata, findings: Findings, cameras: Iterable[str] | None
) -> tuple[str, ...]:
    there = tuple(
        camera
        for camera in metadata.cameras
        if metadata.features[camera].dtype == "video" or camera in findings.columns
    )
    if cameras is None:
        return there
    if isinstance(cameras, str):
        raise TypeError(f"cameras is the text {cameras!r}; expected is a list: [{cameras!r}].")
    wanted = tuple(cameras)
    for camera in wanted:
        if camera not in there:
            raise KeyError(_unknown(f"{metadata.root}: the camera", camera, there))
    return wanted


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    nearest = get_close_matches(name, known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"{what} {name!r} was asked for; there are {known}.{hint}"


def _warn(metadata: Metadata, left_out: list[Problem], num_chosen: int) -> None:
    if not left_out:
        return
    told = "".join(f"\n  {problem.where}: {problem.what}" for problem in left_out[:5])
    more = f"\n  … and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    logger.warning(
        "%s: %d of %d episodes are left out:%s%s\nAll of it: piston data check %s",
        *(metadata.root, len(left_out), num_chosen, told, more, metadata.root),
    )
