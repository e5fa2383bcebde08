"""MetaWorld: one arm, fifty tasks named by a sentence, and the package's scripted policies.

The package ignores `reset(seed=)`, marks goals in the image and leaves the camera open. Here a seed
determines the initial state, markers are not rendered, and one camera shows the table.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from jaxtyping import Float, UInt8

from piston.data.language import Question
from piston.sim.environment import RECORDING_SEEDS, Demonstration, Environment, Expert
from piston.sim.labels import SIDES, Answers, ask, image_position
from piston.sim.metaworld_tasks import ACTION_REPEAT, MetaworldTask, Thing
from piston.sim.rendering import MujocoEnvironment, View, World

import mujoco  # isort: skip  (after rendering, which chooses OpenGL)
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP

_PACKAGE_HZ = 80
_CAMERA = "corner4"
_VIEW = View(_CAMERA, 45.0)
_GRIPPER: Answers = (("no", 0.0, 0.4), ("yes", 0.8, 1.1))

# Noise on the hand's motion in units of the action, and its correlation from step to step.
_NOISE, _NOISE_CORRELATION = 0.3, 0.5
_NOISY_EPISODES = 0.75
# Steps recorded after success, as examples of a finished task.
_STEPS_AFTER_SUCCESS = 5


def _make_package(task: MetaworldTask) -> Any:
    """Return the package's environment. A reset changes its model, so it is not shared."""
    # The class itself: the package's wrappers use a global random state.
    package: Any = ALL_V3_ENVIRONMENTS[task.package_name]()
    package._set_task_called = True
    package._freeze_rand_vec = False
    package.seeded_rand_vec = True
    # Some scripted policies read the goal.
    package._partially_observable = False
    del package.sawyer_observation_space
    if task.start is not None:
        low, high = np.array(task.start.low), np.array(task.start.high)
        package._random_reset_space = Box(low, high, dtype=np.float64)
    return package


# Packages that no environment uses at the moment. Compiling one takes longer than an episode.
_idle: dict[str, list[Any]] = {}


class MetaworldEnvironment(MujocoEnvironment):
    """One task, or a mixture in which the seed selects the task.

    With n tasks, seeds n·k to n·k + n − 1 are the n tasks, each with its k-th initial state. Tasks
    with the same scene share initial states. In every mixture the initial states of recordings and
    of evaluations are disjoint: those of recordings are numbered from RECORDING_SEEDS on.
    """

    robot_type = "sawyer"
    action_dim = state_dim = 4
    control_hz = _PACKAGE_HZ / ACTION_REPEAT
    cameras = {_CAMERA: f"observation.images.{_CAMERA}"}  # noqa: RUF012
    action_names = ("x", "y", "z", "gripper")
    state_names = ("x", "y", "z", "gripper_opening")
    overview = _VIEW

    def __init__(self, name: str, tasks: tuple[MetaworldTask, ...], pixels: int = 64) -> None:
        super().__init__()
        self.name, self.pixels = name, pixels
        self._tasks = tasks
        self._package: Any = None
        self._sensed = np.zeros(0)
        self._choose(tasks[0])

    def _sense(self) -> tuple[np.ndarray, np.ndarray]:
        # Hand and gripper only: objects are visible in the image alone.
        return self.render(self.pixels, self.pixels), self.full_observation[:4]

    @property
    def full_observation(self) -> Float[np.ndarray, " 39"]:
        """The package's observation with the positions of objects and goal; for experts only."""
        self._running()
        return self._sensed

    def initial_state(self) -> dict[str, Any]:
        vector = [float(value) for value in self._running()._last_rand_vec]
        return {"seed": self.seed, "task": self.task.name, "random_vector": vector}

    def subtask(self) -> str:
        """Return the part of the task that this moment belongs to; "" for most tasks."""
        if (parts := self.task.parts) is None:
            return ""
        hand, thing = self.full_observation[:3], self.full_observation[4:7]
        low, high = np.transpose(parts.box)
        near = ((low < hand - thing) & (hand - thing < high)).all()
        moved = parts.moved[0] < self._joint(parts.thing) < parts.moved[1]
        return parts.move if near or moved else parts.reach

    def questions(self) -> list[Question]:
        (key,) = self.cameras.values()
        # The package mounts this camera upside down.
        column = 1 - image_position(self._current(), _VIEW, self._running().tcp_center)[0]
        asked = ask(key, "where is the hand?", column, SIDES)
        asked += ask(key, "is the gripper open?", self.full_observation[3], _GRIPPER)
        if self.task.parts is not None:
            thing = self.task.parts.thing
            asked.append(Question(key, "what is on the table?", f"a {thing.name}"))
            asked += ask(key, thing.question, self._joint(thing), thing.answers)
        return asked

    def _joint(self, thing: Thing) -> float:
        return float(self._running().data.joint(thing.joint).qpos[0])

    def close(self) -> None:
        if self._package is not None:
            _idle.setdefault(self.task.name, []).append(self._package)
            self._package = None
            self.done = True

    def _reset(self, seed: int) -> None:
        block, within = divmod(seed, RECORDING_SEEDS)
        start, index = divmod(within, len(self._tasks))
        if self._package is None or self.task is not self._tasks[index]:
            self.close()
            self._choose(self._tasks[index])
            idle = _idle.get(self.task.name)
            self._package = idle.pop() if idle else _make_package(self.task)
            self.done = False
        self._package.seed(block * RECORDING_SEEDS + start)
        self._sensed, _ = self._package.reset()
        if halfway := self.task.start:
            random = np.random.default_rng(block * RECORDING_SEEDS + start)
            self._package.data.joint(halfway.joint).qpos[:] = random.uniform(*halfway.span)
            mujoco.mj_forward(self._package.model, self._package.data)
            self._package._prev_obs = self._package._get_curr_obs_combined_no_goal()
            self._sensed = self._package._get_obs()

    def _choose(self, task: MetaworldTask) -> None:
        self.task = task
        self.prompt, self.opposite_prompt = task.prompt, task.opposite_prompt
        self.max_steps = task.max_steps

    def resting_action(self, last: Float[np.ndarray, " 4"]) -> Float[np.ndarray, " 4"]:
        """Do not move the hand, and keep the gripper's effort: actions are motions here."""
        return np.append(np.zeros_like(last[:3]), last[3])

    def _step(self, action: Float[np.ndarray, " 4"]) -> tuple[float, bool, bool]:
        action = np.clip(action, -1.0, 1.0)
        for _ in range(ACTION_REPEAT):
            self._sensed, reward, _, _, info = self._running().step(action)
        return float(reward), bool(info["success"]), False

    def _current(self) -> World:
        package = self._running()
        return World(self.task.package_name, package.model, package.data)

    def _render(self, view: View, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
        image = super()._render(view, height, width)
        # The package mounts this camera upside down.
        return np.ascontiguousarray(image[::-1, ::-1]) if view.camera == _CAMERA else image

    def _running(self) -> Any:
        if self._package is None:
            raise ValueError(f"{self.name}: no episode has started. Call reset(seed).")
        return self._package


class MetaworldExpert(Expert):
    """The package's scripted policy. In most episodes noise is added to the executed action, while
    the label is the intended one: so the data contain examples of recovery.
    """

    def start(self, environment: Environment) -> None:
        if not isinstance(environment, MetaworldEnvironment) or environment.seed is None:
            raise ValueError(f"{environment.name} is not a MetaWorld environment with an episode.")
        self._environment = environment
        policy: Any = ENV_POLICY_MAP[environment.task.package_name]
        self._policy = policy()
        # Not the random stream of the initial state.
        self._random = np.random.default_rng([environment.seed, 1])
        self._noisy = self._random.random() < _NOISY_EPISODES
        self._push = np.zeros(3)
        self._steps_left = _STEPS_AFTER_SUCCESS

    def act(self) -> Demonstration | None:
        if self._environment.success:
            self._steps_left -= 1
        if self._environment.done or self._steps_left < 0:
            return None
        with warnings.catch_warnings():
            # The policies command more than the arm can do, on purpose.
            warnings.filterwarnings("ignore", message="Constant\\(s\\) may be too high")
            intended = self._policy.get_action(self._environment.full_observation)
        label = np.clip(intended, -1.0, 1.0)
        executed = label.copy()
        if self._noisy:
            fresh = self._random.normal(0.0, _NOISE, 3) * np.sqrt(1 - _NOISE_CORRELATION**2)
            self._push = _NOISE_CORRELATION * self._push + fresh
            executed[:3] = np.clip(executed[:3] + self._push, -1.0, 1.0)
        return Demonstration(executed, label, self._environment.subtask())
