"""Episodes controlled by a policy: many environments step in one process and share requests.

    environment 1 ─┐                           ┌─ chunk ─▶ step, step, step …
    environment 2 ─┼─ observations ─▶ infer ───┼─ chunk ─▶
    environment 3 ─┘    (one batch)            └─ chunk ─▶

Each seed is one episode; its outcome does not depend on the episodes that run beside it. A policy,
in this process or behind a websocket, is a function from observations to chunks here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from piston.client import Client, ServerError
from piston.data.recorder import VideoEncoding, encode_video
from piston.sim import make_environment
from piston.sim.environment import Environment, Observation, check_evaluation_seeds
from piston.sim.scores import Evaluation, Outcome, Trace, latency_percentiles

if TYPE_CHECKING:  # it imports torch, which an evaluation of a served policy does without
    from piston.sim.failures import FailureWriter

# From observations to an answer for each: a chunk of the robot's `actions` (steps, dim), and the
# `subtask` of a policy that has one.
Infer = Callable[[Sequence[Observation]], Sequence[Mapping[str, Any]]]

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


class _Episode:
    """An episode that has just started, its pending actions, and what has been executed so far."""

    def __init__(
        self,
        environment: Environment,
        seed: int,
        session: int,
        opposite: bool,
        metadata: Mapping[str, Any],
    ) -> None:
        environment.reset(seed)
        self._recorded_keys = "observation.state" in metadata.get("observation", ())
        # A policy that keeps its subtask for a while has to know where an episode begins.
        self._extra = {"session": session} if metadata.get("subtasks") else {}
        self.environment, self.seed = environment, seed
        prompt = environment.opposite_prompt if opposite else environment.prompt
        if prompt is None:
            raise ValueError(
                f"{environment.prompt!r} has no opposite in the same scene. Omit --opposite, or "
                "choose a task that has one."
            )
        self.prompt = prompt
        self.pending: list[np.ndarray] = []
        self.chunks: dict[int, np.ndarray] = {}  # by the step at which each was requested
        self.subtasks: list[str] = []  # of these chunks, if the policy has subtasks
        self.executed: list[np.ndarray] = []

    def observe(self) -> Observation:
        # The policy's noise is seeded too, so that an episode is reproducible.
        noise_seed = 1_000_003 * self.seed + self.environment.steps
        seen = self.environment.observe()
        if self._recorded_keys:
            seen = self.environment.recorded(seen)
        return {**seen, "prompt": self.prompt, "seed": noise_seed, **self._extra}

    def take(self, answer: Mapping[str, Any], execute_horizon: int) -> None:
        chunk = answer["actions"]
        if "subtask" in answer:
            self.subtasks.append(answer["subtask"])
        if len(chunk) < execute_horizon:
            raise ValueError(
                f"The policy's chunks have {len(chunk)} steps, fewer than the {execute_horizon} "
                "that are to be executed. Give a smaller --execute-horizon."
            )
        self.chunks[self.environment.steps] = chunk
        self.pending = list(chunk[:execute_horizon])

    def step(self) -> None:
        self.executed.append(self.pending.pop(0))
        self.environment.step(self.executed[-1])

    def outcome(self) -> Outcome:
        done = self.environment
        success, held = done.ever_succeeded, done.held
        return Outcome(self.seed, self.prompt, success, held, done.steps, done.initial_state())

    def trace(self) -> Trace:
        names, hz = self.environment.action_names, self.environment.control_hz
        chunks, executed = np.stack([*self.chunks.values()]), np.stack(self.executed)
        starts, subtasks = tuple(self.chunks), tuple(self.subtasks)
        return Trace(self.seed, names, hz, starts, chunks, executed, subtasks)


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
    videos: VideoWriter | None = None,
    failures: FailureWriter | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Evaluation:
    """Run one episode per seed and execute `execute_horizon` steps of each chunk (default: half).

    With `opposite` the prompt asks for the opposite of the task that is scored. If the policy's
    `metadata` say that it expects the keys of a recorded data set, as a robot that a file describes
    does, it gets these instead of the simulated robot's own.
    """
    check_evaluation_seeds(seeds)
    if (execute_horizon is not None and execute_horizon < 1) or num_environments < 1:
        raise ValueError("execute_horizon and num_environments must be at least 1.")
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
            running.append(_Episode(environment, seed, session, opposite, metadata or {}))
        if empty := [episode for episode in running if not episode.pending]:
            observations = [episode.observe() for episode in empty]
            started = time.perf_counter()
            answers = infer(observations)
            latencies.append(time.perf_counter() - started)
            execute_horizon = execute_horizon or max(1, len(answers[0]["actions"]) // 2)
            for episode, seen, answer in zip(empty, observations, answers, strict=True):
                episode.take(answer, execute_horizon)
                if failures is not None:
                    failures.add_request(episode.environment, seen, answer["actions"])
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
