"""Robots: each file holds one robot's Inputs, Outputs and data configuration, and nothing else.

Here is what they all share: how cameras, state and actions become the dictionary that the model
transforms expect. A robot emits the cameras it has; what becomes of a model's other cameras is the
model family's affair (`FillCameras`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from piston.transforms.base import Data, listed, require, require_chunk, require_vector
from piston.transforms.images import to_uint8_hwc
from piston.transforms.keys import ALWAYS_KEPT


def model_inputs(
    data: Mapping[str, Any],
    *,
    images: Mapping[str, Any],
    cameras: Mapping[str, str],
    state: np.ndarray,
    actions: np.ndarray | None,
    who: str,
    spare: Collection[str] = (),
) -> Data:
    """Image and mask per camera slot, state, actions where there are any, and the prompt.

    `cameras` goes from the robot's name of a camera to the model's slot; `images` holds the images
    under the robot's names. `data` is the robot's dictionary, for the prompt. A picture under any
    other name is refused, unless it is a `spare` one: it would be left out in silence.
    """
    if len(set(cameras.values())) < len(cameras):
        raise ValueError(f"{who}: two cameras are mapped to one slot: {dict(cameras)}.")
    _refuse_unexpected(images, cameras, spare, who)
    leading = state.shape[:-1]
    pixels = {slot: _camera_image(images, name, leading, who) for name, slot in cameras.items()}
    result: Data = {
        "image": pixels,
        "image_mask": {slot: np.ones(leading, dtype=bool)[()] for slot in pixels},
        "state": state,
    }
    if actions is not None:
        if actions.shape[:-2] != leading:
            raise ValueError(
                f"{who}: 'actions' has shape {actions.shape}, the state {state.shape}; their "
                "batch axes must agree: (…, horizon, dim) and (…, dim)."
            )
        result["actions"] = actions
    return {**result, **{key: data[key] for key in ALWAYS_KEPT if key in data}}


def _refuse_unexpected(
    images: Mapping[str, Any], cameras: Mapping[str, str], spare: Collection[str], who: str
) -> None:
    known = {*cameras, *spare}
    unexpected = [
        name for name, value in images.items() if name not in known and np.ndim(value) > 2
    ]
    # In a flat dictionary there are chunks of actions besides pictures.
    pictures = [name for name in unexpected if np.asarray(images[name]).dtype == np.uint8]
    if pictures:
        raise ValueError(
            f"{who}: camera {listed(pictures)} is not expected; this robot's are {listed(known)}. "
            "Leave it out, or map it to a slot of the model with `cameras`."
        )


def _camera_image(
    images: Mapping[str, Any], name: str, leading: tuple[int, ...], who: str
) -> np.ndarray:
    image = to_uint8_hwc(require(images, name, who), name)
    if image.shape[:-3] != leading:
        raise ValueError(
            f"{who}: image {name!r} has shape {image.shape}; expected the state's batch axes "
            f"{leading}, then (height, width, 3)."
        )
    return image


def optional_actions(data: Mapping[str, Any], dim: int, who: str) -> np.ndarray | None:
    """The chunk (…, horizon, dim); None at inference, where there are no actions."""
    return require_chunk(data, "actions", dim, who) if "actions" in data else None


def joints_and_gripper(
    data: Mapping[str, Any], joints: str, gripper: str, num_joints: int, who: str
) -> np.ndarray:
    """(…, num_joints + 1) from two keys; the gripper may be a number or a vector of one."""
    arm = require_vector(data, joints, num_joints, who)
    width = np.asarray(require(data, gripper, who))
    if width.shape == arm.shape[:-1]:
        width = width[..., np.newaxis]
    hand = require_vector({gripper: width}, gripper, 1, who)
    if hand.shape[:-1] != arm.shape[:-1]:
        raise ValueError(
            f"{who}: {joints!r} has shape {arm.shape} and {gripper!r} {hand.shape}; their batch "
            "axes must agree."
        )
    return np.concatenate([arm, hand], axis=-1)


def first_actions(data: Mapping[str, Any], dim: int, who: str) -> np.ndarray:
    """The robot's own action dimensions, without the model's padding."""
    actions = require_chunk(data, "actions", None, who)
    if actions.shape[-1] < dim:
        raise ValueError(
            f"{who}: 'actions' has shape {actions.shape}; expected at least {dim} dimensions."
        )
    return actions[..., :dim]
