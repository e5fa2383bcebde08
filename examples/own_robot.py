"""A robot of your own, from nothing to a policy: seven joints, a gripper, two cameras.

    python examples/own_robot.py record data/my_arm --episodes 50 --task "pick up the fork"
    piston init-robot data/my_arm --output my_arm.toml            # then read and correct the file
    piston stats tiny_robot --robot my_arm.toml --data.repo-id data/my_arm
    piston train tiny_robot --robot my_arm.toml --data.repo-id data/my_arm --exp-name first
    piston serve checkpoints/tiny_robot/first/1499
    python examples/own_robot.py drive ws://127.0.0.1:8000 --task "pick up the fork"

`tiny_robot` trains a small model on a CPU, to try the path; `pi0_robot` fine-tunes the base model
on a GPU. Copy this file and replace `Arm` and `teleoperated_target`; docs/your-robot.md says more.
`drive` needs only `piston-client` and Python 3.8; the other commands need `piston`.
"""

from __future__ import annotations

import argparse

import numpy as np

from piston_client import AsyncChunkBroker, Client, Runtime

HZ = 20.0
NAMES = [f"joint_{i}" for i in range(1, 8)] + ["gripper"]
# What a frame of the data set holds. `names` say which dimension is which, here and in a policy.
FEATURES = {
    "observation.images.front": {"dtype": "video", "shape": (240, 320, 3)},
    "observation.images.wrist": {"dtype": "video", "shape": (240, 320, 3)},
    "observation.state": {"dtype": "float32", "shape": (8,), "names": NAMES},
    "action": {"dtype": "float32", "shape": (8,), "names": NAMES},
}


class Arm:
    """The hardware. This one is imaginary: it follows its target, and its cameras show a bar."""

    def __init__(self) -> None:
        self.joints = np.zeros(8, np.float32)

    def image(self, camera: str) -> np.ndarray:
        """Return the newest image: uint8, height × width × RGB."""
        image = np.full((240, 320, 3), 40 if camera == "front" else 80, np.uint8)
        image[:, : int(160 + 100 * self.joints[0])] = 200
        return image

    def move_to(self, target: np.ndarray) -> None:
        """Send targets of joints (radians) and gripper (0 closed, 1 open) and return at once."""
        self.joints += 0.5 * (target.astype(np.float32) - self.joints)

    def observe(self) -> dict:
        """Return what the policy will get, under the names of the data set."""
        images = {
            f"observation.images.{camera}": self.image(camera) for camera in ("front", "wrist")
        }
        return {**images, "observation.state": self.joints.copy()}


def teleoperated_target(step: int, phase: float) -> np.ndarray:
    """Return where the person who shows the task wants the arm to be; here a slow wave."""
    joints = 0.4 * np.sin(0.1 * step + phase + np.arange(7))
    return np.array([*joints, step // 20 % 2], np.float32)


def record(folder: str, task: str, episodes: int, num_steps: int) -> None:
    """Record demonstrations. Every saved episode is complete, whatever happens afterwards."""
    from piston.data.record import Recorder

    with Recorder(folder, HZ, FEATURES, robot_type="my_arm", codec="h264") as recorder:
        for episode in range(episodes):
            arm = Arm()
            for step in range(num_steps):  # a real robot waits for the next control step here
                action = teleoperated_target(step, phase=float(episode))
                recorder.add_frame({**arm.observe(), "action": action}, task=task)
                arm.move_to(action)
            recorder.save_episode()
    print(f"{folder}: {episodes} episodes of {num_steps} frames")


class Robot:
    """What `Runtime` needs of a robot."""

    def __init__(self, task: str, num_steps: int) -> None:
        self.task, self.num_steps = task, num_steps

    def reset(self) -> None:
        self.arm, self.step = Arm(), 0

    def get_observation(self) -> dict:
        return {**self.arm.observe(), "prompt": self.task}

    def apply_action(self, action: np.ndarray) -> None:
        self.arm.move_to(action)
        self.step += 1

    def is_done(self) -> bool:
        return self.step >= self.num_steps


def drive(server: str, task: str, num_steps: int) -> None:
    """Let a served policy drive the robot, within the limits of the training data."""
    with Client(server) as client:
        about = client.metadata
        print(f"a policy for {about['robot']}, {about['control_hz']:g} Hz")
        agent = AsyncChunkBroker(client)
        print(Runtime(Robot(task, num_steps), agent, HZ).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("record", "drive"))
    parser.add_argument("where", help="the folder of the data set, or the address of the server")
    parser.add_argument("--task", required=True, help="the task as a sentence")
    parser.add_argument("--episodes", type=int, default=50, help="demonstrations to record")
    parser.add_argument("--steps", type=int, default=200, help="control steps of an episode")
    options = parser.parse_args()
    if options.what == "record":
        record(options.where, options.task, options.episodes, options.steps)
    else:
        drive(options.where, options.task, options.steps)


if __name__ == "__main__":
    main()
