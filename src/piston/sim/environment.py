"""One interface to every simulated robot, for recording and evaluation alike.

An environment knows one world and what it asks of the robot; it knows nothing of policies. Many can
live in one process: step them one by one, `observe` those that need a new chunk, and infer on all
of these observations as one batch. Only `reset`, `observe` and `render` draw.

    environment = make_environment("aloha_transfer_cube")
    observation = environment.reset(seed=0)
    while not environment.done:
        result = environment.step(action)

Seeds below RECORDING_SEEDS are for evaluation, the ones from there on for recording, so that no
policy is ever judged on a start that it was trained on.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, UInt8

# The robot's own keys: {"images": {camera: uint8 (h, w, 3)}, "state": float32, "prompt": str}
Observation = dict[str, Any]

RECORDING_SEEDS = 1_000_000
# Contacts flicker for single steps: a task counts as held if it was fulfilled this recently.
_HELD_STEPS = 10


@dataclasses.dataclass(frozen=True)
class StepResult:
    """`success`: the task is fulfilled at this moment. `done`: the episode is over."""

    reward: float
    success: bool
    done: bool


class Environment(abc.ABC):
    """A simulated robot and one task. Subclasses fill in the methods at the end."""

    # What `make_environment` calls it, and the robot's name in data sets.
    name: str
    robot_type: str
    # The sentence. A mixture's changes with every reset.
    prompt: str
    # In the same start, the sentence that asks for the opposite; None if there is none.
    opposite_prompt: str | None = None
    action_dim: int
    state_dim: int
    # Actions per simulated second.
    control_hz: float
    max_steps: int
    # Height and width of the observation's images.
    pixels: int
    # The robot's name for a camera → the data set's key.
    cameras: ClassVar[Mapping[str, str]]
    # What each number of the action means; the state's is the same or its own.
    action_names: ClassVar[tuple[str, ...]]
    state_names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._recent: collections.deque[bool] = collections.deque(maxlen=_HELD_STEPS)
        self.seed: int | None = None
        self.steps = 0
        self.done = True
        self.ever_succeeded = False

    def reset(self, seed: int) -> Observation:
        """Starts an episode. The same seed gives the same start, whatever happened before."""
        if seed < 0:
            raise ValueError(f"Seeds count from 0, found {seed}.")
        self._recent.clear()
        self.seed, self.steps, self.done, self.ever_succeeded = seed, 0, False, False
        self._reset(seed)
        return self.observe()

    def step(self, action: Float[np.ndarray, " a"]) -> StepResult:
        """Executes one action, in the robot's own space."""
        if self.done:
            raise ValueError(f"{self.name}: the episode is over or never began. Call reset(seed).")
        action = np.asarray(action, np.float64)
        if action.shape != (self.action_dim,):
            raise ValueError(
                f"{self.name}: an action is {self.action_dim} numbers, found shape {action.shape}."
            )
        if not np.isfinite(action).all():
            raise ValueError(f"{self.name}: the action holds NaN or infinity: {action}.")
        reward, success, ended = self._step(action)
        self.steps += 1
        self.done = ended or self.steps >= self.max_steps
        self.ever_succeeded |= success
        self._recent.append(success)
        return StepResult(reward, success, self.done)

    @property
    def success(self) -> bool:
        """Whether the task is fulfilled now."""
        return bool(self._recent) and self._recent[-1]

    @property
    def held(self) -> bool:
        """Whether the task is fulfilled now, give or take a contact that flickers."""
        return any(self._recent)

    def close(self) -> None:  # noqa: B027  (most have nothing to give back)
        """Gives back what other environments can use. The environment can be reset again."""

    @abc.abstractmethod
    def observe(self) -> Observation:
        """What the robot senses now. Draws its cameras."""

    @abc.abstractmethod
    def render(
        self, height: int = 480, width: int = 640, camera: str | None = None
    ) -> UInt8[np.ndarray, "h w 3"]:
        """A picture for people; by default from a camera that shows what happens."""

    @abc.abstractmethod
    def pose(self) -> Float[np.ndarray, " p"]:
        """Where everything is now: little to keep, and enough to draw this moment later."""

    @abc.abstractmethod
    def take_pose(self, pose: Float[np.ndarray, " p"]) -> None:
        """Puts the world into a pose of the same episode, to be drawn. The episode is over then."""

    @abc.abstractmethod
    def initial_state(self) -> dict[str, Any]:
        """How this episode began, in plain JSON values, to be stored with its outcome."""

    @abc.abstractmethod
    def _reset(self, seed: int) -> None:
        """Puts the world into the start that belongs to the seed."""

    @abc.abstractmethod
    def _step(self, action: Float[np.ndarray, " a"]) -> tuple[float, bool, bool]:
        """Reward, whether the task is fulfilled, whether the world itself ends the episode."""


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """What an expert does in one step, and what should be learned from it: they may differ."""

    executed: Float[np.ndarray, " a"]
    label: Float[np.ndarray, " a"]


class Expert(abc.ABC):
    """Solves one task, knowing more of the world than a camera shows."""

    @abc.abstractmethod
    def start(self, environment: Environment) -> None:
        """Prepares for the episode that `environment` has just begun."""

    @abc.abstractmethod
    def act(self) -> Demonstration | None:
        """The next step, or None when there is nothing left to do."""


def check_evaluation_seeds(seeds: Iterable[int]) -> None:
    """Raises for a seed that a recording may have used."""
    if wrong := [seed for seed in seeds if not 0 <= seed < RECORDING_SEEDS]:
        raise ValueError(
            f"Evaluation seeds go from 0 to {RECORDING_SEEDS - 1:,}, found {wrong[0]:,}: the ones "
            "above belong to recordings, and a policy may have seen them."
        )
