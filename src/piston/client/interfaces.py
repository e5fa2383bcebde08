"""What a `Runtime` is made of: a robot, an agent, and hooks of your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from piston.client.timing import EndedBy, Summary


class Environment(Protocol):
    """A robot, or a simulation of one."""

    def reset(self) -> None:
        """Begin an episode."""
        ...

    def get_observation(self) -> Mapping[str, Any]:
        """In the robot's own keys, in arrays that are not used again for the next one."""
        ...

    def apply_action(self, action: np.ndarray, /) -> None:
        """One action (dim,)."""
        ...

    def is_done(self) -> bool:
        """Whether the episode is over."""
        ...


class Agent(Protocol):
    """A broker: one action per call."""

    def infer(self, observation: Mapping[str, Any], /) -> Mapping[str, Any]:
        """A result with `actions` (dim,); `held` in it says that the agent had nothing new."""
        ...

    def reset(self) -> None: ...


class Hooks:
    """What to do besides: override what you need. Hooks run in the loop, so they must be quick."""

    def on_start(self) -> None:
        """Before the first episode."""

    def on_episode_start(self, episode: int) -> None:
        """After the environment and the agent are reset."""

    def on_observation(self, step: int, observation: Mapping[str, Any]) -> None:
        """Before the agent is asked."""

    def on_action(self, step: int, action: np.ndarray, result: Mapping[str, Any] | None) -> None:
        """After an action was applied; `result` is the agent's, None where the action was held."""

    def on_hold(self, step: int, reason: str) -> None:
        """The agent gave nothing new for this step."""

    def on_overrun(self, step: int, seconds: float) -> None:
        """The step took this much longer than a period."""

    def on_episode_end(self, episode: int, ended_by: EndedBy) -> None:
        """Also after an error."""

    def on_end(self, summary: Summary) -> None:
        """After the last episode, however it ended."""
