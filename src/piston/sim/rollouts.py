"""Episodes with a policy in control: many environments step in one process and ask together.

    environment 1 ─┐                         ┌─ chunk ─▶ step, step, step …
    environment 2 ─┼─ observations ─▶ ask ───┼─ chunk ─▶
    environment 3 ─┘    (one batch)          └─ chunk ─▶

Every seed has an episode of its own; its outcome does not depend on which others run beside it.
Whoever answers, in this process or behind a websocket, is only a function here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from piston.client import Client, ServerError
from piston.sim.catalog import make_environment
from piston.sim.environment import (
    Environment,
    Observation,
    StepResult,
    check_evaluation_seeds,
)
from piston.sim.scores import Evaluation, Outcome, Trace

# Observations in, a chunk of the robot's actions (steps, dim) for each of them out.
Ask = Callable[[Sequence[Observation]], Sequence[np.ndarray]]
Progress = Callable[[Outcome], None]


class Watcher(Protocol):
    """Sees every step of every episode, to make videos of some.

    An episode that ended may be posed anew: nobody steps it again.
    """

    def saw(self, environment: Environment) -> None: ...

    def ended(self, environment: Environment, outcome: Outcome) -> None: ...


class BatchPolicy(Protocol):
    """A policy in this process."""

    def infer_batch(self, observations: Sequence[Any], /) -> list[dict[str, Any]]: ...


def ask_policy(policy: BatchPolicy) -> Ask:
    """All observations as one batch."""
    return lambda observations: [one["actions"] for one in policy.infer_batch(observations)]


@contextmanager
def ask_server(uri: str, connections: int) -> Iterator[tuple[Ask, str]]:
    """Every environment as a robot of its own: the server sees as many clients.

    Gives also what is asked, in words: the address and, where the server says it, the policy.
    """
    clients = [Client(uri) for _ in range(connections)]
    pool = ThreadPoolExecutor(connections)

    def ask(observations: Sequence[Observation]) -> list[np.ndarray]:
        answers = pool.map(lambda pair: pair[0].infer(pair[1]), zip(clients, observations))
        try:
            return [answer["actions"] for answer in answers]
        except ServerError as error:
            raise ValueError(f"{uri} refused an observation: {error}") from error

    try:
        name = clients[0].metadata.get("piston", {}).get("name")
        yield ask, f"{uri} ({name})" if name else uri
    finally:
        pool.shutdown()
        for client in clients:
            client.close()


class _Episode:
    """One environment, the actions that wait to be executed, and what has been done so far."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def begin(self, seed: int, prompt: str | None) -> None:
        self.environment.reset(seed)
        self.prompt = prompt or self.environment.prompt
        self.waiting: list[np.ndarray] = []
        self._starts: list[int] = []
        self._chunks: list[np.ndarray] = []
        self._executed: list[np.ndarray] = []

    def take(self, chunk: np.ndarray, execute_horizon: int) -> None:
        self._starts.append(self.environment.steps)
        self._chunks.append(chunk)
        self.waiting = list(chunk[:execute_horizon])

    def step(self) -> StepResult:
        action = self.waiting.pop(0)
        self._executed.append(action)
        return self.environment.step(action)

    def trace(self) -> Trace:
        return Trace(
            seed=self.environment.seed or 0,
            names=self.environment.action_names,
            hz=self.environment.control_hz,
            starts=tuple(self._starts),
            chunks=np.stack(self._chunks),
            executed=np.stack(self._executed),
        )

    def observe(self) -> Observation:
        # A seed for the policy's noise too: the same episode again is the same episode.
        noise_seed = 1_000_003 * (self.environment.seed or 0) + self.environment.steps
        return {**self.environment.observe(), "prompt": self.prompt, "seed": noise_seed}

    def outcome(self) -> Outcome:
        environment = self.environment
        return Outcome(
            seed=environment.seed or 0,
            prompt=self.prompt,
            success=environment.ever_succeeded,
            held=environment.held,
            steps=environment.steps,
            initial_state=environment.initial_state(),
        )


def evaluate(
    task: str,
    ask: Ask,
    seeds: Sequence[int],
    *,
    execute_horizon: int | None = None,
    policy_name: str,
    num_environments: int = 8,
    pixels: int | None = None,
    opposite: bool = False,
    watcher: Watcher | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Run one episode per seed; `opposite` gives the sentence that asks for the opposite.

    Of each chunk `execute_horizon` steps are executed; by default half of them.
    """
    check_evaluation_seeds(seeds)
    if (execute_horizon is not None and execute_horizon < 1) or num_environments < 1:
        raise ValueError("execute_horizon and num_environments must be at least 1.")
    waiting = list(reversed(seeds))
    running: list[_Episode] = []
    outcomes: dict[int, Outcome] = {}
    latencies: list[float] = []
    trace: Trace | None = None
    episodes = [
        _Episode(make_environment(task, pixels=pixels))
        for _ in range(min(num_environments, len(seeds)))
    ]
    idle = list(episodes)
    while waiting or running:
        while idle and waiting:
            episode = idle.pop()
            _begin(episode, waiting.pop(), opposite)
            running.append(episode)
        execute_horizon = _refill(running, ask, execute_horizon, latencies)
        for episode in list(running):
            result = episode.step()
            if watcher is not None:
                watcher.saw(episode.environment)
            if result.done:
                outcome = outcomes[episode.environment.seed or 0] = episode.outcome()
                if outcome.seed == seeds[0]:
                    trace = episode.trace()
                running.remove(episode)
                idle.append(episode)
                if watcher is not None:
                    watcher.ended(episode.environment, outcome)
                if progress is not None:
                    progress(outcome)
    for episode in episodes:
        episode.environment.close()
    in_order = tuple(outcomes[seed] for seed in seeds)
    return Evaluation(
        task, policy_name, execute_horizon or 0, in_order, tuple(latencies), opposite, trace=trace
    )


def _begin(episode: _Episode, seed: int, opposite: bool) -> None:
    episode.begin(seed, None)
    if opposite:
        other = episode.environment.opposite_prompt
        if other is None:
            raise ValueError(
                f"{episode.environment.prompt!r} has no opposite in the same scene. Leave out "
                "--opposite, or choose a task that has one."
            )
        episode.prompt = other


def _refill(
    running: Sequence[_Episode], ask: Ask, execute_horizon: int | None, latencies: list[float]
) -> int | None:
    """New chunks for those that have executed theirs, in one request; how much of them to do."""
    empty = [episode for episode in running if not episode.waiting]
    if not empty:
        return execute_horizon
    observations = [episode.observe() for episode in empty]
    started = time.perf_counter()
    chunks = ask(observations)
    latencies.append(time.perf_counter() - started)
    execute_horizon = execute_horizon or max(1, len(chunks[0]) // 2)
    for episode, chunk in zip(empty, chunks, strict=True):
        if len(chunk) < execute_horizon:
            raise ValueError(
                f"The policy's chunks have {len(chunk)} steps, fewer than the {execute_horizon} "
                "that are to be executed of each. Give a smaller --execute-horizon."
            )
        episode.take(chunk, execute_horizon)
    return execute_horizon
