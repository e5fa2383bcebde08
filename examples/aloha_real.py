"""Drive a real ALOHA (two ViperX 300s arms, ROS 1) with a served policy.

On the machine with the GPU, 10.0.0.5 (docs/serving.md adds a key and TLS):

    piston serve gs://openpi-assets/checkpoints/pi0_aloha_towel --preset pi0_aloha_towel \\
        --host 0.0.0.0

On the robot's computer, after the launch file of the ALOHA software:

    pip install piston-client
    python examples/aloha_real.py ws://10.0.0.5:8000 --prompt "fold the towel"

Needs `rospy`, `cv_bridge` and `interbotix_xs_modules`. The Python 3.8 of ROS Noetic on Ubuntu 20.04
works. Compare the names of the camera topics with `rostopic list`. Keep clear of the arms: they
move to the reset pose first.
"""

from __future__ import annotations

import argparse
import functools
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from piston_client import Client, RealTimeBroker, Runtime

HZ = 50.0
CAMERAS = {
    "cam_high": "/usb_cam_high/image_raw",
    "cam_left_wrist": "/usb_cam_left_wrist/image_raw",
    "cam_right_wrist": "/usb_cam_right_wrist/image_raw",
}
# ALOHA's 0 and 1 of a gripper: the measured distance of its fingers in metres, and the commanded
# angle of its motor in radians. The data set was recorded with the same numbers.
FINGER_METRES = (0.01844, 0.05800)
MOTOR_RADIANS = (-0.6213, 1.4910)
# Where the arms go before an episode, unless the policy's metadata say otherwise.
RESET_POSE = (0.0, -0.96, 1.16, 0.0, -0.3, 0.0)
RESET_SECONDS = 2.0
# An image that is older than this is an error: the robot would act on what is no longer true.
OLDEST_IMAGE = 0.5


class Aloha:
    """Two arms and three cameras, as `Runtime` needs them.

    state, action: left arm 6, left gripper 1, right arm 6, right gripper 1
    """

    def __init__(self, prompt: str, num_steps: int) -> None:
        import rospy
        from cv_bridge import CvBridge
        from interbotix_xs_modules.arm import InterbotixManipulatorXS
        from interbotix_xs_msgs.msg import JointSingleCommand
        from sensor_msgs.msg import Image

        self._prompt, self._num_steps, self._step = prompt, num_steps, 0
        self.reset_pose = np.array(RESET_POSE)
        self._command, self._bridge = JointSingleCommand, CvBridge()
        self._arms = [
            InterbotixManipulatorXS(
                robot_model="vx300s",
                group_name="arm",
                gripper_name="gripper",
                robot_name=name,
                init_node=first,
            )
            for name, first in (("puppet_left", True), ("puppet_right", False))
        ]
        for arm in self._arms:
            arm.dxl.robot_set_operating_modes("group", "arm", "position")
            arm.dxl.robot_set_operating_modes("single", "gripper", "current_based_position")
            arm.dxl.robot_torque_enable("group", "arm", True)
            arm.dxl.robot_torque_enable("single", "gripper", True)
        self._images: dict[str, tuple[float, Any]] = {}
        for camera, topic in CAMERAS.items():
            rospy.Subscriber(topic, Image, functools.partial(self._keep_image, camera))
        self._wait_for_cameras()

    def reset(self) -> None:
        """Move both arms slowly to the reset pose and open the grippers."""
        start = self.state()
        goal = np.concatenate([self.reset_pose, [1.0]] * 2)
        for share in np.linspace(0.0, 1.0, round(RESET_SECONDS * HZ)):
            self.apply_action((1 - share) * start + share * goal)
            time.sleep(1 / HZ)
        self._step = 0

    def get_observation(self) -> dict[str, Any]:
        images = {}
        for camera, (received, message) in self._images.items():
            if (age := time.monotonic() - received) > OLDEST_IMAGE:
                raise RuntimeError(f"The newest image of {camera} is {age:.1f} s old.")
            images[camera] = self._bridge.imgmsg_to_cv2(message, desired_encoding="rgb8")
        return {"images": images, "state": self.state(), "prompt": self._prompt}

    def state(self) -> np.ndarray:
        parts = []
        for arm in self._arms:
            # Six joints, the gripper's motor, then its fingers' distance.
            position = arm.dxl.joint_states.position
            low, high = FINGER_METRES
            parts.append([*position[:6], (position[7] - low) / (high - low)])
        return np.concatenate(parts).astype(np.float32)

    def apply_action(self, action: np.ndarray) -> None:
        for arm, target in zip(self._arms, np.split(action, 2)):
            arm.arm.set_joint_positions(target[:6].tolist(), blocking=False)
            low, high = MOTOR_RADIANS
            radians = low + float(np.clip(target[6], 0.0, 1.0)) * (high - low)
            arm.gripper.core.pub_single.publish(self._command(name="gripper", cmd=radians))
        self._step += 1

    def is_done(self) -> bool:
        return self._step >= self._num_steps

    def _keep_image(self, camera: str, message: Any) -> None:
        self._images[camera] = time.monotonic(), message

    def _wait_for_cameras(self, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while missing := CAMERAS.keys() - self._images.keys():
            if time.monotonic() > end:
                topics = ", ".join(CAMERAS[camera] for camera in sorted(missing))
                raise RuntimeError(f"No image arrived in {seconds:g} s from: {topics}.")
            time.sleep(0.05)


def stay(observation: Mapping[str, Any], last_action: np.ndarray | None) -> np.ndarray:
    """Hold the last target, or the measured position before there is one."""
    return observation["state"] if last_action is None else last_action


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive a real ALOHA with a served policy.")
    parser.add_argument("server", help="such as ws://10.0.0.5:8000")
    parser.add_argument("--prompt", required=True, help="the task as a sentence")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of an episode")
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--execute-horizon", type=int, default=25, help="steps of each chunk")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    with Client(options.server) as client:
        robot = Aloha(options.prompt, num_steps=round(options.seconds * HZ))
        robot.reset_pose = np.array(client.metadata.get("reset_pose", RESET_POSE))
        agent = RealTimeBroker(client, options.execute_horizon)
        runtime = Runtime(robot, agent, HZ, num_episodes=options.episodes, safe_action=stay)
        print(runtime.run())


if __name__ == "__main__":
    main()
