"""The closed form against MuJoCo's own forward kinematics."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("gym_aloha", reason="needs the extra `sim`")
import mujoco
from gym_aloha.constants import START_ARM_POSE

from piston.sim.aloha import load_model
from piston.sim.aloha_experts import LEFT, RIGHT, joints_for

MODEL = "bimanual_viperx_transfer_cube.xml"
TIP = 0.135  # finger tips, along the gripper's x axis


def _tip_and_axes(side: str, joints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    model = load_model(MODEL)
    data = mujoco.MjData(model)
    first = 0 if side == "left" else 8
    data.qpos[:16] = START_ARM_POSE
    data.qpos[first : first + 6] = joints
    mujoco.mj_kinematics(model, data)
    body = data.body(f"vx300s_{side}/gripper_link")
    axes = np.array(body.xmat).reshape(3, 3)
    return np.array(body.xpos) + TIP * axes[:, 0], axes


@given(
    st.sampled_from(["left", "right"]),
    st.floats(-0.1, 0.1),
    st.floats(0.4, 0.6),
    st.floats(0.05, 0.2),
    st.floats(-0.4, 0.4),
    st.floats(0.0, 1.2),
    st.floats(-1.5, 1.5),
)
def test_the_gripper_is_where_it_was_asked_to_be(side, x, y, z, yaw, pitch, roll):
    arm = LEFT if side == "left" else RIGHT
    joints = joints_for(arm, (x, y, z), yaw, pitch, roll)
    tip, axes = _tip_and_axes(side, joints)
    np.testing.assert_allclose(tip, (x, y, z), atol=1e-5)
    # Straight down the gripper's axis, as seen from the arm.
    forwards = arm.facing * np.cos(yaw) * np.cos(pitch), arm.facing * np.sin(yaw) * np.cos(pitch)
    np.testing.assert_allclose(axes[:, 0], (*forwards, -np.sin(pitch)), atol=1e-5)
    # How far the fingers' line is turned out of the horizontal.
    np.testing.assert_allclose(axes[2, 1], np.cos(pitch) * np.sin(roll), atol=1e-5)


def test_the_pose_at_rest_is_found_again():
    tip, _ = _tip_and_axes("left", np.array(START_ARM_POSE[:6]))
    joints = joints_for(LEFT, tuple(tip), pitch=-0.1)
    np.testing.assert_allclose(joints, START_ARM_POSE[:6], atol=1e-4)


def test_out_of_reach_is_said():
    with pytest.raises(ValueError, match="out of reach"):
        joints_for(LEFT, (0.4, 0.5, 0.2))
