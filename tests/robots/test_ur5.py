"""UR5: joints and gripper become one state."""

import numpy as np

from piston.robots.ur5 import UR5Inputs, make_ur5_example


def test_joints_then_gripper():
    data = {**make_ur5_example(), "joints": np.arange(6.0), "gripper": [9.0]}
    seen = UR5Inputs()(data)
    np.testing.assert_array_equal(seen["state"], [0, 1, 2, 3, 4, 5, 9])
    np.testing.assert_array_equal(seen["image"]["base_0_rgb"], data["base_rgb"])
    np.testing.assert_array_equal(seen["image"]["left_wrist_0_rgb"], data["wrist_rgb"])
