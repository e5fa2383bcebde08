"""Several robots behind one model: each has its own pipeline, and they share batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piston.config import ROBOTS, UnknownRobot
from piston.inference.policy import Policy, PreparedObservation


class RobotPolicies:
    """One model that drives several robots: the field `robot` of a request says which one asks."""

    def __init__(self, policies: Mapping[str, Policy], default: str | None = None) -> None:
        """`default` is the robot of requests that do not say it; a single one is the default."""
        if default is None and len(policies) == 1:
            (default,) = policies
        self._policies, self._default = dict(policies), default
        self._first = next(iter(policies.values()))
        self.model, self.device, self.warm_up, self.best_batch = (
            getattr(self._first, name) for name in ("model", "device", "warm_up", "best_batch")
        )
        self.has_sessions = any(one.has_sessions for one in policies.values())
        about = {} if default is None else self._policy(default).metadata
        robots = {name: one.metadata for name, one in policies.items()}
        self.metadata = {**about, ROBOTS: robots}

    def _policy(self, name: Any) -> Policy:
        if name is None:
            raise UnknownRobot(
                f"The request does not say which robot asks. Give it the field robot, one of "
                f"{', '.join(self._policies)}, or start the server with --robot."
            )
        if not isinstance(name, str) or name not in self._policies:
            raise UnknownRobot.named(name, self._policies)
        return self._policies[name]

    def prepare(self, observation: Mapping[str, Any]) -> PreparedObservation:
        """Prepare an observation by the policy of its robot."""
        asking = observation.get("robot")
        return self._policy(self._default if asking is None else asking).prepare(observation)

    def infer_batch(self, observations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answer requests of any of the robots as one batch."""
        return self._first.infer_batch(
            [
                one if isinstance(one, PreparedObservation) else self.prepare(one)
                for one in observations
            ]
        )

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        return self.infer_batch([observation])[0]
