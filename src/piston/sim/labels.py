"""Labels of demonstrations: questions about an image, and the borders between subtasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from piston.data.language import Question

if TYPE_CHECKING:  # it imports MuJoCo
    from piston.sim.rendering import View, World

# Each answer with the range of values in which it is right. Between two ranges the answer is not
# clear, and the question is not asked.
Answers = Sequence[tuple[str, float, float]]

# For the column of an image, from 0 to 1.
SIDES: Answers = (
    ("on the left", 0.0, 0.38),
    ("in the middle", 0.415, 0.585),
    ("on the right", 0.62, 1.0),
)


def ask(camera: str, question: str, value: float, answers: Answers) -> list[Question]:
    """Return the question with the answer for this value; nothing where the answer is not clear."""
    return [
        Question(camera, question, answer) for answer, low, high in answers if low < value < high
    ]


def image_position(
    world: World, view: View, point: Float[np.ndarray, " 3"]
) -> Float[np.ndarray, " 2"]:
    """Return column and row of a point in a square image: 0 is left or top, 1 right or bottom."""
    _, model, data = world
    camera = model.camera(view.camera).id
    field_of_view = view.field_of_view or model.cam_fovy[camera]
    x, y, z = (point - data.cam_xpos[camera]) @ data.cam_xmat[camera].reshape(3, 3)
    # The camera looks along −z.
    return 0.5 + np.array([x, -y]) / (-2 * z * np.tan(np.radians(field_of_view) / 2))


def border_distance(subtasks: Sequence[str]) -> Int[np.ndarray, " t"]:
    """Return for each frame of an episode how many frames away another subtask is.

    The two frames at a border have distance 1. Without a border every distance is the episode's
    length.
    """
    names, frames = np.array(subtasks, dtype=object), np.arange(len(subtasks))
    # The first frame of each subtask but the first; the frame before it is as close to the border.
    starts = frames[1:][names[1:] != names[:-1]]
    if not len(starts):
        return np.full(len(subtasks), len(subtasks))
    after, before = frames[:, None] - starts + 1, starts - frames[:, None]
    return np.where(after > 0, after, before).min(axis=1)
