"""What single robots have: two keys for one state, other slots on π0-FAST, fewer actions."""

import numpy as np
import pytest

from piston.models.configs import Pi0FASTConfig
from piston.robots import RobotInputs
from piston.robots.simple import DROID, LIBERO, METAWORLD, UR5, DroidDataConfig


@pytest.mark.parametrize("leading", [(), (2,)])
@pytest.mark.parametrize("gripper_axes", [(), (1,)], ids=["number", "vector"])
def test_gripper_may_be_a_number_or_a_vector_of_one(leading, gripper_axes):
    data = {
        "observation/exterior_image_1_left": np.zeros((*leading, 4, 4, 3), np.uint8),
        "observation/wrist_image_left": np.zeros((*leading, 4, 4, 3), np.uint8),
        "observation/joint_position": np.zeros((*leading, 7)),
        "observation/gripper_position": np.full((*leading, *gripper_axes), 0.5),
    }
    state = DROID(data)["state"]
    assert state.shape == (*leading, 8)
    assert np.all(state[..., 7] == 0.5)


def test_plain_number_as_gripper():
    data = {**DROID.example(), "observation/gripper_position": 0.25}
    assert DROID(data)["state"][-1] == 0.25


def test_batch_axes_of_joints_and_gripper_must_agree():
    data = {**DROID.example(), "observation/gripper_position": np.zeros((2, 1))}
    with pytest.raises(ValueError, match="batch axes must agree"):
        DROID(data)


def test_slots_of_fast_models():
    table = DroidDataConfig().robot_inputs(Pi0FASTConfig())
    slots = table(DROID.example())["image"].keys()
    assert slots == {"base_0_rgb", "wrist_0_rgb"}
    assert slots <= set(Pi0FASTConfig().cameras)


def test_libero_images_reach_their_slots_unturned():
    example = LIBERO.example()
    images = LIBERO(example)["image"]
    np.testing.assert_array_equal(images["base_0_rgb"], example["observation/image"])
    np.testing.assert_array_equal(images["left_wrist_0_rgb"], example["observation/wrist_image"])


def test_libero_has_seven_actions_and_an_eight_dimensional_state():
    seen = LIBERO({**LIBERO.example(), "actions": np.zeros((10, 7))})
    assert seen["state"].shape == (8,)
    assert seen["actions"].shape == (10, 7)
    assert LIBERO.outputs({"actions": np.zeros((10, 32))})["actions"].shape == (10, 7)


def test_ur5_has_joints_then_gripper():
    data = {**UR5.example(), "joints": np.arange(6.0), "gripper": [9.0]}
    seen = UR5(data)
    np.testing.assert_array_equal(seen["state"], [0, 1, 2, 3, 4, 5, 9])
    np.testing.assert_array_equal(seen["image"]["base_0_rgb"], data["base_rgb"])
    np.testing.assert_array_equal(seen["image"]["left_wrist_0_rgb"], data["wrist_rgb"])


def test_columns_of_a_data_set_are_renamed():
    assert METAWORLD.repack(METAWORLD.columns).structure == {
        "images": {"corner4": "observation.images.corner4"},
        "state": "observation.state",
        "actions": "action",
    }
    assert UR5.repack(UR5.columns).structure == {
        "base_rgb": "image",
        "wrist_rgb": "wrist_image",
        "joints": "joints",
        "gripper": "gripper",
        "actions": "actions",
    }
    with pytest.raises(ValueError, match="'columns' names 'joint'; the robot has 'actions', 'joi"):
        RobotInputs("Arm", {}, {"joints": 1}, {"actions": 1}, columns={"joint": "state"})
