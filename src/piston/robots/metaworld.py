"""MetaWorld: a simulated Sawyer arm that is moved by its hand, one camera over the table.

state    the hand's position 3, the gripper's opening 1
action   the hand's motion 3, the gripper's force 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from piston.config import DataConfig, DataConfigFactory
from piston.models.configs import ModelConfig
from piston.robots import first_actions, model_inputs, optional_actions
from piston.serialization import register
from piston.transforms.base import Data, Group, require_mapping, require_vector
from piston.transforms.keys import RepackTransform

DIM = 4
# The robot's name for the camera → the model's slot.
CAMERAS: Mapping[str, str] = {"corner4": "base_0_rgb"}


@dataclasses.dataclass(frozen=True)
class MetaworldInputs:
    """From `images` (by camera), `state` and `actions` to the model's."""

    # The robot's camera → the model's camera slot; all of them are needed.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(CAMERAS))

    def __call__(self, data: Data) -> Data:
        who = "MetaworldInputs"
        return model_inputs(
            data,
            images=require_mapping(data, "images", who),
            cameras=self.cameras,
            state=require_vector(data, "state", DIM, who),
            actions=optional_actions(data, DIM, who),
            who=who,
        )


@dataclasses.dataclass(frozen=True)
class MetaworldOutputs:
    """The first four of the model's action dimensions."""

    def __call__(self, data: Data) -> Data:
        return {"actions": first_actions(data, DIM, "MetaworldOutputs")}


def make_metaworld_example() -> Data:
    """A random observation in the robot's own keys, for tests and warm-up."""
    random = np.random.default_rng(0)
    return {
        "images": {
            name: random.integers(256, size=(224, 224, 3), dtype=np.uint8) for name in CAMERAS
        },
        "state": random.uniform(0.0, 1.0, DIM).astype(np.float32),
        "prompt": "do something",
    }


@register("metaworld")
@dataclasses.dataclass(frozen=True)
class LeRobotMetaworldDataConfig(DataConfigFactory):
    """MetaWorld data sets in LeRobot format, as `piston record` writes them."""

    robot: ClassVar[str] = "MetaWorld"

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        repack = RepackTransform(
            {
                "images": {name: f"observation.images.{name}" for name in CAMERAS},
                "state": "observation.state",
                "actions": "action",
            }
        )
        return dataclasses.replace(
            self.create_base_config(assets_dirs, model_config),
            repack_transforms=Group(inputs=(repack,)),
            data_transforms=Group(inputs=(MetaworldInputs(),), outputs=(MetaworldOutputs(),)),
            action_sequence_keys=("action",),
        )
