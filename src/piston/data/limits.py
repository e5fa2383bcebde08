"""Limits of a robot's actions, from its training data.

They are limits of what the robot is told: every frame's action goes through the robot's transforms
to the model's and back, so that it is in the robot's own units, absolute and without padding. No
image is decoded. `Limits.widened` adds the margins.

Dims: n frames, a action dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from piston.config import DataConfig
from piston.data.protocol import Dataset, episode_bounds
from piston.data.statistics import BLOCK_VALUES, Frames, TransformedColumns
from piston.transforms import compose
from piston_client.limits import Limits


def action_limits(datasets: Sequence[Dataset], pipelines: Sequence[DataConfig]) -> Limits:
    """Return the limits of one robot's data sets together, each with its pipeline.

    They are the range of each dimension and its largest change from one frame of an episode to the
    next, with the usual margins.
    """
    lows, highs, largest = [], [], []
    for dataset, one in zip(datasets, pipelines, strict=True):
        columns = TransformedColumns(dataset, one, 1)
        is_first = np.zeros(len(columns), bool)
        is_first[episode_bounds(dataset)[:, 0]] = True
        size = max(1, BLOCK_VALUES // columns.values_per_frame)
        for start in range(0, len(columns), size):
            # One more frame, for the change between this block and the next.
            frames = np.arange(start, min(start + size + 1, len(columns)))
            actions = robot_actions(columns, frames)
            changes = np.abs(np.diff(actions, axis=0))
            changes[is_first[frames[1:]]] = 0.0
            lows.append(actions.min(axis=0))
            highs.append(actions.max(axis=0))
            largest.append(changes.max(axis=0, initial=0.0))
    return Limits(np.min(lows, axis=0), np.max(highs, axis=0), np.max(largest, axis=0)).widened()


def robot_actions(columns: TransformedColumns, frames: Frames) -> Float[np.ndarray, "n a"]:
    """Return what the robot is told at these frames. `columns` are of horizon 1."""
    to_robot = compose(columns.config.data_transforms.outputs)
    seen = columns.block(frames)
    actions = np.asarray(to_robot(seen)["actions"])
    alone = np.asarray(to_robot({key: values[0] for key, values in seen.items()})["actions"])
    same_shape = actions.shape == (len(frames), *alone.shape)
    # Almost: NumPy may round sines and the like differently for one value and for many.
    if not same_shape or not np.allclose(actions[0], alone, rtol=1e-3, atol=1e-6):
        raise ValueError(
            f"The output transforms of {columns.config.repo_id} give {actions.shape} for actions "
            f"{seen['actions'].shape} of several frames, and {alone.shape} for those of one. They "
            "must treat leading axes alike: write actions[..., :7], not actions[:, :7]."
        )
    return actions[:, 0].astype(np.float64)
