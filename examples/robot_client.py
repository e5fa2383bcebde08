"""Drive a robot with a served policy. Copy this file and replace the three methods of `Arm`.

    piston serve --preset pi0_aloha_sim --random-weights          # or: piston serve CHECKPOINT
    python examples/robot_client.py ws://127.0.0.1:8000 --prompt "transfer the cube"

The robot's computer needs Python 3.8 or newer and `pip install piston-client`, which brings numpy,
msgpack and websockets, but not PyTorch.
Start with a small --max-step, and with a hand on the emergency stop.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging

import numpy as np

from piston_client import AsyncChunkBroker, Client, Limits, Runtime


class Arm:
    """The hardware. This one is imaginary: it is where it was told to go, its camera is dark."""

    def __init__(self) -> None:
        self._joints = np.zeros(14, np.float32)

    def read_joints(self) -> np.ndarray:
        """Return the measured joint positions, in the units of the training data."""
        return self._joints

    def read_camera(self) -> np.ndarray:
        """Return the newest image: uint8, height × width × RGB. Any size."""
        return np.zeros((480, 640, 3), np.uint8)

    def move_to(self, joints: np.ndarray) -> None:
        """Send joint targets, and return without waiting for the motion."""
        self._joints = joints.astype(np.float32)


@dataclasses.dataclass
class Robot:
    """What `Runtime` needs: observations in the keys that the policy expects, and actions."""

    arm: Arm
    prompt: str
    num_steps: int
    steps_left: int = 0

    def reset(self) -> None:
        self.steps_left = self.num_steps

    def get_observation(self) -> dict:
        # `state` must be a copy: it is sent while the robot moves on.
        return {
            "images": {"cam_high": self.arm.read_camera()},
            "state": self.arm.read_joints().copy(),
            "prompt": self.prompt,
        }

    def apply_action(self, action: np.ndarray) -> None:
        self.arm.move_to(action)
        self.steps_left -= 1

    def is_done(self) -> bool:
        return self.steps_left <= 0


def stay(observation: dict, last_action: np.ndarray | None) -> np.ndarray:
    """Hold the measured position while there is no new action, and at the end of the run."""
    del last_action
    return observation["state"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive a robot with a served policy.")
    parser.add_argument("server", help="such as ws://10.0.0.5:8000")
    parser.add_argument("--prompt", required=True, help="the task as a sentence")
    parser.add_argument("--hz", type=float, default=50.0, help="the rate of the training data")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the episode")
    parser.add_argument("--execute-horizon", type=int, default=25, help="steps of each chunk")
    parser.add_argument("--max-step", type=float, help="largest change of a joint in one step")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    with Client(options.server) as client:
        logging.info("the policy says: %s", client.metadata)
        # The limits of the training data, unless the policy has none; a smaller step for a start.
        limits = Limits.of_policy(client)
        if options.max_step is not None:
            known = limits or Limits()
            limits = Limits(known.low, known.high, max_step=options.max_step)
        robot = Robot(Arm(), options.prompt, num_steps=round(options.seconds * options.hz))
        agent = AsyncChunkBroker(client, options.execute_horizon)
        runtime = Runtime(robot, agent, options.hz, safe_action=stay, limits=limits)
        print(runtime.run())


if __name__ == "__main__":
    main()
