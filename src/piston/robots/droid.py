"""DROID: a seven-joint Franka arm with a gripper, one camera from outside, one at the wrist.

state, action   joints 7, gripper 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import tyro

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

NUM_JOINTS = 7
DIM = 8
# DROID's own key → the model's camera slot.
CAMERAS: Mapping[str, str] = {
    "observation/exterior_image_1_left": "base_0_rgb",
    "observation/wrist_image_left": "left_wrist_0_rgb",
}
# π0-FAST has one wrist slot, and a second one for a camera from outside.
FAST_CAMERAS: Mapping[str, str] = {**CAMERAS, "observation/wrist_image_left": "wrist_0_rgb"}


@dataclasses.dataclass(frozen=True)
class DroidInputs:
    """From DROID's `observation/…` keys and `actions` to the model's."""

    # DROID's image key → the model's camera slot; all of them are needed.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(CAMERAS))

    def __call__(self, data: Data) -> Data:
        who = "DroidInputs"
        state = joints_and_gripper(
            data,
            "observation/joint_position",
            "observation/gripper_position",
            NUM_JOINTS,
            who,
        )
        return model_inputs(
            data,
            images=data,
            cameras=self.cameras,
            state=state,
            actions=optional_actions(data, DIM, who),
            who=who,
        )


@dataclasses.dataclass(frozen=True)
class DroidOutputs:
    """The first eight of the model's action dimensions."""

    def __call__(self, data: Data) -> Data:
        return {"actions": first_actions(data, DIM, "DroidOutputs")}


def make_droid_example() -> Data:
    """A random observation in DROID's own keys, for tests and warm-up."""
    random = np.random.default_rng(0)
    return {
        **{key: random.integers(256, size=(224, 224, 3), dtype=np.uint8) for key in CAMERAS},
        "observation/joint_position": random.uniform(-1.0, 1.0, NUM_JOINTS).astype(np.float32),
        "observation/gripper_position": random.uniform(0.0, 1.0, 1).astype(np.float32),
        "prompt": "do something",
    }


ActionSpace = Literal["joint_position", "joint_velocity"]


@register("droid")
@dataclasses.dataclass(frozen=True)
class DroidDataConfig(DataConfigFactory):
    """DROID without a data set: how a released checkpoint is served."""

    robot: ClassVar[str] = "DROID"

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        cameras = FAST_CAMERAS if "wrist_0_rgb" in model_config.cameras else CAMERAS
        return dataclasses.replace(
            self.create_base_config(assets_dirs, model_config),
            data_transforms=Group(
                inputs=(DroidInputs(cameras=dict(cameras)),), outputs=(DroidOutputs(),)
            ),
        )


@register("lerobot_droid")
@dataclasses.dataclass(frozen=True)
class LeRobotDROIDDataConfig(DroidDataConfig):
    """DROID data sets in LeRobot format; their actions are joint velocities."""

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        repack = RepackTransform(
            {
                "observation/exterior_image_1_left": "exterior_image_1_left",
                "observation/wrist_image_left": "wrist_image_left",
                "observation/joint_position": "joint_position",
                "observation/gripper_position": "gripper_position",
                "actions": "actions",
            }
        )
        return dataclasses.replace(
            super().create(assets_dirs, model_config),
            repack_transforms=Group(inputs=(repack,)),
        )


@register("rlds_dataset")
@dataclasses.dataclass(frozen=True)
class RLDSDataset:
    """One part of a mixture in RLDS format."""

    name: str
    version: str
    weight: float
    # Which ranges of which episodes to use.
    filter_dict_path: str | None = None


@register("rlds_droid")
@dataclasses.dataclass(frozen=True)
class RLDSDroidDataConfig(DroidDataConfig):
    """The full DROID set in RLDS format.

    Describes the pipeline, so that checkpoints trained on it are served and fine-tuned. RLDS files
    themselves are not read here: convert them to LeRobot format to train on them.
    """

    # The folder with the RLDS files.
    rlds_data_dir: tyro.conf.Suppress[str | None] = None
    # What the actions are.
    action_space: ActionSpace = "joint_position"
    # The mixture.
    datasets: tyro.conf.Suppress[tuple[RLDSDataset, ...]] = ()

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        repack = RepackTransform(
            {
                "observation/exterior_image_1_left": "observation/image",
                "observation/wrist_image_left": "observation/wrist_image",
                "observation/joint_position": "observation/joint_position",
                "observation/gripper_position": "observation/gripper_position",
                "actions": "actions",
            }
        )
        config = super().create(assets_dirs, model_config)
        data_transforms = config.data_transforms
        if self.action_space == "joint_position":
            joints = make_bool_mask(7, -1)
            data_transforms = data_transforms.push(
                [DeltaActions(joints)], [AbsoluteActions(joints)]
            )
        return dataclasses.replace(
            config,
            repack_transforms=Group(inputs=(repack,)),
            data_transforms=data_transforms,
            not_readable=(
                "RLDS files are not read. Convert them to LeRobot format, and train on that with "
                "the preset pi05_droid_finetune and --data.repo-id."
            ),
        )
