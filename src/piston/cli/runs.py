"""`piston runs [FOLDER]` lists runs; `piston report RUN …` shows them as an HTML page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from piston.cli.console import console, table


def run_runs(args: list[str]) -> None:
    tyro.cli(_runs, args=args, prog="piston runs")


def _runs(folder: Annotated[Path, tyro.conf.Positional] = Path("checkpoints")) -> None:
    """List the runs below a folder.

    Args:
        folder: Where runs are kept (--checkpoint-base-dir of `piston train`).
    """
    from piston.training.run import list_runs  # imports torch, which --help does not need

    runs = list_runs(folder)
    if not runs:
        raise ValueError(
            f"There are no runs in {folder}. Start one: piston train PRESET --exp-name X"
        )
    columns = ("preset", "run", "step", "loss", "newest checkpoint")
    rows = []
    for run in runs:
        step = "–" if run["step"] is None else f"{run['step'] + 1:,}"
        if run["num_train_steps"] is None:
            step += " (run.json is damaged)"
        elif run["step"] is not None:
            step += f" of {run['num_train_steps']:,}"
        loss = "–" if run["loss"] is None else f"{run['loss']:.4f}"
        rows.append((run["preset"], run["name"], step, loss, str(run["checkpoint"] or "none yet")))
    console().print(table(columns, rows, title=f"Runs in {folder}", right=("step", "loss")))


_RUNS = tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")


@dataclasses.dataclass(frozen=True)
class ReportArguments:
    """Show a run as one HTML page, or compare several runs on one page.

    The page of a run has its losses, validation error, data set, evaluations, an action chunk,
    transforms and times. A comparison has results, curves and the settings that differ.
    """

    # The folder of a run (as `piston runs` lists it), or the folders of several.
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, _RUNS]
    # Folders that `piston eval --out` wrote; by default those directly below the run.
    eval: tuple[Path, ...] = ()
    # The page; by default report.html in the run's folder, or comparison.html in the folder that
    # contains all the runs.
    out: Path | None = None
    # Seconds per stage, as `piston demo` writes them.
    stages: Path | None = None
    # A short animation of the videos besides (.webp), for pages that play no videos.
    animation: Path | None = None
    # Load the newest checkpoint, to show what it predicts.
    policy: bool = True


def run_report(args: list[str]) -> None:
    arguments = tyro.cli(ReportArguments, args=args, prog="piston report")
    if not arguments.runs:
        raise ValueError("No run is given: piston report RUN. `piston runs` lists them.")
    if len(arguments.runs) > 1 and (arguments.eval or arguments.stages or arguments.animation):
        raise ValueError(
            "--eval, --stages and --animation are for the page of one run. A comparison shows the "
            "evaluations that are directly below each run."
        )
    from piston.report.evaluation import find_evaluations, write_animation
    from piston.report.page import write_comparison, write_report  # imports torch

    run, *others = arguments.runs
    if others:
        written = [write_comparison(arguments.runs, arguments.out)]
    else:
        page = write_report(
            run,
            arguments.out,
            evaluations=arguments.eval,
            stages=arguments.stages,
            use_policy=arguments.policy,
        )
        written = [page]
    if arguments.animation is not None:
        write_animation(arguments.animation, find_evaluations(run, arguments.eval))
        written.append(arguments.animation)
    for path in written:
        size = path.stat().st_size / 1e6
        console().print(f"{path} ({size:.1f} MB)", soft_wrap=True, highlight=False)
