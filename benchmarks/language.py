"""What a policy writes, in simulation: its subtasks, its answers, what that costs and changes.

    python benchmarks/language.py CHECKPOINT --task aloha_transfer_cube

On starts that no recording uses, the scripted expert moves the robot. The policy is asked at every
few frames which subtask it is in, and answers the questions that the simulator's state gives. The
last table is the time per chunk with the text written, given and absent, in turns.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from common import main
from piston.cli.console import console, table
from piston.inference import Policy, load_policy
from piston.progress import ProgressBar
from piston.sim import make_environment, make_expert
from piston.sim.environment import Environment, Expert
from piston.sim.labels import border_distance
from piston.sim.scores import Rate

BATCH = 16


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Subtasks and answers of a policy in simulation."""

    # A checkpoint whose policy writes text.
    checkpoint: Annotated[Path, tyro.conf.Positional]
    # The simulated task.
    task: str = "aloha_transfer_cube"
    # The robot's name, if the checkpoint is of several.
    robot: str | None = None
    # Starts, from seed 0 on.
    starts: int = 20
    # A frame is asked about every so many steps.
    stride: int = 5
    # Frames closer than this to a border between two subtasks are counted separately.
    border: int = 5
    # Ask the simulator's questions as well: for a policy that was trained on them.
    questions: bool = False
    # Also write the numbers to this file.
    json: Path | None = None


@dataclasses.dataclass(frozen=True)
class Moment:
    """What the robot sees at one frame of a demonstration, and what is true of it."""

    observation: dict[str, Any]
    subtask: str
    questions: list[tuple[str, str]]
    # Frames to the nearest border between two subtasks.
    distance: int


def moments(environment: Environment, expert: Expert, seed: int, stride: int) -> Iterator[Moment]:
    """Yield every `stride`-th frame of a demonstration."""
    environment.reset(seed)
    expert.start(environment)
    seen, subtasks = {}, []
    while not environment.done and (step := expert.act()) is not None:
        if len(subtasks) % stride == 0:
            asked = [(one.question, one.answer) for one in environment.questions()]
            seen[len(subtasks)] = {**environment.observe(), "prompt": environment.prompt}, asked
        subtasks.append(step.subtask)
        environment.step(step.executed)
    distances = border_distance(subtasks)
    for frame, (observation, asked) in seen.items():
        yield Moment(observation, subtasks[frame], asked, int(distances[frame]))


def in_batches(policy: Policy, requests: Sequence[dict[str, Any]], key: str) -> list[str]:
    answers: list[str] = []
    for begin in range(0, len(requests), BATCH):
        answers += [one[key] for one in policy.infer_batch(requests[begin : begin + BATCH])]
    return answers


def rate(found: Sequence[bool]) -> str:
    return str(Rate(sum(found), len(found)))


def subtasks(policy: Policy, seen: Sequence[Moment], border: int) -> dict[str, str]:
    written = in_batches(policy, [one.observation for one in seen], "subtask")
    right = [text == one.subtask for text, one in zip(written, seen)]
    inner = [one.distance > border for one in seen]
    rows = {
        "all frames": rate(right),
        f"more than {border} frames from a border": rate([r for r, i in zip(right, inner) if i]),
    }
    for text in dict.fromkeys(one.subtask for one in seen):
        own = [r for r, i, one in zip(right, inner, seen) if i and one.subtask == text]
        rows[f"  {text}"] = rate(own)
    return rows


def questions(policy: Policy, seen: Sequence[Moment]) -> dict[str, str]:
    asked = [(one, *pair) for one in seen for pair in one.questions]
    requests = [{**one.observation, "question": question} for one, question, _ in asked]
    answers = in_batches(policy, requests, "answer")
    right: dict[str, list[bool]] = collections.defaultdict(list)
    truth: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for (_, question, answer), found in zip(asked, answers):
        right[question].append(found == answer)
        truth[question][answer] += 1
    rows = {"all questions": rate([one for each in right.values() for one in each])}
    for question, each in right.items():
        usual = truth[question].most_common(1)[0][1] / len(each)
        rows[f"  {question}"] = f"{rate(each)}; the most frequent answer: {usual:.0%}"
    return rows


def timings(policy: Policy, seen: Sequence[Moment], repeats: int = 20) -> dict[str, float]:
    """Return milliseconds per chunk of a single request: the median over requests, in turns."""
    kinds: dict[str, list[float]] = {"text is written": [], "text is given": []}
    for one in seen[:repeats]:
        for kind, seconds in kinds.items():
            given = {"subtask": one.subtask} if kind == "text is given" else {}
            begun = time.perf_counter()
            policy.infer({**one.observation, **given})
            seconds.append(time.perf_counter() - begun)
    return {kind: 1e3 * float(np.median(seconds)) for kind, seconds in kinds.items()}


def steering(policy: Policy, seen: Sequence[Moment]) -> dict[str, str]:
    """Return how far chunks move apart if another subtask is given, in units of the noise.

    The unit is the mean distance of chunks that start from different noise. The subtask that is
    given is that of another moment of the demonstration.
    """
    texts = list(dict.fromkeys(one.subtask for one in seen))
    apart: dict[str, list[float]] = {text: [] for text in texts}
    for one in seen[:: max(1, len(seen) // 40)]:
        draws = [{**one.observation, "subtask": one.subtask, "seed": seed} for seed in range(4)]
        others = [{**one.observation, "subtask": text, "seed": 0} for text in texts]
        chunks = [answer["actions"] for answer in policy.infer_batch([*draws, *others])]
        spread = np.mean([np.abs(chunk - chunks[0]).mean() for chunk in chunks[1:4]])
        for text, chunk in zip(texts, chunks[4:]):
            if text != one.subtask:
                apart[text].append(float(np.abs(chunk - chunks[0]).mean() / spread))
    return {f"given: {text}": f"{np.median(each):.1f}" for text, each in apart.items() if each}


def run(options: Arguments) -> None:
    policy = load_policy(options.checkpoint, robot=options.robot)
    environment, expert = make_environment(options.task), make_expert(options.task)
    seen: list[Moment] = []
    with ProgressBar("demonstrating", "starts", options.starts) as bar:
        for seed in range(options.starts):
            seen += moments(environment, expert, seed, options.stride)
            bar.advance(1)
    result: dict[str, dict[str, Any]] = {}
    if policy.data.subtasks:
        result["subtasks that are right"] = subtasks(policy, seen, options.border)
        result["milliseconds per chunk"] = {
            kind: f"{ms:.1f}" for kind, ms in timings(policy, seen).items()
        }
        result["another subtask, in spreads over noise"] = steering(policy, seen)
    if options.questions:
        result["answers that are right"] = questions(policy, seen)
    for title, rows in result.items():
        console().print(table(("", title), [*rows.items()], right=(title,)))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(run, Arguments)
