"""Robots that are tables (DROID, UR5, LIBERO, MetaWorld), and random samples without a robot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from piston.config import DataConfig, DataConfigFactory
from piston.models.configs import ModelConfig
from piston.robots import RobotDataConfig, RobotInputs
from piston.serialization import register


def _joints(count: int) -> tuple[str, ...]:
    return tuple(f"joint_{i}" for i in range(count))


# A seven-joint Franka arm with a gripper, a camera from outside and one at the wrist.
DROID = RobotInputs(
    name="DROID",
    cameras={
        "observation/exterior_image_1_left": "base_0_rgb",
        "observation/wrist_image_left": "left_wrist_0_rgb",
    },
    state={
        "observation/joint_position": _joints(7),
        "observation/gripper_position": ("gripper",),
    },
    actions={"actions": (*_joints(7), "gripper")},
)
# π0-FAST has one wrist slot, and a second one for a camera from outside.
_FAST_CAMERAS = {**DROID.cameras, "observation/wrist_image_left": "wrist_0_rgb"}

# A six-joint arm with a gripper, a camera from outside and one at the wrist.
UR5 = RobotInputs(
    name="UR5",
    cameras={"base_rgb": "base_0_rgb", "wrist_rgb": "left_wrist_0_rgb"},
    state={"joints": _joints(6), "gripper": ("gripper",)},
    actions={"actions": (*_joints(6), "gripper")},
    columns={"base_rgb": "image", "wrist_rgb": "wrist_image"},
    relative=_joints(6),
)

# A simulated Franka arm. State: the end effector's position 3 and rotation 3 (axis-angle), fingers
# 2. Action: its motion 6, gripper 1. The public data set has its images rotated by 180°; whoever
# renders for a policy that was trained on it must rotate them as well. Nothing is rotated here.
_POSE = ("x", "y", "z", "rx", "ry", "rz")
LIBERO = RobotInputs(
    name="LIBERO",
    cameras={"observation/image": "base_0_rgb", "observation/wrist_image": "left_wrist_0_rgb"},
    state={"observation/state": (*_POSE, "finger_0", "finger_1")},
    actions={"actions": (*_POSE, "gripper")},
    columns={
        "observation/image": "image",
        "observation/wrist_image": "wrist_image",
        "observation/state": "state",
    },
)

# A simulated Sawyer arm that is moved by its hand, with a camera above the table. State: the hand's
# position 3, the gripper's opening 1. Action: the hand's motion 3, the gripper's force 1.
METAWORLD = RobotInputs(
    name="MetaWorld",
    cameras={"corner4": "base_0_rgb"},
    state={"state": ("x", "y", "z", "gripper")},
    actions={"actions": ("x", "y", "z", "gripper")},
    images="images",
    columns={
        "corner4": "observation.images.corner4",
        "state": "observation.state",
        "actions": "action",
    },
)


@register("droid")
@dataclasses.dataclass(frozen=True)
class DroidDataConfig(RobotDataConfig):
    """DROID without a data set: how a released checkpoint is served."""

    inputs = DROID

    def robot_inputs(self, model_config: ModelConfig) -> RobotInputs:
        if "wrist_0_rgb" not in model_config.cameras:
            return self.inputs
        return dataclasses.replace(self.inputs, cameras=_FAST_CAMERAS)


@register("lerobot_droid")
@dataclasses.dataclass(frozen=True)
class LeRobotDROIDDataConfig(DroidDataConfig):
    """DROID data sets in LeRobot format; their actions are joint velocities."""

    inputs = dataclasses.replace(
        DROID,
        columns={key: key.removeprefix("observation/") for key in (*DROID.cameras, *DROID.state)},
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

    It describes the pipeline, so that checkpoints trained on it can be served and fine-tuned. RLDS
    files themselves are not read: convert them to LeRobot format to train on them.
    """

    inputs = dataclasses.replace(
        DROID,
        columns={
            "observation/exterior_image_1_left": "observation/image",
            "observation/wrist_image_left": "observation/wrist_image",
        },
    )

    # The folder with the RLDS files.
    rlds_data_dir: tyro.conf.Suppress[str | None] = None
    # What the actions are.
    action_space: Literal["joint_position", "joint_velocity"] = "joint_position"
    # The mixture.
    datasets: tyro.conf.Suppress[tuple[RLDSDataset, ...]] = ()

    def robot_inputs(self, model_config: ModelConfig) -> RobotInputs:
        relative = _joints(7) if self.action_space == "joint_position" else ()
        return dataclasses.replace(super().robot_inputs(model_config), relative=relative)

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        return dataclasses.replace(
            super().create(assets_dirs, model_config),
            not_readable=(
                "RLDS files are not read. Convert them to LeRobot format, and train on that with "
                "the preset pi05_droid_finetune and --data.repo-id."
            ),
        )


@register("ur5")
@dataclasses.dataclass(frozen=True)
class LeRobotUR5DataConfig(RobotDataConfig):
    """UR5 data sets in LeRobot format."""

    inputs = UR5


@register("libero")
@dataclasses.dataclass(frozen=True)
class LeRobotLiberoDataConfig(RobotDataConfig):
    """LIBERO data sets in LeRobot format."""

    inputs = LIBERO

    # Subtract the state from the actions once more, as π0's released weights expect. LIBERO's own
    # actions are relative already; models trained since leave this off.
    extra_delta_transform: bool = False

    def robot_inputs(self, model_config: ModelConfig) -> RobotInputs:  # noqa: ARG002
        relative = _POSE if self.extra_delta_transform else ()
        return dataclasses.replace(self.inputs, relative=relative)


@register("metaworld")
@dataclasses.dataclass(frozen=True)
class LeRobotMetaworldDataConfig(RobotDataConfig):
    """MetaWorld data sets in LeRobot format, as `piston record` writes them."""

    inputs = METAWORLD


@register("fake")
@dataclasses.dataclass(frozen=True)
class FakeDataConfig(DataConfigFactory):
    """Random samples in the model's own shapes; needs no files and no statistics."""

    robot = "fake"

    # Only a name; nothing is read.
    repo_id: str = "fake"

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:  # noqa: ARG002
        return DataConfig(repo_id=self.repo_id, fake=True, extra_datasets=self.extra_datasets)
