"""`piston report RUN`: a run as one HTML page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from piston.cli.console import console
from piston.logs import init_logging
from piston.report import write_report
from piston.report.animation import write_animation
from piston.report.evaluations import find_evaluations


@dataclasses.dataclass(frozen=True)
class ReportArguments:
    """Show a run as one HTML page: loss, successes, videos, an action chunk, transforms, times."""

    # The run's folder, as `piston runs` lists it.
    run: Annotated[Path, tyro.conf.Positional]
    # Folders that `piston eval --out` wrote; by default those directly below the run.
    eval: tuple[Path, ...] = ()
    # The page; by default report.html in the run's folder.
    out: Path | None = None
    # Seconds per stage, as `piston demo` writes them.
    stages: Path | None = None
    # A short animation of the videos besides (.webp), for pages that play no videos.
    animation: Path | None = None
    # Load the newest checkpoint, to show what it predicts.
    policy: bool = True


def run(args: list[str]) -> int:
    init_logging()
    arguments = tyro.cli(ReportArguments, args=args, prog="piston report")
    page = write_report(
        arguments.run,
        arguments.out,
        evaluations=arguments.eval,
        stages=arguments.stages,
        use_policy=arguments.policy,
    )
    _tell(page)
    if arguments.animation is not None:
        write_animation(arguments.animation, find_evaluations(arguments.run, arguments.eval))
        _tell(arguments.animation)
    return 0


def _tell(path: Path) -> None:
    size = path.stat().st_size / 1e6
    console().print(f"{path} ({size:.1f} MB)", soft_wrap=True, highlight=False)
