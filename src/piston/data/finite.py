"""States and actions that are not finite numbers, found in columns before any frame is decoded.

A value of a column counts only if it is still not finite after the robot's transforms, which may
drop or repair it. Knows nothing of what is trained.
"""

from __future__ import annotations

import numpy as np

from piston.config import DataConfig
from piston.data.dataset import LeRobotDataset
from piston.data.pipeline import advising, keys_used, leave_out
from piston.data.transformed_columns import TransformedColumns

# Episodes that a message lists, and frames of each that are looked at after the transforms.
_SHOWN = 5


def require_finite(dataset: LeRobotDataset, config: DataConfig, horizon: int) -> None:
    """Refuse a set with such values; `horizon` is the model's. The error names them."""
    suspect = _suspect_frames(dataset, config)
    if not suspect.any():
        return
    columns = TransformedColumns(dataset, config, config.steps_read(horizon))
    found = {}
    for episode, (start, stop) in zip(dataset.episodes, dataset.episode_bounds):
        frames = np.flatnonzero(suspect[start:stop])
        if bad := [frame for frame in frames[:_SHOWN] if _is_bad(columns, start + frame)]:
            found[episode.index] = f"{', '.join(map(str, bad))}{' …' * (len(frames) > _SHOWN)}"
    if found:
        listed = [f"episode {index} (frame {frames})" for index, frames in found.items()]
        more = f" and {len(found) - _SHOWN} more episodes" if len(found) > _SHOWN else ""
        raise ValueError(
            f"States or actions of {config.repo_id} are NaN or infinite: "
            f"{', '.join(listed[:_SHOWN])}{more}. Leave out what cannot be repaired: "
            f"{leave_out(config, found)}"
        )


def _suspect_frames(dataset: LeRobotDataset, config: DataConfig) -> np.ndarray:
    """Frames with a value that is not finite in any column that the pipeline reads."""
    used = keys_used(config)
    suspect = np.zeros(len(dataset), bool)
    for key in dataset.keys:
        if used is None or key in used or key in config.action_sequence_keys:
            with advising(config):
                column = dataset.column(key)
            if column.dtype.kind == "f":
                suspect |= ~np.isfinite(column).reshape(len(column), -1).all(axis=1)
    return suspect


def _is_bad(columns: TransformedColumns, frame: int) -> bool:
    try:
        values = columns.block(np.array([frame])).values()
    except ValueError:  # robots may refuse such numbers themselves
        return True
    return not all(np.isfinite(array).all() for array in values)
