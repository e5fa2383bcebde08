"""LIBERO: a simulated Franka arm, one camera from outside, one at the wrist.

    state    end effector's position 3, its rotation 3 (axis-angle), fingers 2
    action   its motion 6, gripper 1

The public data set shows the images turned by 180°; whoever renders for a policy trained on it
turns them likewise. Nothing is turned here.
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
from piston.transforms.actions import AbsoluteActions, DeltaActions, make_bool_mask
from piston.transforms.base import Data, Group, require_vector
from piston.transforms.keys import RepackTransform

STATE_DIM = 8
ACTION_DIM = 7
# LIBERO's own key → the model's camera slot.
CAMERAS: Mapping[str, str] = {
    "observation/image": "base_0_rgb",
    "observation/wrist_image": "left_wrist_0_rgb",
}


@dataclasses.dataclass(frozen=True)
class LiberoInputs:
    """From LIBERO's `observation/…` keys and `actions` to the model's."""

    # LIBERO's image key → the model's camera slot; all of them are needed.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(CAMERAS))

    def __call__(self, data: Data) -> Data:
        who = "LiberoInputs"
        state = require_vector(data, "observation/state", STATE_DIM, who)
        return model_inputs(
            data,
            images=data,
            cameras=self.cameras,
            state=state,
            actions=optional_actions(data, ACTION_DIM, who),
            who=who,
        )


@dataclasses.dataclass(frozen=True)
class LiberoOutputs:
    """The first seven of the model's action dimensions."""

    def __call__(self, data: Data) -> Data:
        return {"actions": first_actions(data, ACTION_DIM, "LiberoOutputs")}


def make_libero_example() -> Data:
    """A random observation in LIBERO's own keys, for tests and warm-up."""
    random = np.random.default_rng(0)
    return {
        **{key: random.integers(256, size=(224, 224, 3), dtype=np.uint8) for key in CAMERAS},
        "observation/state": random.uniform(-1.0, 1.0, STATE_DIM).astype(np.float32),
        "prompt": "do something",
    }


@register("libero")
@dataclasses.dataclass(frozen=True)
class LeRobotLiberoDataConfig(DataConfigFactory):
    """LIBERO data sets in LeRobot format."""

    robot: ClassVar[str] = "LIBERO"

    # Subtract the state from the actions once more, as π0's released weights expect. LIBERO's own
    # actions are relative already; models trained since leave this off.
    extra_delta_transform: bool = False

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        repack = RepackTransform(
            {
                "observation/image": "image",
                "observation/wrist_image": "wrist_image",
                "observation/state": "state",
                "actions": "actions",
            }
        )
        data_transforms = Group(inputs=(LiberoInputs(),), outputs=(LiberoOutputs(),))
        if self.extra_delta_transform:
            pose = make_bool_mask(6, -1)
            data_transforms = data_transforms.push([DeltaActions(pose)], [AbsoluteActions(pose)])
        return dataclasses.replace(
            self.create_base_config(assets_dirs, model_config),
            repack_transforms=Group(inputs=(repack,)),
            data_transforms=data_transforms,
        )
