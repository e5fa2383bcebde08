"""The simulated ALOHA robot: gym-aloha's worlds and rewards, rendered only when needed.

gym-aloha itself renders three large images in every step. `AlohaEnvironment` steps the same physics
and task objects without; its one camera shows the centre half of gym-aloha's top image.
`StockAlohaEnvironment` is what `gymnasium.make` builds, cropped to the same view: a policy that
works in one must work in the other.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from piston.data.language import Question
from piston.sim.labels import SIDES, Answers, ask, image_position
from piston.sim.rendering import MujocoEnvironment, View, World

import dm_control.mujoco  # isort: skip  (after rendering, which chooses OpenGL)
import gym_aloha  # noqa: F401  (registers its environments)
import gymnasium
from dm_control.rl.control import PhysicsError
from gym_aloha.constants import ASSETS_DIR, DT, JOINTS
from gym_aloha.tasks import sim as tasks
from gym_aloha.utils import sample_box_pose, sample_insertion_pose

logger = logging.getLogger(__name__)

DIM = len(JOINTS)
MAX_STEPS = 300  # as gym-aloha registers its environments
MAX_REWARD = 4

# The vertical field of view of gym-aloha's top camera is 78°. Its centre half as an angle:
_TOP = View("top", float(np.degrees(2 * np.arctan(np.tan(np.radians(78 / 2)) / 2))))

# Answers about an image. In metres, except rows of the image, which go from 0 to 1.
_LIFTED = 0.06
_ON_TABLE: Answers = (("yes", 0.0, 0.025), ("no", _LIFTED, 1.0))  # height of the centre
_LOW: Answers = (("no", 0.0, 0.64), ("yes", 0.68, 1.0))
_HIGHER: Answers = (("the peg", -1.0, -0.04), ("the socket", 0.04, 1.0))  # rows between them
_INSERTED: Answers = (("yes", 0.0, 0.106), ("no", 0.135, 1.0))  # from centre to centre
# From the middle of a hand's fingers to the centre of the cube, and the state of its gripper.
_HELD_DISTANCE, _HELD_GRIPPER, _FREE_DISTANCE = 0.055, 0.66, 0.1


@dataclasses.dataclass(frozen=True)
class AlohaTask:
    """One of gym-aloha's tasks."""

    name: str
    prompt: str
    # Its names in gym-aloha.
    gymnasium_id: str
    model_file: str
    task: Callable[[], Any]
    # The objects in the order of the simulator's state, and their poses for a seed.
    objects: tuple[str, ...]
    poses: Callable[[int], np.ndarray]


TASKS = {
    "aloha_transfer_cube": AlohaTask(
        name="aloha_transfer_cube",
        prompt="Transfer cube",
        gymnasium_id="gym_aloha/AlohaTransferCube-v0",
        model_file="bimanual_viperx_transfer_cube.xml",
        task=tasks.TransferCubeTask,
        objects=("cube",),
        poses=sample_box_pose,
    ),
    "aloha_insertion": AlohaTask(
        name="aloha_insertion",
        prompt="Insert the peg into the socket",
        gymnasium_id="gym_aloha/AlohaInsertion-v0",
        model_file="bimanual_viperx_insertion.xml",
        task=tasks.InsertionTask,
        objects=("peg", "socket"),
        poses=lambda seed: np.concatenate(sample_insertion_pose(seed)),
    ),
}


class _Aloha(MujocoEnvironment):
    """What both kinds share: joints, cameras, prompts and initial states."""

    robot_type = "aloha"
    action_dim = state_dim = DIM
    control_hz = 1 / DT
    max_steps = MAX_STEPS
    cameras = {"cam_high": "observation.images.top"}  # noqa: RUF012
    action_names = state_names = tuple(JOINTS)
    overview = View("angle")
    # dm_control's handle on the simulation.
    _physics: Any

    def __init__(self, task: AlohaTask, pixels: int = 96) -> None:
        super().__init__()
        self.task, self.pixels = task, pixels
        self.name, self.prompt = task.name, task.prompt

    def initial_state(self) -> dict[str, Any]:
        if self.seed is None:
            raise ValueError(f"{self.name}: no episode has started. Call reset(seed).")
        poses = self.task.poses(self.seed).reshape(-1, 7).tolist()
        return {"seed": self.seed, "objects": dict(zip(self.task.objects, poses, strict=True))}

    def _step(self, action: Float[np.ndarray, " 14"]) -> tuple[float, bool, bool]:
        try:
            return self._advance(action)
        except PhysicsError as error:
            # An untrained policy may send commands at which the simulation diverges.
            logger.warning("%s, seed %s: the episode ends here. %s", self.name, self.seed, error)
            return 0.0, False, True

    def questions(self) -> list[Question]:
        (camera,), objects = self.cameras.values(), self._physics.data.qpos[16:].reshape(-1, 7)
        about = self._about_cube if "cube" in self.task.objects else self._about_insertion
        return about(camera, *objects[:, :3])

    def _about_cube(self, camera: str, cube: Float[np.ndarray, " 3"]) -> list[Question]:
        column, row = image_position(self._current(), _TOP, cube)
        lies = cube[2] < _LIFTED  # the hands always hold it low in the image
        return [
            *ask(camera, "where is the cube?", column, SIDES),
            *(ask(camera, "is the cube low in the image?", row, _LOW) if lies else ()),
            *ask(camera, "is the cube on the table?", cube[2], _ON_TABLE),
            *(Question(camera, "which hand holds the cube?", hand) for hand in self._holding(cube)),
        ]

    def _about_insertion(
        self, camera: str, peg: Float[np.ndarray, " 3"], socket: Float[np.ndarray, " 3"]
    ) -> list[Question]:
        rows = [image_position(self._current(), _TOP, thing)[1] for thing in (peg, socket)]
        apart = float(np.linalg.norm(peg - socket))
        return [
            *ask(camera, "which is higher in the image?", rows[0] - rows[1], _HIGHER),
            *ask(camera, "is the peg on the table?", peg[2], _ON_TABLE),
            *ask(camera, "is the peg in the socket?", apart, _INSERTED),
        ]

    def _holding(self, cube: Float[np.ndarray, " 3"]) -> list[str]:
        """Return which hand holds the cube as one answer; none if the image does not show it.

        It does not show whether fingers around the cube have closed, unless they have lifted it.
        """
        model, data = self._physics.model, self._physics.data
        state, held = tasks.BimanualViperXTask.get_qpos(self._physics), []
        for hand, gripper in ("left", state[6]), ("right", state[13]):
            names = (f"vx300s_{hand}/10_{side}_gripper_finger" for side in ("left", "right"))
            fingers = np.mean(
                [data.geom_xpos[model.name2id(name, "geom")] for name in names], axis=0
            )
            distance = np.linalg.norm(fingers - cube)
            if distance < _HELD_DISTANCE and gripper < _HELD_GRIPPER:
                held.append(hand)
            elif distance < _FREE_DISTANCE:
                return []
        if held and cube[2] < _LIFTED:
            return []
        return ["both" if len(held) == 2 else held[0] if held else "neither"]

    def _current(self) -> World:
        return World(self.task.model_file, self._physics.model.ptr, self._physics.data.ptr)

    @abc.abstractmethod
    def _advance(self, action: Float[np.ndarray, " 14"]) -> tuple[float, bool, bool]:
        """Step the simulator; return reward, whether the task is fulfilled, whether it ends."""


class AlohaEnvironment(_Aloha):
    """gym-aloha's physics, initial states and rewards, with one small camera."""

    def __init__(self, task: AlohaTask, pixels: int = 96) -> None:
        super().__init__(task, pixels)
        self._task = task.task()
        # All environments of the process share the model; each has its own state.
        self._physics = _physics(task.model_file).copy(share_model=True)
        self._substeps = round(DT / self._physics.timestep())

    def _sense(self) -> tuple[np.ndarray, np.ndarray]:
        image = self._render(_TOP, self.pixels, self.pixels)
        return image, self._task.get_qpos(self._physics)

    def _reset(self, seed: int) -> None:
        tasks.BOX_POSE[0] = self.task.poses(seed)  # gym-aloha's tasks read their initial poses here
        with self._physics.reset_context():
            self._task.initialize_episode(self._physics)

    def _advance(self, action: Float[np.ndarray, " 14"]) -> tuple[float, bool, bool]:
        self._task.before_step(action, self._physics)
        self._physics.step(self._substeps)
        reward = self._task.get_reward(self._physics)
        return float(reward), reward == MAX_REWARD, False


@functools.cache
def _physics(model_file: str) -> dm_control.mujoco.Physics:
    return dm_control.mujoco.Physics.from_xml_path(str(ASSETS_DIR / model_file))


class StockAlohaEnvironment(_Aloha):
    """The environment as `gymnasium.make` builds it: slow, and it ends at the first success."""

    def __init__(self, task: AlohaTask, pixels: int = 96) -> None:
        super().__init__(task, pixels)
        self.name = f"{task.name}_stock"
        self._gymnasium = gymnasium.make(
            task.gymnasium_id, obs_type="pixels_agent_pos", disable_env_checker=True
        )
        self._physics = self._gymnasium.unwrapped._env.physics  # type: ignore[attr-defined]
        self._observed: dict[str, Any] = {}

    def _sense(self) -> tuple[np.ndarray, np.ndarray]:
        """Crop gym-aloha's top image to what our camera shows: the centre, half as high."""
        image = Image.fromarray(self._observed["pixels"]["top"])
        side = image.height // 2
        left, top = (image.width - side) // 2, (image.height - side) // 2
        crop = image.crop((left, top, left + side, top + side))
        resized = crop.resize((self.pixels, self.pixels), Image.Resampling.BILINEAR)
        return np.asarray(resized), self._observed["agent_pos"]

    def _reset(self, seed: int) -> None:
        self._observed, _ = self._gymnasium.reset(seed=seed)

    def _advance(self, action: Float[np.ndarray, " 14"]) -> tuple[float, bool, bool]:
        self._observed, reward, terminated, truncated, info = self._gymnasium.step(action)
        return float(reward), bool(info["is_success"]), terminated or truncated
