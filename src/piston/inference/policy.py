"""A policy: observations in the robot's own keys in, its own actions out.

One runner computes for one or several robots, each with a pipeline of its own, which share batches:

    observation ── RobotPipeline.prepare ──┐              ┌── RobotPipeline.reply ── actions
                                           ├─ Runner.run ─┤
    observation ── RobotPipeline.prepare ──┘              └── RobotPipeline.reply ── actions

A model that was trained with text also returns the `subtask` that it is in, or goes on with one
that a request gives, and answers a `question`. Servers, simulation, inspection and reports use it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from piston.config import ROBOTS, DataConfig, UnknownRobot
from piston.inference.robot_pipeline import PreparedRequest, RobotPipeline
from piston.inference.runner import Runner
from piston.models.model import Model
from piston.transforms import Data


class Policy:
    """Give it a model and the pipeline it was trained with (`data`, with its statistics)."""

    def __init__(
        self,
        model: Model,
        data: DataConfig,
        *,
        metadata: Mapping[str, Any] | None = None,
        seed: int | None = None,
        subtask_interval: str | int = "1",
        **options: Any,
    ) -> None:
        """`options` are those of `Runner`: num_steps, candidates, rtc_jacobian, engine."""
        self.runner = Runner(model, **options)
        pipeline = RobotPipeline(
            data, self.runner, metadata=metadata, seed=seed, subtask_interval=subtask_interval
        )
        # A single robot has no name.
        self.robots = {"": pipeline}
        self.metadata = pipeline.metadata
        self._default: str | None = ""

    @classmethod
    def join(cls, policies: Mapping[str, Policy], default: str | None = None) -> Policy:
        """Return one policy for the robots of several that share a model, by their names.

        The field `robot` of a request says which robot asks. `default` is that of requests that do
        not say it; a single one is the default.
        """
        first = next(iter(policies.values()))
        if any(policy.model is not first.model for policy in policies.values()):
            raise ValueError("Policies of different models cannot share batches: serve each alone.")
        if default is None and len(policies) == 1:
            (default,) = policies
        joined = copy.copy(first)
        joined.robots = {name: policy.pipeline() for name, policy in policies.items()}
        joined._default = default
        about = {} if default is None else joined.pipeline().metadata
        each = {name: policy.metadata for name, policy in policies.items()}
        joined.metadata = {**about, ROBOTS: each}
        return joined

    def pipeline(self, robot: Any = None) -> RobotPipeline:
        """Return the pipeline of a robot; without a name, that of the default."""
        if "" in self.robots:
            single = self.robots[""]
            if robot is not None and str(robot).lower() != str(single.robot).lower():
                raise UnknownRobot(
                    f"The request is of robot {robot!r}; this policy drives {single.robot}."
                )
            return single
        name = self._default if robot is None else robot
        if name is None:
            raise UnknownRobot(
                f"The request does not say which robot asks. Give it the field robot, one of "
                f"{', '.join(self.robots)}, or start the server with --robot."
            )
        if not isinstance(name, str) or name not in self.robots:
            raise UnknownRobot.named(name, self.robots)
        return self.robots[name]

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        noise: np.ndarray | None = None,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """A chunk of actions, and how long it took after the device had finished.

        Explicit `noise` (horizon, action dim; in the model's space) or a `seed` make the result
        reproducible.
        """
        given = {"noise": noise, "seed": seed}
        request = {**observation, **{key: v for key, v in given.items() if v is not None}}
        return self.infer_batch([request])[0]

    def infer_batch(
        self, observations: Sequence[Mapping[str, Any] | PreparedRequest]
    ) -> list[dict[str, Any]]:
        """Answer several observations at once; each may contain its own noise or seed.

        Those that `prepare` returned are not prepared again.
        """
        started = time.perf_counter()
        requests = [
            request if isinstance(request, PreparedRequest) else self.prepare(request)
            for request in observations
        ]
        outputs = self.runner.run(requests)
        replies = [
            request.pipeline.reply(request, output)
            for request, output in zip(requests, outputs, strict=True)
        ]
        elapsed = 1_000 * (time.perf_counter() - started)
        return [{**reply, "policy_timing": {"infer_ms": elapsed}} for reply in replies]

    def prepare(self, observation: Mapping[str, Any]) -> PreparedRequest:
        """Return a row of a batch: the model's input, and the noise that it starts from.

        Raises ValueError or LookupError if the observation is wrong.
        """
        return self.pipeline(observation.get("robot")).prepare(observation)

    def to_robot(self, inputs: Data, chunk: np.ndarray) -> dict[str, Any]:
        """Return what the robot gets for a chunk of the model, or for its tokens."""
        return self.pipeline().to_robot(inputs, chunk)

    def warm_up(self) -> float:
        """Make the first inference, so that the first robot does not wait; return the seconds."""
        return self.runner.warm_up()

    def best_batch(self, most: int) -> int:
        """Measure how many requests should share one inference: at most so many."""
        return self.runner.best_batch(most)

    @property
    def model(self) -> Model:
        return self.runner.model

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def num_steps(self) -> int | None:
        """The number of denoising steps, of a model that denoises."""
        return self.runner.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self.runner.num_steps = num_steps

    @property
    def num_parameters(self) -> int:
        """How many the model has, in whatever form its weights are held."""
        return self.runner.num_parameters

    @property
    def data(self) -> DataConfig:
        """The pipeline's configuration, of the default robot."""
        return self.pipeline().data

    @property
    def robot(self) -> str | None:
        """The name of the default robot."""
        return self.pipeline().robot

    @property
    def has_sessions(self) -> bool:
        """Whether requests of one robot depend on each other: it may go on with its subtask."""
        return any(pipeline.data.subtasks for pipeline in self.robots.values())
