"""`piston runs [FOLDER]` lists runs; `piston report RUN …` shows them as an HTML page."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

import tyro

from piston.cli.command import Command, named
from piston.cli.console import UsageError, console, table


def _runs(
    folder: Annotated[Path, tyro.conf.Positional, named("[FOLDER]")] = Path("checkpoints"),
) -> None:
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
    columns = ("preset/run", "step", "loss", "newest checkpoint")
    rows = []
    for run in runs:
        step = "–" if run["step"] is None else f"{run['step'] + 1:,}"
        if run["num_train_steps"] is None:
            step += " (run.json is damaged)"
        elif run["step"] is not None:
            step += f" of {run['num_train_steps']:,}"
        loss = "–" if run["loss"] is None else f"{run['loss']:.4f}"
        newest = "none yet" if run["checkpoint"] is None else run["checkpoint"].name
        rows.append((f"{run['preset']}/{run['name']}", step, loss, newest))
    screen = console()
    title, drop = f"Runs in {folder}", ("loss", "step")
    screen.print(table(columns, rows, title=title, right=columns[1:], drop=drop))
    served = [run["checkpoint"] for run in runs if run["checkpoint"] is not None]
    if served:
        screen.print(f"Serve one: piston serve {shlex.quote(str(served[-1]))}", soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class ReportArguments:
    """Show a run as one HTML page, or compare several runs on one page.

    One run: losses, validation error, data set, evaluations, chunks, times.

    Several: results, curves and the settings that differ.
    """

    # The folder of a run (as `piston runs` lists it), or the folders of several.
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, named("RUN [RUN …]")]
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


def _report(arguments: ReportArguments) -> None:
    if not arguments.runs:
        raise UsageError("No run is given: piston report RUN. `piston runs` lists them.")
    if len(arguments.runs) > 1 and (arguments.eval or arguments.stages or arguments.animation):
        raise UsageError(
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


run_runs = Command("runs", _runs)
run_report = Command("report", ReportArguments, _report)
