"""`piston eval TASK --policy DIR|ws://…`: how often a policy succeeds in simulation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from piston.cli.console import console
from piston.inference import load_policy
from piston.progress import ProgressBar
from piston.sim.rollouts import Ask, ask_policy, ask_server, evaluate
from piston.sim.scores import Evaluation, Outcome, parse_seeds
from piston.sim.videos import VideoWatcher


@dataclasses.dataclass(frozen=True)
class EvalArguments:
    """Let a policy drive a simulated robot on fixed seeds and count successes."""

    # The environment, such as aloha_transfer_cube or metaworld:tiny.
    task: Annotated[str, tyro.conf.Positional]
    # A checkpoint's folder, or the address of a server (ws://127.0.0.1:8000).
    policy: str
    # Starts, each its own episode: a range 0..49 or a list 3,7,9. By default as many as --episodes,
    # or 0..49.
    seeds: str | None = None
    # Only the first so many of the seeds.
    episodes: int | None = None
    # Steps of a chunk that are executed before the next is asked for; by default half of them.
    execute_horizon: int | None = None
    # Environments that step side by side and ask as one batch.
    num_environments: int = 8
    # The side of the camera images; by default the environment's own.
    pixels: int | None = None
    # Give the sentence that asks for the opposite of what is counted.
    opposite: bool = False
    # Write videos of the first failures and successes.
    video: bool = False
    # Where results go.
    out: Path = Path("runs/eval")


def run(args: list[str]) -> int:
    arguments = tyro.cli(EvalArguments, args=args, prog="piston eval")
    seeds = _seeds(arguments)
    watcher = VideoWatcher(arguments.out / "videos") if arguments.video else None
    with contextlib.ExitStack() as stack:
        ask, policy_name = _who_answers(arguments, len(seeds), stack)
        keep = stack.enter_context(_kept(arguments.out / "outcomes.jsonl"))
        bar = stack.enter_context(ProgressBar(arguments.task, "episodes", len(seeds), after=0))
        good = 0

        def told(outcome: Outcome) -> None:
            nonlocal good
            good += outcome.success
            keep(outcome)
            bar.advance(1, f"{good} succeeded")

        evaluation = evaluate(
            arguments.task,
            ask,
            seeds,
            execute_horizon=arguments.execute_horizon,
            policy_name=policy_name,
            num_environments=arguments.num_environments,
            pixels=arguments.pixels,
            opposite=arguments.opposite,
            watcher=watcher,
            progress=told,
        )
        films = [] if watcher is None else watcher.written
        _remove_others(arguments.out / "videos", films)
        names = tuple(str(film.relative_to(arguments.out)) for film in films)
        dataclasses.replace(evaluation, videos=names).write(arguments.out / "results.json")
    show(evaluation, arguments.out)
    return 0


def _seeds(arguments: EvalArguments) -> list[int]:
    count = arguments.episodes
    if count is not None and count < 1:
        raise ValueError(f"--episodes is {count}; expected at least 1.")
    if arguments.seeds is None:
        return list(range(50 if count is None else count))
    seeds = list(parse_seeds(arguments.seeds))
    if count is not None and count > len(seeds):
        raise ValueError(f"--episodes is {count}, but --seeds names only {len(seeds)}.")
    return seeds[:count]


@contextlib.contextmanager
def _kept(path: Path) -> Iterator[Callable[[Outcome], None]]:
    """Every episode is in a file once it has ended; the file goes when the results are there.

    What an earlier evaluation has left there stays until this one has an episode of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    num_kept = 0

    def keep(outcome: Outcome) -> None:
        nonlocal num_kept
        with path.open("a" if num_kept else "w", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        num_kept += 1

    try:
        yield keep
    except BaseException as error:
        if num_kept:
            error.add_note(f"The {num_kept} episodes that had ended are in {path}.")
        raise
    path.unlink(missing_ok=True)


def _remove_others(folder: Path, films: Collection[Path]) -> None:
    """What an earlier evaluation filmed belongs to its results, which are about to be replaced."""
    for path in (*folder.glob("success_seed*.mp4"), *folder.glob("failure_seed*.mp4")):
        if path not in films:
            path.unlink()


def _who_answers(
    arguments: EvalArguments, num_episodes: int, stack: contextlib.ExitStack
) -> tuple[Ask, str]:
    if arguments.policy.startswith(("ws://", "wss://")):
        connections = min(arguments.num_environments, num_episodes)
        return stack.enter_context(ask_server(arguments.policy, connections))
    return ask_policy(load_policy(arguments.policy)), arguments.policy


def show(evaluation: Evaluation, out: Path) -> None:
    sentence = ", asked for the opposite" if evaluation.opposite else ""
    screen = console()
    screen.print(f"{evaluation.task}, {evaluation.policy}{sentence}", soft_wrap=True, markup=False)
    table = Table()
    table.add_column("")
    table.add_column("successes (95 % interval)", justify="right")
    table.add_row("fulfilled at some time", str(evaluation.success))
    table.add_row("still so at the end", str(evaluation.held))
    per_prompt = evaluation.per_prompt()
    if len(per_prompt) > 1:
        for prompt, rate in per_prompt.items():
            table.add_row(f"  {prompt}", str(rate))
    screen.print(table)
    failed = [str(outcome.seed) for outcome in evaluation.outcomes if not outcome.success]
    screen.print(f"failed seeds: {', '.join(failed) or 'none'}")
    times = "  ".join(f"{p} % {1e3 * evaluation.latency(p):.0f} ms" for p in (50, 90, 99))
    screen.print(f"a request took: {times}")
    screen.print(f"every episode with its seed and start: {out / 'results.json'}")
