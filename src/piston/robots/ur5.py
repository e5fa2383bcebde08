"""UR5: a six-joint arm with a gripper, one camera from outside, one at the wrist.

state, action   joints 6, gripper 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from piston.config import DataConfig, DataConfigFactory
from piston.models.configs import ModelConfig
from piston.robots import (
    first_actions,
    joints_and_gripper,
    model_inputs,
    optional_actions,
)
from piston.serialization import register
from piston.transforms.actions import AbsoluteActions, DeltaActions, make_bool_mask
from piston.transforms.base import Data, Group
from piston.transforms.keys import RepackTransform

NUM_JOINTS = 6
DIM = 7
# The robot's own key → the model's camera slot.
CAMERAS: Mapping[str, str] = {"base_rgb": "base_0_rgb", "wrist_rgb": "left_wrist_0_rgb"}


@dataclasses.dataclass(frozen=True)
class UR5Inputs:
    """From `joints`, `gripper`, `base_rgb`, `wrist_rgb` and `actions` to the model's."""

    # The robot's image key → the model's camera slot; all of them are needed.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(CAMERAS))

    def __call__(self, data: Data) -> Data:
        who = "UR5Inputs"
        return model_inputs(
            data,
            images=data,
            cameras=self.cameras,
            state=joints_and_gripper(data, "joints", "gripper", NUM_JOINTS, who),
            actions=optional_actions(data, DIM, who),
            who=who,
        )


@dataclasses.dataclass(frozen=True)
class UR5Outputs:
    """The first seven of the model's action dimensions."""

    def __call__(self, data: Data) -> Data:
        return {"actions": first_actions(data, DIM, "UR5Outputs")}


def make_ur5_example() -> Data:
    """A random observation in the robot's own keys, for tests and warm-up."""
    random = np.random.default_rng(0)
    return {
        **{key: random.integers(256, size=(224, 224, 3), dtype=np.uint8) for key in CAMERAS},
        "joints": random.uniform(-1.0, 1.0, NUM_JOINTS).astype(np.float32),
        "gripper": random.uniform(0.0, 1.0, 1).astype(np.float32),
        "prompt": "do something",
    }


@register("ur5")
@dataclasses.dataclass(frozen=True)
class LeRobotUR5DataConfig(DataConfigFactory):
    """UR5 data sets in LeRobot format."""

    robot: ClassVar[str] = "UR5"

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        repack = RepackTransform(
            {
                "base_rgb": "image",
                "wrist_rgb": "wrist_image",
                "joints": "joints",
                "gripper": "gripper",
                "actions": "actions",
            }
        )
        joints = make_bool_mask(6, -1)
        return dataclasses.replace(
            self.create_base_config(assets_dirs, model_config),
            repack_transforms=Group(inputs=(repack,)),
            data_transforms=Group(inputs=(UR5Inputs(),), outputs=(UR5Outputs(),)).push(
                [DeltaActions(joints)], [AbsoluteActions(joints)]
            ),
        )
