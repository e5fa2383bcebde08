"""The simulated ALOHA robot: gym-aloha's worlds and rewards, rendered only when needed.

gym-aloha itself renders three large images in every step and needs dm_control. `AlohaEnvironment`
loads gym-aloha's model with MuJoCo alone and computes the same states and rewards, bit for bit; its
one camera shows the centre half of gym-aloha's top image. `StockAlohaEnvironment` is what
`gymnasium.make` builds, cropped to the same view: a policy that works in one must work in the
other.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from piston.data.language import Question
from piston.extras import needed_for
from piston.sim.labels import SIDES, Answers, ask, image_position
from piston.sim.rendering import MujocoEnvironment, View, World

import mujoco  # isort: skip  (after rendering, which chooses OpenGL)
import gymnasium
from gym_aloha import constants
from gym_aloha.constants import ASSETS_DIR, DT, JOINTS, START_ARM_POSE
from gym_aloha.utils import sample_box_pose, sample_insertion_pose

logger = logging.getLogger(__name__)
# By default MuJoCo writes its warnings to MUJOCO_LOG.TXT in the current folder.
mujoco.set_mju_user_warning(logger.warning)

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

# The geoms whose contacts determine the reward. One finger stands for each hand.
_PARTS = {
    "red_box": "cube",
    "red_peg": "peg",
    "pin": "pin",
    "table": "table",
    **{f"socket-{wall}": "socket" for wall in (1, 2, 3, 4)},
    **{f"vx300s_{hand}/10_{hand}_gripper_finger": hand for hand in ("left", "right")},
}

# Pairs of parts that touch. None stands for all other geoms.
Contacts = set[frozenset[str | None]]


def _transfer_reward(contacts: Contacts) -> int:
    """The right hand touches the cube (1) and lifts it (2), then the left hand does (3, 4)."""
    on_table = {"cube", "table"} in contacts
    if {"cube", "left"} in contacts:
        return 3 if on_table else 4
    if {"cube", "right"} in contacts:
        return 1 if on_table else 2
    return 0


def _insertion_reward(contacts: Contacts) -> int:
    """The hands touch both parts (1), lift them (2), join them (3), the peg meets the pin (4)."""
    lifted = {"peg", "table"} not in contacts and {"socket", "table"} not in contacts
    if {"peg", "pin"} in contacts:
        return 4
    if {"peg", "socket"} in contacts and lifted:
        return 3
    if {"socket", "left"} in contacts and {"peg", "right"} in contacts:
        return 2 if lifted else 1
    return 0


@dataclasses.dataclass(frozen=True)
class AlohaTask:
    """One of gym-aloha's tasks."""

    name: str
    prompt: str
    # Its names in gym-aloha.
    gymnasium_id: str
    model_file: str
    reward: Callable[[Contacts], int]
    # The objects in the order of the simulator's state, and their poses for a seed.
    objects: tuple[str, ...]
    poses: Callable[[int], np.ndarray]


TASKS = {
    "aloha_transfer_cube": AlohaTask(
        name="aloha_transfer_cube",
        prompt="Transfer cube",
        gymnasium_id="gym_aloha/AlohaTransferCube-v0",
        model_file="bimanual_viperx_transfer_cube.xml",
        reward=_transfer_reward,
        objects=("cube",),
        poses=sample_box_pose,
    ),
    "aloha_insertion": AlohaTask(
        name="aloha_insertion",
        prompt="Insert the peg into the socket",
        gymnasium_id="gym_aloha/AlohaInsertion-v0",
        model_file="bimanual_viperx_insertion.xml",
        reward=_insertion_reward,
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
    _model: mujoco.MjModel
    _data: mujoco.MjData

    def __init__(self, task: AlohaTask, pixels: int = 96) -> None:
        super().__init__()
        self.task, self.pixels = task, pixels
        self.name, self.prompt = task.name, task.prompt

    def initial_state(self) -> dict[str, Any]:
        if self.seed is None:
            raise ValueError(f"{self.name}: no episode has started. Call reset(seed).")
        poses = self.task.poses(self.seed).reshape(-1, 7).tolist()
        return {"seed": self.seed, "objects": dict(zip(self.task.objects, poses, strict=True))}

    def _diverged(self, reason: object) -> tuple[float, bool, bool]:
        """Return the last step of an episode in which an untrained policy broke the simulation."""
        logger.warning("%s, seed %s: the episode ends here. %s", self.name, self.seed, reason)
        return 0.0, False, True

    def questions(self) -> list[Question]:
        (camera,), objects = self.cameras.values(), self._data.qpos[16:].reshape(-1, 7)
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
        state, held = self._state(), []
        for hand, gripper in ("left", state[6]), ("right", state[13]):
            names = (f"vx300s_{hand}/10_{side}_gripper_finger" for side in ("left", "right"))
            fingers = np.mean([self._data.geom(name).xpos for name in names], axis=0)
            distance = np.linalg.norm(fingers - cube)
            if distance < _HELD_DISTANCE and gripper < _HELD_GRIPPER:
                held.append(hand)
            elif distance < _FREE_DISTANCE:
                return []
        if held and cube[2] < _LIFTED:
            return []
        return ["both" if len(held) == 2 else held[0] if held else "neither"]

    def _state(self) -> Float[np.ndarray, " 14"]:
        """Return the joints of both arms; a gripper is one number for its two fingers."""
        arms = self._data.qpos[:16].reshape(2, 8)[:, :7].copy()
        arms[:, 6] = constants.normalize_puppet_gripper_position(arms[:, 6])
        return arms.ravel()

    def _current(self) -> World:
        return World(self.task.model_file, self._model, self._data)


class AlohaEnvironment(_Aloha):
    """gym-aloha's physics, initial states and rewards, with one small camera."""

    def __init__(self, task: AlohaTask, pixels: int = 96) -> None:
        super().__init__(task, pixels)
        self._model = load_model(task.model_file)
        self._data = mujoco.MjData(self._model)
        mujoco.mj_forward(self._model, self._data)
        self._parts = [_PARTS.get(self._model.geom(i).name) for i in range(self._model.ngeom)]
        self._substeps = round(DT / self._model.opt.timestep)

    def _sense(self) -> tuple[np.ndarray, np.ndarray]:
        return self._render(_TOP, self.pixels, self.pixels), self._state()

    def _reset(self, seed: int) -> None:
        mujoco.mj_resetData(self._model, self._data)
        # MuJoCo's solver starts at its last solution, so states are bit-equal to gym-aloha's only
        # if the solver runs as often: once before and twice after the initial state is set.
        mujoco.mj_forward(self._model, self._data)
        self._data.qpos[:] = np.concatenate([START_ARM_POSE, self.task.poses(seed)])
        self._data.ctrl[:] = START_ARM_POSE
        for _ in range(2):
            mujoco.mj_forward(self._model, self._data)

    def _step(self, action: Float[np.ndarray, " 14"]) -> tuple[float, bool, bool]:
        arms = action.reshape(2, 7)
        fingers = constants.unnormalize_puppet_gripper_position(arms[:, 6:])
        self._data.ctrl[:] = np.hstack([arms[:, :6], fingers, -fingers]).ravel()
        # Each control step ends with the first half of the next substep: what is read between
        # control steps, such as contacts, then belongs to the joints as they are.
        mujoco.mj_step2(self._model, self._data)
        mujoco.mj_step(self._model, self._data, nstep=self._substeps - 1)
        mujoco.mj_step1(self._model, self._data)
        if (raised := np.flatnonzero(self._data.warning.number)).size:
            names = ", ".join(mujoco.mjtWarning(kind).name for kind in raised)
            return self._diverged(f"The simulation has diverged: {names}.")
        pairs = self._data.contact.geom.tolist()
        contacts = {frozenset((self._parts[a], self._parts[b])) for a, b in pairs}
        reward = self.task.reward(contacts)
        return float(reward), reward == MAX_REWARD, False


@functools.cache
def load_model(model_file: str) -> mujoco.MjModel:
    """Return gym-aloha's model, which all environments of the process share."""
    return mujoco.MjModel.from_xml_path(str(ASSETS_DIR / model_file))


class StockAlohaEnvironment(_Aloha):
    """The environment as `gymnasium.make` builds it: slow, and it ends at the first success.

    Only this one needs dm_control.
    """

    def __init__(self, task: AlohaTask, pixels: int = 96) -> None:
        super().__init__(task, pixels)
        self.name = f"{task.name}_stock"
        with needed_for(self.name):
            from dm_control.rl.control import PhysicsError

            self._gymnasium = gymnasium.make(
                task.gymnasium_id, obs_type="pixels_agent_pos", disable_env_checker=True
            )
        self._physics_error = PhysicsError
        physics = self._gymnasium.unwrapped._env.physics  # type: ignore[attr-defined]
        self._model, self._data = physics.model.ptr, physics.data.ptr
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

    def _step(self, action: Float[np.ndarray, " 14"]) -> tuple[float, bool, bool]:
        try:
            self._observed, reward, terminated, truncated, info = self._gymnasium.step(action)
        except self._physics_error as error:
            return self._diverged(error)
        return float(reward), bool(info["is_success"]), terminated or truncated
