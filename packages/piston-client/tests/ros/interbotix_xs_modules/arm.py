"""Stands in for an arm: it is where it was told to go, and all commands go to a file."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

LOG = Path(os.environ["FAKE_ARM_LOG"])


class InterbotixManipulatorXS:
    def __init__(self, robot_model, group_name, gripper_name, robot_name, init_node):
        assert (robot_model, group_name, gripper_name) == ("vx300s", "arm", "gripper")
        assert init_node == (robot_name == "puppet_left")
        self._name = robot_name
        # Six joints, the gripper's motor, two fingers.
        self._position = [0.0] * 7 + [0.03822, -0.03822]
        self.dxl = SimpleNamespace(
            joint_states=SimpleNamespace(position=self._position),
            robot_set_operating_modes=lambda *words: self._log("mode", words),
            robot_torque_enable=lambda *words: self._log("torque", words),
        )
        self.arm = SimpleNamespace(set_joint_positions=self._move)
        publisher = SimpleNamespace(publish=lambda message: self._log(message.name, message.cmd))
        self.gripper = SimpleNamespace(core=SimpleNamespace(pub_single=publisher))

    def _move(self, joints, blocking):
        assert not blocking
        self._position[:6] = joints
        self._log("joints", joints)

    def _log(self, kind, value):
        with LOG.open("a", encoding="utf-8") as file:
            file.write(json.dumps([self._name, kind, value]) + "\n")
