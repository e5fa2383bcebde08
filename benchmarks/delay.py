"""Success against delay in simulation: what a robot does while its policy computes.

    python benchmarks/delay.py PLAIN TRAINED --delays 0 8 16 32 48

PLAIN is a checkpoint that was trained as usual: its robot waits, goes on (async), or is guided.
TRAINED was trained with --max-delay. All episodes begin from the same initial states with the same
noise, and every answer arrives the same number of control steps after its request.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from common import main
from piston.cli.console import console, table
from piston.inference import Policy, load_policy
from piston.progress import ProgressBar
from piston.sim.rollouts import Execution, evaluate
from piston.sim.scores import Evaluation

NAMES: dict[Execution, str] = {
    "wait": "wait",
    "async": "go on",
    "guided": "go on, guided",
    "trained": "go on, trained",
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Success, jumps and time to success for several delays and ways to spend them."""

    # A checkpoint that was trained as usual, and one that was trained with --max-delay.
    plain: Annotated[Path, tyro.conf.Positional]
    trained: Annotated[Path, tyro.conf.Positional]
    # The simulated task.
    task: str = "aloha_transfer_cube"
    # Control steps between a request and its answer.
    delays: tuple[int, ...] = (0, 8, 16, 32, 48)
    # Steps of a chunk after which the next is asked for.
    execute_horizon: int = 48
    # Episodes, from seed 0 on.
    episodes: int = 100
    # Which ways to spend the delay.
    executions: tuple[Execution, ...] = ("wait", "async", "guided", "trained")
    # Also write the numbers to this file, as they come.
    json: Path | None = None


def run(options: Arguments) -> None:
    policies = {"plain": load_policy(options.plain), "trained": load_policy(options.trained)}
    found: dict[tuple[Execution, int], Evaluation] = {}
    rows = []
    for delay in options.delays:
        for execution in options.executions:
            policy = policies["trained" if execution == "trained" else "plain"]
            one = found[execution, delay] = _evaluate(policy, execution, delay, options)
            rows.append((str(delay), NAMES[execution], *_numbers(one)))
            if options.json is not None:
                lines = [_summary(*key, one) for key, one in found.items()]
                options.json.write_text(json.dumps(lines, indent=1))
    titles = ("delay", "meanwhile", "succeeded", "held", "s to success", "jump", "inside", "waited")
    console().print(table(titles, rows, right=titles[:1] + titles[3:]))


def _evaluate(policy: Policy, execution: Execution, delay: int, options: Arguments) -> Evaluation:
    with ProgressBar(f"{NAMES[execution]}, {delay}", "episodes", options.episodes) as bar:
        return evaluate(
            options.task,
            policy.infer_batch,
            range(options.episodes),
            execute_horizon=options.execute_horizon,
            policy_name="",
            metadata=policy.metadata,
            execution=execution,
            delay=delay,
            on_outcome=lambda _: bar.advance(1),
        )


def _seconds(one: Evaluation) -> float:
    return one.mean_of("success_step") / (one.control_hz or 1)


def _numbers(one: Evaluation) -> Sequence[str]:
    jumps = (f"{one.mean_of(name):.4f}" for name in ("seam_jump", "inner_jump"))
    waited = f"{one.mean_of('waited'):.0f}"
    held = f"{one.held.successes}"
    return (str(one.success), held, f"{_seconds(one):.2f}", *jumps, waited)


def _summary(execution: Execution, delay: int, one: Evaluation) -> dict[str, object]:
    return {
        "execution": execution,
        "delay": delay,
        "successes": one.success.successes,
        "episodes": one.success.episodes,
        "interval": one.success.interval,
        "held": one.held.successes,
        "seconds_to_success": _seconds(one),
        **{name: one.mean_of(name) for name in ("seam_jump", "inner_jump", "waited")},
        "failed_seeds": [outcome.seed for outcome in one.outcomes if not outcome.success],
    }


if __name__ == "__main__":
    main(run, Arguments)
