"""DROID: a seven-joint Franka arm with a gripper, one camera from outside, one at the wrist."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from piston.config import DataConfig
from piston.models.configs import ModelConfig
from piston.robots import RobotDataConfig, RobotInputs
from piston.serialization import register
from piston.transforms import RepackTransform
from piston.transforms.actions import make_bool_mask

DROID = RobotInputs(
    name="DROID",
    cameras={
        "observation/exterior_image_1_left": "base_0_rgb",
        "observation/wrist_image_left": "left_wrist_0_rgb",
    },
    state={"observation/joint_position": 7, "observation/gripper_position": 1},
    action_dim=8,
)
# π0-FAST has one wrist slot, and a second one for a camera from outside.
_FAST_WRIST = {"observation/wrist_image_left": "wrist_0_rgb"}
FAST_DROID = dataclasses.replace(DROID, cameras={**DROID.cameras, **_FAST_WRIST})


@register("droid")
@dataclasses.dataclass(frozen=True)
class DroidDataConfig(RobotDataConfig):
    """DROID without a data set: how a released checkpoint is served."""

    robot = "DROID"
    inputs = DROID

    def robot_inputs(self, model_config: ModelConfig) -> RobotInputs:
        return FAST_DROID if "wrist_0_rgb" in model_config.cameras else DROID


@register("lerobot_droid")
@dataclasses.dataclass(frozen=True)
class LeRobotDROIDDataConfig(DroidDataConfig):
    """DROID data sets in LeRobot format; their actions are joint velocities."""

    repack = RepackTransform(
        {
            "observation/exterior_image_1_left": "exterior_image_1_left",
            "observation/wrist_image_left": "wrist_image_left",
            "observation/joint_position": "joint_position",
            "observation/gripper_position": "gripper_position",
            "actions": "actions",
        }
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

    repack = RepackTransform(
        {
            "observation/exterior_image_1_left": "observation/image",
            "observation/wrist_image_left": "observation/wrist_image",
            "observation/joint_position": "observation/joint_position",
            "observation/gripper_position": "observation/gripper_position",
            "actions": "actions",
        }
    )

    # The folder with the RLDS files.
    rlds_data_dir: tyro.conf.Suppress[str | None] = None
    # What the actions are.
    action_space: Literal["joint_position", "joint_velocity"] = "joint_position"
    # The mixture.
    datasets: tyro.conf.Suppress[tuple[RLDSDataset, ...]] = ()

    def relative_actions(self) -> Sequence[bool] | None:
        return make_bool_mask(7, -1) if self.action_space == "joint_position" else None

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        return dataclasses.replace(
            super().create(assets_dirs, model_config),
            not_readable=(
                "RLDS files are not read. Convert them to LeRobot format, and train on that with "
                "the preset pi05_droid_finetune and --data.repo-id."
            ),
        )
