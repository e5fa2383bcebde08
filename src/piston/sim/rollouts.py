"""Episodes controlled by a policy: many environments step in one process and share requests.

    environment 1 ─┐                           ┌─ chunk ─▶ step, step, step …
    environment 2 ─┼─ observations ─▶ infer ───┼─ chunk ─▶
    environment 3 ─┘    (one batch)            └─ chunk ─▶

Each seed is one episode; its outcome does not depend on the episodes that run beside it. A policy,
in this process or behind a websocket, is a function from observations to chunks here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from piston.data.record.encoding import VideoEncoding, encode_video
from piston.sim import make_environment
from piston.sim.environment import Environment, Observation, check_evaluation_seeds
from piston.sim.scores import Evaluation, Outcome, Trace, latency_percentiles
from piston_client import AsyncChunkBroker, Client, RealTimeBroker, ServerError

if TYPE_CHECKING:  # it imports torch, which an evaluation of a served policy does without
    from piston.sim.failures import FailureWriter

# From observations to an answer for each: a chunk of the robot's `actions` (steps, dim), and the
# `subtask` of a policy that has one.
Infer = Callable[[Sequence[Observation]], Sequence[Mapping[str, Any]]]
# What a robot does while the policy computes: it waits, goes on with its chunk, or does that with
# real-time chunking of one of its kinds.
Execution = Literal["wait", "async", "guided", "trained"]

_VIDEO_HEIGHT, _VIDEO_WIDTH = 240, 320
_VIDEO_FPS = 12.5
_VIDEO = VideoEncoding("h264", g=250, crf=27, preset="veryfast")


@contextmanager
def infer_with_server(
    uri: str, connections: int, robot: str | None = None
) -> Iterator[tuple[Infer, str, Mapping[str, Any]]]:
    """Connect each environment as a client of its own; `robot` names it to the server.

    Yield also a name for the results (the address and, if the server tells it, the policy), and
    the policy's metadata.
    """
    clients = [Client(uri, robot=robot) for _ in range(connections)]
    pool = ThreadPoolExecutor(connections)

    def infer(observations: Sequence[Observation]) -> list[Mapping[str, Any]]:
        # A session stays on the connection of its environment, where the policy knows it.
        numbers = [one.get("session", i) % connections for i, one in enumerate(observations)]
        asking = [clients[number] for number in numbers]
        answers = pool.map(lambda pair: pair[0].infer(pair[1]), zip(asking, observations))
        try:
            return list(answers)
        except ServerError as error:
            raise ValueError(f"{uri} rejected an observation: {error}") from error

    try:
        metadata = clients[0].metadata
        name = metadata.get("piston", {}).get("name")
        yield infer, f"{uri} ({name})" if name else uri, metadata
    finally:
        pool.shutdown()
        for client in clients:
            client.close()


class _Asked(NamedTuple):
    """A request of an episode's broker."""

    observation: Observation
    step: int
    answer: Future[Mapping[str, Any]]


class _Episode:
    """An episode that has just started, its broker, and what has been executed so far.

    The broker is the one that a robot would use; here the simulation says when an answer arrives.
    """

    def __init__(
        self,
        environment: Environment,
        seed: int,
        session: int,
        settings: _Settings,
    ) -> None:
        environment.reset(seed)
        self.metadata, self.settings = settings.metadata, settings
        self._recorded_keys = "observation.state" in self.metadata.get("observation", ())
        # A policy that keeps its subtask for a while has to know where an episode begins.
        self._extra = {"session": session} if self.metadata.get("subtasks") else {}
        self.environment, self.seed = environment, seed
        prompt = environment.opposite_prompt if settings.opposite else environment.prompt
        if prompt is None:
            raise ValueError(
                f"{environment.prompt!r} has no opposite in the same scene. Omit --opposite, or "
                "choose a task that has one."
            )
        self.prompt = prompt
        self.broker = settings.make_broker(self)
        self.request: _Asked | None = None  # that is not answered yet
        self._arriving: tuple[int, _Asked, Mapping[str, Any]] | None = None
        self.chunks: dict[int, np.ndarray] = {}  # by the step at which each was requested
        self.subtasks: list[str] = []  # of these chunks, if the policy has subtasks
        self.executed: list[np.ndarray] = []
        self._asked_at: list[int | None] = []  # of the chunk of each step; None: it waited
        self._waited = 0
        self._uncertainty: dict[str, list[float]] = {}

    def submit(self, observation: Observation) -> Future[Mapping[str, Any]]:
        """Take a request of the broker; `answer` answers it."""
        self.request = _Asked(observation, self.environment.steps, Future())
        return self.request.answer

    def ask(self) -> None:
        """Let the broker see what has arrived, and ask if it is time to."""
        if self._arriving is not None and self.environment.steps >= self._arriving[0]:
            self._deliver()
        self.broker.ask(self._observe() if self.broker.is_due else {})

    def _observe(self) -> Observation:
        # The policy's noise is seeded too, so that an episode is reproducible.
        noise_seed = 1_000_003 * self.seed + self.environment.steps
        seen = self.environment.observe()
        if self._recorded_keys:
            seen = self.environment.recorded(seen)
        return {**seen, "prompt": self.prompt, "seed": noise_seed, **self._extra}

    def answer(self, result: Mapping[str, Any], delay: int) -> None:
        """Answer the request. The robot gets it so many steps later, at first immediately."""
        assert self.request is not None
        asked, self.request = self.request, None
        chunk = result["actions"]
        wanted = self.settings.execute_horizon or max(1, len(chunk) // 2)
        if len(chunk) < wanted:
            raise ValueError(
                f"The policy's chunks have {len(chunk)} steps, fewer than the {wanted} "
                "that are to be executed. Give a smaller --execute-horizon."
            )
        if "subtask" in result:
            self.subtasks.append(result["subtask"])
        for name, value in result.get("uncertainty", {}).items():
            self._uncertainty.setdefault(name, []).append(value)
        result = {**result, "asked_at": asked.step}  # tells chunks apart
        if self.settings.execution == "wait":
            result["actions"] = chunk[:wanted]
        is_first = not self.chunks
        self.chunks[asked.step] = chunk
        self._arriving = (asked.step + (0 if is_first else delay), asked, result)
        if self.environment.steps >= self._arriving[0]:
            self._deliver()

    def _deliver(self) -> None:
        assert self._arriving is not None
        _, asked, result = self._arriving
        self._arriving = None
        asked.answer.set_result(result)

    def step(self) -> None:
        done = self.broker.act()
        action = done["actions"]
        if done.get("held"):
            self._waited += 1
            action = self.environment.resting_action(action)
        self.executed.append(action)
        self._asked_at.append(None if done.get("held") else done["asked_at"])
        self.environment.step(action)

    def outcome(self) -> Outcome:
        done = self.environment
        jumps = np.abs(np.diff(self.executed, axis=0)).max(axis=1, initial=0)
        # Onto another chunk, also after waiting for it, and within one.
        kinds = [
            None if now is None else now != before
            for before, now in itertools.pairwise(self._asked_at)
        ]
        seam, inner = (
            float(np.mean(part)) if (part := jumps[[one is kind for one in kinds]]).size else None
            for kind in (True, False)
        )
        return Outcome(
            *(self.seed, self.prompt, done.ever_succeeded, done.held, done.steps),
            *(done.initial_state(), done.success_step, seam, inner, self._waited),
            {name: float(np.mean(values)) for name, values in self._uncertainty.items()},
        )

    def trace(self) -> Trace:
        names, hz = self.environment.action_names, self.environment.control_hz
        chunks, executed = np.stack([*self.chunks.values()]), np.stack(self.executed)
        starts, subtasks = tuple(self.chunks), tuple(self.subtasks)
        return Trace(self.seed, names, hz, starts, chunks, executed, subtasks)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What all episodes of an evaluation have in common."""

    metadata: Mapping[str, Any]
    opposite: bool
    execute_horizon: int | None
    execution: Execution
    delay: int | None

    def make_broker(self, policy: Any) -> AsyncChunkBroker:
        """Return the broker of an episode, which asks `policy`."""
        if self.execution == "wait":
            return _WaitingBroker(policy)
        if self.execution == "async":
            return AsyncChunkBroker(policy, self.execute_horizon)
        return RealTimeBroker(
            policy, self.execute_horizon, initial_delay=self.delay, kind=self.execution
        )


class _WaitingBroker(AsyncChunkBroker):
    """Asks when its chunk is used up, and holds the last action until the answer arrives."""

    default_share = 1.0
    delay = None


def evaluate(
    task: str,
    infer: Infer,
    seeds: Sequence[int],
    *,
    execute_horizon: int | None = None,
    policy_name: str,
    metadata: Mapping[str, Any] | None = None,
    num_environments: int = 8,
    pixels: int | None = None,
    opposite: bool = False,
    execution: Execution = "wait",
    delay: int | None = 0,
    videos: VideoWriter | None = None,
    failures: FailureWriter | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Evaluation:
    """Run one episode per seed and execute `execute_horizon` steps of each chunk (default: half).

    An answer arrives `delay` control steps after its request; None: as many as the inference took.
    Meanwhile the robot waits, or goes on with its chunk (`execution`). The first chunk of an
    episode is there at once. With `opposite` the prompt asks for the opposite of the task that is
    scored. If the policy's `metadata` say that it expects the keys of a recorded data set, as a
    robot that a file describes does, it gets these instead of the simulated robot's own.
    """
    check_evaluation_seeds(seeds)
    if (execute_horizon is not None and execute_horizon < 1) or num_environments < 1:
        raise ValueError("execute_horizon and num_environments must be at least 1.")
    if delay is None and num_environments > 1:
        raise ValueError("A delay that is measured needs one environment at a time.")
    settings = _Settings(metadata or {}, opposite, execute_horizon, execution, delay)
    count = min(num_environments, len(seeds))
    environments = [make_environment(task, pixels=pixels) for _ in range(count)]
    idle, waiting = list(environments), list(reversed(seeds))
    running: list[_Episode] = []
    outcomes: dict[int, Outcome] = {}
    latencies: list[float] = []
    trace: Trace | None = None
    while waiting or running:
        while idle and waiting:
            environment, seed = idle.pop(), waiting.pop()
            # One for each episode; modulo their number it is the environment's.
            session = seed * count + environments.index(environment)
            running.append(_Episode(environment, seed, session, settings))
        for episode in running:
            episode.ask()
        if asking := [episode for episode in running if episode.request is not None]:
            observations = [one.request.observation for one in asking if one.request is not None]
            started = time.perf_counter()
            answers = infer(observations)
            latencies.append(time.perf_counter() - started)
            for episode, seen, answer in zip(asking, observations, answers, strict=True):
                late = delay
                if late is None:
                    late = math.ceil(latencies[-1] * episode.environment.control_hz)
                episode.answer(answer, late)
                if failures is not None:
                    failures.add_request(episode.environment, seen, answer["actions"])
            execute_horizon = execute_horizon or max(1, len(answers[0]["actions"]) // 2)
        for episode in list(running):
            episode.step()
            if videos is not None:
                videos.add_step(episode.environment)
            if episode.environment.done:
                outcome = outcomes[episode.seed] = episode.outcome()
                if episode.seed == seeds[0]:
                    trace = episode.trace()
                running.remove(episode)
                idle.append(episode.environment)
                if videos is not None:
                    videos.end_episode(episode.environment, outcome)
                if failures is not None:
                    failures.end_episode(episode.environment, outcome, execute_horizon or 1)
                if on_outcome is not None:
                    on_outcome(outcome)
    for environment in environments:
        environment.close()
    return Evaluation(
        *(task, policy_name, execute_horizon or 0, tuple(outcomes[seed] for seed in seeds)),
        *(latency_percentiles(latencies), opposite),
        execution=execution,
        delay=delay,
        control_hz=environments[0].control_hz,
        trace=trace,
    )


class VideoWriter:
    """Writes videos of the first failures and the first successes.

    While an episode runs only its poses are stored; images are rendered once its outcome is known.
    """

    def __init__(self, folder: Path, of_each: int = 3) -> None:
        self._folder, self._of_each = folder, of_each
        self._poses: dict[int, list[np.ndarray]] = {}
        self._kept: Counter[bool] = Counter()
        self.written: list[Path] = []

    def add_step(self, environment: Environment) -> None:
        wants_more = any(self._kept[kind] < self._of_each for kind in (False, True))
        if wants_more and environment.steps % _stride(environment) == 0:
            self._poses.setdefault(environment.seed or 0, []).append(environment.pose())

    def end_episode(self, environment: Environment, outcome: Outcome) -> None:
        poses = self._poses.pop(outcome.seed, [])
        if not poses or self._kept[outcome.success] >= self._of_each:
            return
        self._kept[outcome.success] += 1
        kind = "success" if outcome.success else "failure"
        path = self._folder / f"{kind}_seed{outcome.seed}.mp4"

        def images() -> Iterator[np.ndarray]:
            for pose in poses:
                environment.set_pose(pose)
                yield environment.render(_VIDEO_HEIGHT, _VIDEO_WIDTH)

        self._folder.mkdir(parents=True, exist_ok=True)
        encode_video(images(), path, environment.control_hz / _stride(environment), _VIDEO)
        self.written.append(path)


def _stride(environment: Environment) -> int:
    return max(1, round(environment.control_hz / _VIDEO_FPS))
