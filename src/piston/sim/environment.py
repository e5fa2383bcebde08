"""The interface of every simulated robot, for recording and evaluation.

Many environments can run in one process: step them one by one, `observe` those that need a new
chunk, and infer on these observations as one batch. Only `reset`, `observe` and `render` create
images.

    environment = make_environment("aloha_transfer_cube")
    observation = environment.reset(seed=0)
    while not environment.done:
        result = environment.step(action)

Seeds below RECORDING_SEEDS are for evaluation, those from there on for recording, so that no policy
is evaluated on an initial state that it was trained on.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, UInt8

if TYPE_CHECKING:  # it imports the readers of data sets, which a list of environments does without
    from piston.data.language import Question

# The robot's own keys: {"images": {camera: uint8 (h, w, 3)}, "state": float32, "prompt": str}
Observation = dict[str, Any]

RECORDING_SEEDS = 1_000_000
# Contacts flicker for single steps: a task counts as held if it was fulfilled within these steps.
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
    # The task as a sentence. In a mixture it may change with every reset.
    prompt: str
    # The sentence that asks for the opposite from the same initial state; None if there is none.
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
    # The meaning of each dimension.
    action_names: ClassVar[tuple[str, ...]]
    state_names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._recent: collections.deque[bool] = collections.deque(maxlen=_HELD_STEPS)
        self.seed: int | None = None
        self.steps = 0
        self.done = True
        # The number of steps after which the task was fulfilled for the first time.
        self.success_step: int | None = None

    def reset(self, seed: int) -> Observation:
        """Start an episode. The same seed always gives the same initial state."""
        if seed < 0:
            raise ValueError(f"The seed is {seed}; expected 0 or more.")
        self._recent.clear()
        self.seed, self.steps, self.done, self.success_step = seed, 0, False, None
        self._reset(seed)
        return self.observe()

    def step(self, action: Float[np.ndarray, " a"]) -> StepResult:
        """Execute one action, in the robot's own units."""
        if self.done:
            raise ValueError(
                f"{self.name}: the episode is over or has not started. Call reset(seed)."
            )
        action = np.asarray(action, np.float64)
        if action.shape != (self.action_dim,):
            raise ValueError(
                f"{self.name}: the action has shape {action.shape}, expected ({self.action_dim},)."
            )
        if not np.isfinite(action).all():
            raise ValueError(f"{self.name}: the action holds NaN or infinity: {action}.")
        reward, success, ended = self._step(action)
        self.steps += 1
        self.done = ended or self.steps >= self.max_steps
        if success and self.success_step is None:
            self.success_step = self.steps
        self._recent.append(success)
        return StepResult(reward, success, self.done)

    @property
    def success(self) -> bool:
        """Whether the task is fulfilled in this step."""
        return bool(self._recent) and self._recent[-1]

    @property
    def ever_succeeded(self) -> bool:
        """Whether the task was fulfilled in any step so far."""
        return self.success_step is not None

    @property
    def held(self) -> bool:
        """Whether the task was fulfilled within the last steps."""
        return any(self._recent)

    def close(self) -> None:  # noqa: B027  (most have nothing to release)
        """Release what other environments can use. The environment can be reset again."""

    def resting_action(self, last: Float[np.ndarray, " a"]) -> Float[np.ndarray, " a"]:
        """Return the action that keeps the robot where it is after the last one.

        Repeating a target does; a robot whose actions are motions has to override this.
        """
        return last

    def recorded(self, observation: Observation) -> Observation:
        """Return images and state of an observation under the keys of a recorded data set."""
        images = {key: observation["images"][camera] for camera, key in self.cameras.items()}
        return {**images, "observation.state": observation["state"]}

    def questions(self) -> list[Question]:
        """Return questions about the images of this moment, with answers from the full state.

        Only what the image shows and what has one clear answer is asked.
        """
        return []

    @abc.abstractmethod
    def observe(self) -> Observation:
        """Return what the robot senses now; renders its cameras."""

    @abc.abstractmethod
    def render(
        self, height: int = 480, width: int = 640, camera: str | None = None
    ) -> UInt8[np.ndarray, "h w 3"]:
        """Return an image for people, by default from a camera that shows the whole scene."""

    @abc.abstractmethod
    def pose(self) -> Float[np.ndarray, " p"]:
        """Return the small part of the state from which this moment can be rendered later."""

    @abc.abstractmethod
    def set_pose(self, pose: Float[np.ndarray, " p"]) -> None:
        """Set a pose of the same episode, for rendering. This ends the episode."""

    @abc.abstractmethod
    def initial_state(self) -> dict[str, Any]:
        """Return the initial state of this episode as JSON values, to store with its outcome."""

    @abc.abstractmethod
    def _reset(self, seed: int) -> None:
        """Set the initial state of the seed."""

    @abc.abstractmethod
    def _step(self, action: Float[np.ndarray, " a"]) -> tuple[float, bool, bool]:
        """Return the reward, whether the task is fulfilled, and whether the simulator ends here."""


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """The action that an expert executes in one step, and the action to learn; they may differ.

    `subtask` is the part of the task that this step belongs to, in a few words; "" if not known.
    """

    executed: Float[np.ndarray, " a"]
    label: Float[np.ndarray, " a"]
    subtask: str = ""


class Expert(abc.ABC):
    """Solves a task with access to the full state of the simulator."""

    @abc.abstractmethod
    def start(self, environment: Environment) -> None:
        """Prepare for the episode that `environment` has just started."""

    @abc.abstractmethod
    def act(self) -> Demonstration | None:
        """Return the next step, or None at the end."""


def check_evaluation_seeds(seeds: Iterable[int]) -> None:
    """Raise ValueError for a seed that a recording may have used."""
    if wrong := [seed for seed in seeds if not 0 <= seed < RECORDING_SEEDS]:
        raise ValueError(
            f"Evaluation seeds go from 0 to {RECORDING_SEEDS - 1:,}, found {wrong[0]:,}: larger "
            "ones are for recording, and a policy may have been trained on them."
        )
