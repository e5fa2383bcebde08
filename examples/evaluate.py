"""Evaluate every checkpoint of a run in simulation, with a loop that you can change.

    python examples/evaluate.py checkpoints/tiny_aloha_sim/first --episodes 50

`piston eval` does the same for one policy, in several environments at once and with videos. Here
the loop is in your hands: put in an environment of yours (reset, observe, step), or another policy.
Every checkpoint gets the same initial states, and the same noise in each of them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro

import piston
from piston.inference import Policy
from piston.sim import make_environment
from piston.sim.environment import Environment
from piston.sim.scores import Rate
from piston_client import ActionChunkBroker


def main(
    run: Annotated[Path, tyro.conf.Positional],
    task: str = "aloha_transfer_cube",
    episodes: int = 50,
    execute_horizon: int | None = None,
    max_steps: int | None = None,
) -> None:
    """Evaluate every checkpoint of a run.

    Args:
        run: The folder of a run, which contains one folder per saved step.
        task: The environment, as for `piston eval`.
        episodes: Initial states per checkpoint, the seeds from 0 on.
        execute_horizon: Steps of each chunk that are executed; by default all of them.
        max_steps: End an episode after this many steps; by default the environment decides.
    """
    environment = make_environment(task)
    print("step      successes (95 % interval)")
    for step, checkpoint in checkpoints(run):
        policy = piston.load_policy(checkpoint)
        successes = 0
        for seed in range(episodes):
            successes += solves(environment, policy, seed, execute_horizon, max_steps)
        print(f"{step:<9} {Rate(successes, episodes)}")


def checkpoints(run: Path) -> Iterator[tuple[int, Path]]:
    """Yield the saved steps of a run, oldest first."""
    steps = sorted(int(folder.name) for folder in run.iterdir() if folder.name.isdecimal())
    if not steps:
        raise ValueError(f"{run} has no checkpoint; expected folders such as {run / '1000'}.")
    for step in steps:
        yield step, run / str(step)


def solves(
    environment: Environment,
    policy: Policy,
    seed: int,
    execute_horizon: int | None,
    max_steps: int | None,
) -> bool:
    """Run one episode; return whether the task was solved in any step."""
    observation = environment.reset(seed)
    agent = ActionChunkBroker(policy, execute_horizon)
    while not environment.done and environment.steps != max_steps:
        # The seed of the noise makes the result reproducible.
        request = {**observation, "seed": 1_000 * seed + environment.steps}
        environment.step(agent.infer(request)["actions"])
        observation = environment.observe()
    return environment.ever_succeeded


if __name__ == "__main__":
    tyro.cli(main)
