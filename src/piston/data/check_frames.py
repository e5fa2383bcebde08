"""What can be wrong with any dataset: values that are not finite, texts, frames and blocks.

Formats whose files can be damaged in more ways have a check of their own in `check`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from piston.data.problems import Problem, episode_problem, ranges
from piston.data.protocol import Dataset, blocks_of, episode_bounds
from piston.progress import Progress

BLACK = 20  # the brightest gray value of a frame that shows nothing (video black is 16)
STOPS = "training stops there; leave out the episode (--data.episodes '!N') or write it again"


def check_frames(dataset: Dataset, progress: Progress) -> Iterator[Problem]:
    """Read all columns and decode every frame."""
    try:
        blocks_of(dataset)
    except ValueError as error:
        yield Problem("error", "blocks", str(error), "training cannot order its samples")
    columns = {}
    for key in dataset.keys:
        columns[key] = column = dataset.column(key)
        if len(column) != len(dataset):
            what = f"it has {len(column)} rows, the dataset {len(dataset)} frames"
            yield Problem("error", key, what, "training cannot use it")
    if not dataset.episodes or sum(one.length for one in dataset.episodes) != len(dataset):
        what = f"{len(dataset.episodes)} episodes do not have the {len(dataset)} frames together"
        yield Problem("error", "episodes", what, "training cannot use it")
        return
    for episode, (start, stop) in zip(dataset.episodes, episode_bounds(dataset).tolist()):
        for key, column in columns.items():
            rows = column[start:stop]
            if rows.dtype.kind == "f" and not np.isfinite(rows).all():
                bad = np.flatnonzero(~np.isfinite(rows).reshape(len(rows), -1).all(axis=1))
                what = f"{key} is NaN or infinite in {len(bad)} rows, the first is {bad[0]}"
                yield episode_problem(episode.index, what, None, STOPS, "error")
        if "task" in dataset.texts and (dataset.texts["task"].numbers[start:stop] < 0).any():
            what = "some frames have no task"
            yield episode_problem(episode.index, what, None, "their prompt is empty")
        black: dict[str, list[int]] = {camera: [] for camera in dataset.cameras}
        for row in range(start, stop):
            try:
                item = dataset[row]
            except (ValueError, OSError) as error:
                what = f"frame {row - start}: {error}"
                yield episode_problem(episode.index, what, None, STOPS, "error")
                break
            for camera, frames in black.items():
                if np.max(item[camera]) <= BLACK:
                    frames.append(row - start)
            progress(row + 1, len(dataset))
        for camera, frames in black.items():
            if frames:
                what = f"{len(frames)} of {episode.length} frames are black: {ranges(frames)}"
                yield episode_problem(episode.index, what, camera, "they are used as they are")
