"""What DROID alone has: two keys for one state, and other slots on π0-FAST."""

import numpy as np
import pytest

from piston.models.configs import Pi0FASTConfig
from piston.robots.droid import FAST_CAMERAS, DroidInputs, make_droid_example


@pytest.mark.parametrize("leading", [(), (2,)])
@pytest.mark.parametrize("gripper_axes", [(), (1,)], ids=["number", "vector"])
def test_gripper_may_be_a_number_or_a_vector_of_one(leading, gripper_axes):
    data = {
        "observation/exterior_image_1_left": np.zeros((*leading, 4, 4, 3), np.uint8),
        "observation/wrist_image_left": np.zeros((*leading, 4, 4, 3), np.uint8),
        "observation/joint_position": np.zeros((*leading, 7)),
        "observation/gripper_position": np.full((*leading, *gripper_axes), 0.5),
    }
    state = DroidInputs()(data)["state"]
    assert state.shape == (*leading, 8)
    assert np.all(state[..., 7] == 0.5)


def test_plain_number_as_gripper():
    data = {**make_droid_example(), "observation/gripper_position": 0.25}
    assert DroidInputs()(data)["state"][-1] == 0.25


def test_batch_axes_of_joints_and_gripper_must_agree():
    data = {**make_droid_example(), "observation/gripper_position": np.zeros((2, 1))}
    with pytest.raises(ValueError, match="batch axes must agree"):
        DroidInputs()(data)


def test_slots_of_fast_models():
    slots = DroidInputs(cameras=FAST_CAMERAS)(make_droid_example())["image"].keys()
    assert slots == {"base_0_rgb", "wrist_0_rgb"}
    assert slots <= set(Pi0FASTConfig().cameras)
