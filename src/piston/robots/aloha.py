"""ALOHA: two six-joint arms with grippers, up to four cameras.

    state, action   left arm 6, left gripper 1, right arm 6, right gripper 1

The base models were trained on ALOHA data of another convention than the public ALOHA software
uses: three joints turn the other way, and grippers are measured by the motor's angle instead of the
fingers' distance. `adapt_to_pi` translates. It concerns no other robot.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import tyro
from jaxtyping import Float

from piston.config import DataConfig, DataConfigFactory
from piston.models.configs import ModelConfig
from piston.robots import first_actions, model_inputs, optional_actions
from piston.serialization import register
from piston.transforms.actions import (
    AbsoluteActions,
    DeltaActions,
    PerturbState,
    make_bool_mask,
)
from piston.transforms.base import Data, Group, listed, missing_key, require_mapping, require_vector
from piston.transforms.keys import RepackTransform

logger = logging.getLogger(__name__)

DIM = 14
GRIPPERS = (6, 13)
# What delta actions are relative in: joints, not grippers.
JOINTS = make_bool_mask(6, -1, 6, -1)
REQUIRED_CAMERA = "cam_high"
# ALOHA's own name → the model's camera slot.
CAMERAS: Mapping[str, str] = {
    "cam_high": "base_0_rgb",
    "cam_left_wrist": "left_wrist_0_rgb",
    "cam_right_wrist": "right_wrist_0_rgb",
}
# Recorded by the robot, in no slot of the models.
SPARE_CAMERA = "cam_low"

_JOINT_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)

# ALOHA reports a gripper's opening as a fraction of the fingers' distance, in metres.
_FINGER_METRES = (0.01844, 0.05800)
# The linkage that turns the motor's angle into that distance, in metres.
_ARM_LENGTH = 0.036
_HORN_RADIUS = 0.022
# The model's 0 and 1, as motor angles in radians. (Encoder counts 2405 and 3110 of 4096 per turn,
# counted from 2048.)
_MODEL_RADIANS = (0.5476, 1.6296)
# ALOHA's 0 and 1 of a gripper command, as motor angles in radians.
_COMMAND_RADIANS = (-0.6213, 1.4910)


@dataclasses.dataclass(frozen=True)
class AlohaInputs:
    """From ALOHA's `images` (by camera), `state` and `actions` to the model's.

    `cam_high` is always needed, the wrist cameras where the robot has them.
    """

    # Translate joints and grippers to the convention of the base models' data.
    adapt_to_pi: bool = True
    # ALOHA's camera → the model's camera slot.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(CAMERAS))

    def __call__(self, data: Data) -> Data:
        who = "AlohaInputs"
        images = require_mapping(data, "images", who)
        known = {*self.cameras, SPARE_CAMERA}
        if unexpected := images.keys() - known:
            raise ValueError(
                f"{who}: camera {listed(unexpected)} in 'images' is not expected; ALOHA has "
                f"{listed(known)}."
            )
        if REQUIRED_CAMERA not in images:
            raise missing_key(REQUIRED_CAMERA, images, f"{who}, 'images'")
        if SPARE_CAMERA in images and SPARE_CAMERA not in self.cameras:
            _warn_spare_camera()
        state = require_vector(data, "state", DIM, who)
        actions = optional_actions(data, DIM, who)
        if self.adapt_to_pi:
            state = _state_to_model(state)
            actions = None if actions is None else _actions_to_model(actions)
        present = {name: slot for name, slot in self.cameras.items() if name in images}
        return model_inputs(
            data,
            images=images,
            cameras=present,
            state=state,
            actions=actions,
            who=who,
            spare=(SPARE_CAMERA,),
        )


@dataclasses.dataclass(frozen=True)
class AlohaOutputs:
    """From the model's actions to ALOHA's."""

    # As in `AlohaInputs`.
    adapt_to_pi: bool = True

    def __call__(self, data: Data) -> Data:
        actions = first_actions(data, DIM, "AlohaOutputs")
        return {"actions": _actions_to_robot(actions) if self.adapt_to_pi else actions}


def make_aloha_example() -> Data:
    """A random observation in ALOHA's own keys, for tests and warm-up."""
    random = np.random.default_rng(0)
    cameras = (*CAMERAS, SPARE_CAMERA)
    return {
        "images": {
            name: random.integers(256, size=(3, 224, 224), dtype=np.uint8) for name in cameras
        },
        "state": random.uniform(0.0, 1.0, DIM).astype(np.float32),
        "prompt": "do something",
    }


@functools.cache
def _warn_spare_camera() -> None:
    logger.warning("ALOHA's camera %r is in no slot of the model; it is not used.", SPARE_CAMERA)


def _state_to_model(state: Float[np.ndarray, "*b 14"]) -> Float[np.ndarray, "*b 14"]:
    """A gripper: fraction of the fingers' distance → metres → motor angle → the model's 0 to 1."""
    metres = _spread(state[..., GRIPPERS], _FINGER_METRES)
    sine = (_HORN_RADIUS**2 + metres**2 - _ARM_LENGTH**2) / (2 * _HORN_RADIUS * metres)
    # A gripper reported as more than open would leave the linkage's reach.
    radians = np.arcsin(np.clip(sine, -1.0, 1.0))
    return _with_grippers(state, _fraction(radians, _MODEL_RADIANS))


def _actions_to_model(actions: Float[np.ndarray, "*b h 14"]) -> Float[np.ndarray, "*b h 14"]:
    """An action's gripper commands the motor's angle: in radians, counted from the model's 0."""
    radians = _spread(actions[..., GRIPPERS], _COMMAND_RADIANS)
    return _with_grippers(actions, radians - _MODEL_RADIANS[0])


def _actions_to_robot(actions: Float[np.ndarray, "*b h 14"]) -> Float[np.ndarray, "*b h 14"]:
    """The inverse of `_actions_to_model`."""
    radians = actions[..., GRIPPERS] + _MODEL_RADIANS[0]
    return _with_grippers(actions, _fraction(radians, _COMMAND_RADIANS))


def _with_grippers(values: np.ndarray, grippers: np.ndarray) -> np.ndarray:
    turned = _JOINT_SIGNS.astype(grippers.dtype) * values
    turned[..., GRIPPERS] = grippers
    return turned


def _fraction(values: np.ndarray, span: tuple[float, float]) -> np.ndarray:
    return (values - span[0]) / (span[1] - span[0])


def _spread(values: np.ndarray, span: tuple[float, float]) -> np.ndarray:
    return values * (span[1] - span[0]) + span[0]


@register("aloha")
@dataclasses.dataclass(frozen=True)
class LeRobotAlohaDataConfig(DataConfigFactory):
    """ALOHA data sets in LeRobot format."""

    robot: ClassVar[str] = "ALOHA"

    # Train on joint positions relative to the state at the start of the chunk; grippers absolute.
    use_delta_joint_actions: bool = True
    # Convert joints and grippers to the conventions of the released models.
    adapt_to_pi: bool = True
    # Training only: random errors of the joints in the state (std in radians), so that relative
    # actions learn to correct an error instead of keeping it.
    state_noise: float = 0.0
    # The data set's keys for the robot's own.
    repack_transforms: tyro.conf.Suppress[Group] = Group(
        inputs=(
            RepackTransform(
                {
                    "images": {"cam_high": "observation.images.top"},
                    "state": "observation.state",
                    "actions": "action",
                }
            ),
        )
    )
    # The data set's columns that are read as chunks.
    action_sequence_keys: tuple[str, ...] = ("action",)
    # The robot's cameras and the model's slots for them.
    cameras: dict[str, str] = dataclasses.field(default_factory=lambda: dict(CAMERAS))
    # Control steps between the model's actions; the robot gets those between by interpolation.
    action_stride: int = 1

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        data_transforms = Group(
            inputs=(AlohaInputs(adapt_to_pi=self.adapt_to_pi, cameras=self.cameras),),
            outputs=(AlohaOutputs(adapt_to_pi=self.adapt_to_pi),),
        )
        if self.state_noise:
            data_transforms = data_transforms.push([PerturbState(self.state_noise, JOINTS)], [])
        if self.use_delta_joint_actions:
            data_transforms = data_transforms.push(
                [DeltaActions(JOINTS)], [AbsoluteActions(JOINTS)]
            )
        return dataclasses.replace(
            self.create_base_config(assets_dirs, model_config),
            repack_transforms=self.repack_transforms,
            data_transforms=data_transforms,
            action_sequence_keys=self.action_sequence_keys,
        ).with_action_stride(self.action_stride)
