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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np

from piston.client import Client, ServerError
from piston.sim import make_environment
from piston.sim.environment import (
    Environment,
    Observation,
    StepResult,
    check_evaluation_seeds,
)
from piston.sim.scores import Evaluation, Outcome, Trace, latency_percentiles

# From observations to a chunk of the robot's actions (steps, dim) for each.
Infer = Callable[[Sequence[Observation]], Sequence[np.ndarray]]

_VIDEO_HEIGHT, _VIDEO_WIDTH = 240, 320
_VIDEO_FPS = 12.5


class BatchPolicy(Protocol):
    """A policy in this process."""

    def infer_batch(self, observations: Sequence[Any], /) -> list[dict[str, Any]]: ...


def infer_with_policy(policy: BatchPolicy) -> Infer:
    """Infer on all observations as one batch."""
    return lambda observations: [one["actions"] for one in policy.infer_batch(observations)]


@contextmanager
def infer_with_server(uri: str, connections: int) -> Iterator[tuple[Infer, str]]:
    """Connect each environment as a client of its own.

    Yield also a name for the results: the address and, if the server tells it, the policy.
    """
    clients = [Client(uri) for _ in range(connections)]
    pool = ThreadPoolExecutor(connections)

    def infer(observations: Sequence[Observation]) -> list[np.ndarray]:
        answers = pool.map(lambda pair: pair[0].infer(pair[1]), zip(clients, observations))
        try:
            return [answer["actions"] for answer in answers]
        except ServerError as error:
            raise ValueError(f"{uri} rejected an observation: {error}") from error

    try:
        name = clients[0].metadata.get("piston", {}).get("name")
        yield infer, f"{uri} ({name})" if name else uri
    finally:
        pool.shutdown()
        for client in clients:
            client.close()


class _Episode:
    """One environment, its pending actions, and what has been executed so far."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def begin(self, seed: int, prompt: str | None) -> None:
        self.environment.reset(seed)
        self.prompt = prompt or self.environment.prompt
        self.pending: list[np.ndarray] = []
        self._starts: list[int] = []
        self._chunks: list[np.ndarray] = []
        self._executed: list[np.ndarray] = []

    def take(self, chunk: np.ndarray, execute_horizon: int) -> None:
        self._starts.append(self.environment.steps)
        self._chunks.append(chunk)
        self.pending = list(chunk[:execute_horizon])

    def step(self) -> StepResult:
        action = self.pending.pop(0)
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
        # The policy's noise is seeded too, so that an episode is reproducible.
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
    infer: Infer,
    seeds: Sequence[int],
    *,
    execute_horizon: int | None = None,
    policy_name: str,
    num_environments: int = 8,
    pixels: int | None = None,
    opposite: bool = False,
    videos: VideoWriter | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Evaluation:
    """Run one episode per seed and execute `execute_horizon` steps of each chunk (default: half).

    With `opposite` the prompt asks for the opposite of the task that is scored.
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
        execute_horizon = _refill(running, infer, execute_horizon, latencies)
        for episode in list(running):
            result = episode.step()
            if videos is not None:
                videos.add_step(episode.environment)
            if result.done:
                outcome = outcomes[episode.environment.seed or 0] = episode.outcome()
                if outcome.seed == seeds[0]:
                    trace = episode.trace()
                running.remove(episode)
                idle.append(episode)
                if videos is not None:
                    videos.end_episode(episode.environment, outcome)
                if on_outcome is not None:
                    on_outcome(outcome)
    for episode in episodes:
        episode.environment.close()
    return Evaluation(
        task,
        policy_name,
        execute_horizon or 0,
        tuple(outcomes[seed] for seed in seeds),
        latency_percentiles(latencies),
        opposite,
        trace=trace,
    )


def _begin(episode: _Episode, seed: int, opposite: bool) -> None:
    episode.begin(seed, None)
    if opposite:
        other = episode.environment.opposite_prompt
        if other is None:
            raise ValueError(
                f"{episode.environment.prompt!r} has no opposite in the same scene. Omit "
                "--opposite, or choose a task that has one."
            )
        episode.prompt = other


def _refill(
    running: Sequence[_Episode], infer: Infer, execute_horizon: int | None, latencies: list[float]
) -> int | None:
    """Request new chunks for the episodes without pending actions; return the execute horizon."""
    empty = [episode for episode in running if not episode.pending]
    if not empty:
        return execute_horizon
    observations = [episode.observe() for episode in empty]
    started = time.perf_counter()
    chunks = infer(observations)
    latencies.append(time.perf_counter() - started)
    execute_horizon = execute_horizon or max(1, len(chunks[0]) // 2)
    for episode, chunk in zip(empty, chunks, strict=True):
        if len(chunk) < execute_horizon:
            raise ValueError(
                f"The policy's chunks have {len(chunk)} steps, fewer than the {execute_horizon} "
                "that are to be executed. Give a smaller --execute-horizon."
            )
        episode.take(chunk, execute_horizon)
    return execute_horizon


# -- videos


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
        frames = []
        for pose in poses:
            environment.set_pose(pose)
            frames.append(environment.render(_VIDEO_HEIGHT, _VIDEO_WIDTH))
        write_mp4(path, frames, environment.control_hz / _stride(environment))
        self.written.append(path)


def _stride(environment: Environment) -> int:
    return max(1, round(environment.control_hz / _VIDEO_FPS))


def write_mp4(path: Path, frames: list[np.ndarray], fps: float) -> None:
    """Write H.264 that every browser plays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "27", "preset": "veryfast"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
