"""ALOHA: two six-joint arms with grippers, up to four cameras.

    state, action   left arm 6, left gripper 1, right arm 6, right gripper 1

The base models were trained on ALOHA data of another convention than that of the public ALOHA
software: two joints of each arm turn the other way, and grippers are measured by the motor's angle
instead of the fingers' distance. `adapt_to_pi` converts between them. No other robot needs this.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tyro
from jaxtyping import Float

from piston.config import DataConfig
from piston.logs import warn_once
from piston.models.configs import ModelConfig
from piston.robots import RobotDataConfig, RobotInputs, fraction, spread
from piston.serialization import register
from piston.transforms import Data, Group, RepackTransform
from piston.transforms.actions import (
    InterpolateActions,
    PerturbState,
    SubsampleActions,
    make_bool_mask,
)

logger = logging.getLogger(__name__)

DIM = 14
GRIPPERS = (6, 13)
# What delta actions are relative in: joints, not grippers.
JOINTS = make_bool_mask(6, -1, 6, -1)
# ALOHA's own name → the model's camera slot.
CAMERAS: Mapping[str, str] = {
    "cam_high": "base_0_rgb",
    "cam_left_wrist": "left_wrist_0_rgb",
    "cam_right_wrist": "right_wrist_0_rgb",
}
# Recorded by the robot; the models have no slot for it.
UNUSED_CAMERA = "cam_low"

_ARM = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
# Both arms, left first, as ALOHA's recorder concatenates them.
NAMES = tuple(f"{side}_{joint}" for side in ("left", "right") for joint in _ARM)
ALOHA = RobotInputs(
    "ALOHA", CAMERAS, {"state": NAMES}, {"actions": NAMES}, "images", unused=(UNUSED_CAMERA,)
)
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

    `cam_high` is always needed; the other cameras may be absent.
    """

    # Convert joints and grippers to the convention of the base models' data.
    adapt_to_pi: bool = True
    # ALOHA's camera → the model's camera slot.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(CAMERAS))

    def __call__(self, data: Data) -> Data:
        seen = _with_cameras(self.cameras)(data)
        if UNUSED_CAMERA in data["images"] and UNUSED_CAMERA not in self.cameras:
            message = "ALOHA's camera %r has no slot in the model; it is not used."
            warn_once(logger, "unused camera", message, UNUSED_CAMERA)
        if self.adapt_to_pi:
            seen["state"] = _state_to_model(seen["state"])
            if "actions" in seen:
                seen["actions"] = _actions_to_model(seen["actions"])
        return seen


@dataclasses.dataclass(frozen=True)
class AlohaOutputs:
    """From the model's actions to ALOHA's."""

    # As in `AlohaInputs`.
    adapt_to_pi: bool = True

    def __call__(self, data: Data) -> Data:
        actions = ALOHA.outputs(data)["actions"]
        return {"actions": _actions_to_robot(actions) if self.adapt_to_pi else actions}


def _with_cameras(cameras: Mapping[str, str]) -> RobotInputs:
    optional = tuple(name for name in cameras if name != "cam_high")
    return dataclasses.replace(ALOHA, cameras=cameras, optional=optional)


def make_aloha_example() -> Data:
    """Return a random observation in ALOHA's own keys, for tests and to try a policy."""
    random, cameras = np.random.default_rng(0), (*CAMERAS, UNUSED_CAMERA)
    images = {name: random.integers(256, size=(3, 224, 224), dtype=np.uint8) for name in cameras}
    state = random.uniform(0.0, 1.0, DIM).astype(np.float32)
    return {"images": images, "state": state, "prompt": "do something"}


def _state_to_model(state: Float[np.ndarray, "*b 14"]) -> Float[np.ndarray, "*b 14"]:
    """Convert grippers: fraction of the fingers' distance → metres → motor angle → 0 to 1."""
    metres = spread(state[..., GRIPPERS], _FINGER_METRES)
    sine = (_HORN_RADIUS**2 + metres**2 - _ARM_LENGTH**2) / (2 * _HORN_RADIUS * metres)
    # A gripper that is reported as more than open is beyond the linkage's reach.
    radians = np.arcsin(np.clip(sine, -1.0, 1.0))
    return _with_grippers(state, fraction(radians, _MODEL_RADIANS))


def _actions_to_model(actions: Float[np.ndarray, "*b h 14"]) -> Float[np.ndarray, "*b h 14"]:
    """Convert gripper commands to the motor's angle in radians, counted from the model's 0."""
    radians = spread(actions[..., GRIPPERS], _COMMAND_RADIANS)
    return _with_grippers(actions, radians - _MODEL_RADIANS[0])


def _actions_to_robot(actions: Float[np.ndarray, "*b h 14"]) -> Float[np.ndarray, "*b h 14"]:
    """Invert `_actions_to_model`."""
    radians = actions[..., GRIPPERS] + _MODEL_RADIANS[0]
    return _with_grippers(actions, fraction(radians, _COMMAND_RADIANS))


def _with_grippers(values: np.ndarray, grippers: np.ndarray) -> np.ndarray:
    """Turn the joints that differ, and set the grippers."""
    turned = _JOINT_SIGNS.astype(grippers.dtype) * values
    turned[..., GRIPPERS] = grippers
    return turned


def repack_aloha(**cameras: str) -> Group:
    """Return the renaming of a data set's keys, of which `cameras` names the images."""
    keys = {"images": cameras, "state": "observation.state", "actions": "action"}
    return Group([RepackTransform(keys)])


@register("aloha")
@dataclasses.dataclass(frozen=True)
class LeRobotAlohaDataConfig(RobotDataConfig):
    """ALOHA data sets in LeRobot format."""

    inputs = ALOHA

    # Train on joint positions relative to the state at the start of the chunk; grippers absolute.
    use_delta_joint_actions: bool = True
    # Convert joints and grippers to the conventions of the released models.
    adapt_to_pi: bool = True
    # Training only: noise on the joints of the state (std in radians), so that relative actions
    # learn to correct an error instead of keeping it.
    state_noise: float = 0.0
    # The data set's keys for the robot's own.
    repack_transforms: tyro.conf.Suppress[Group] = repack_aloha(cam_high="observation.images.top")
    # The data set's columns that are read as chunks.
    action_sequence_keys: tuple[str, ...] = ("action",)
    # The robot's cameras and the model's slots for them.
    cameras: dict[str, str] = dataclasses.field(default_factory=lambda: dict(CAMERAS))
    # Control steps between the model's actions; the robot gets those between by interpolation.
    action_stride: int = 1

    def robot_inputs(self, model_config: ModelConfig) -> RobotInputs:  # noqa: ARG002
        relative = tuple(itertools.compress(NAMES, JOINTS)) if self.use_delta_joint_actions else ()
        return dataclasses.replace(_with_cameras(self.cameras), relative=relative)

    def transforms(self, table: RobotInputs) -> Group:  # noqa: ARG002
        stride, group = self.action_stride, Group()
        if stride != 1:
            group = Group([SubsampleActions(stride)], [InterpolateActions(stride)])
        inputs = AlohaInputs(self.adapt_to_pi, self.cameras)
        group = group.push([inputs], [AlohaOutputs(self.adapt_to_pi)])
        return group.push([PerturbState(self.state_noise, JOINTS)]) if self.state_noise else group

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        return dataclasses.replace(
            super().create(assets_dirs, model_config),
            repack_transforms=self.repack_transforms,
            action_sequence_keys=self.action_sequence_keys,
            action_stride=self.action_stride,
        )
