"""Try to break Piston for about ten minutes.

    make stress
    PYTHONPATH=benchmarks:. python tests/stress --scale 0.1 fuzz    one part, a tenth of its time

Every part runs, also after one that failed; then one table is printed. The exit code is 1 if a line
of it failed.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Annotated

import tyro
from rich.text import Text

import files
import hostile
import kills
import serving
from piston.cli import run_command
from piston.cli.console import console, table
from piston.progress import ProgressBar
from piston.suggestions import did_you_mean
from rows import Part, Row

logger = logging.getLogger(__name__)

PARTS = [*serving.PARTS, *kills.PARTS, *files.PARTS, *hostile.PARTS]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Try to break Piston, and print a table of what came of it."""

    # The parts to run; by default all.
    parts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    # Changes what is sent, damaged and killed, and when.
    seed: int = 0
    # Of the usual time of each part; 0.1 is a quick look.
    scale: float = 1.0


def run(options: Arguments) -> int:
    logging.getLogger("piston_client").setLevel(logging.ERROR)
    rows = [row for part in _chosen(options.parts) for row in _run_part(part, options)]
    marks = {True: Text("yes", style="green"), False: Text("NO", style="bold red")}
    lines = [
        (row.attempt, f"{row.count:,}", row.found, row.required, marks[row.ok]) for row in rows
    ]
    columns = ("attempt", "count", "result", "required", "ok")
    console().print(table(columns, lines, right=("count",)))
    return 0 if all(row.ok for row in rows) else 1


def _chosen(names: tuple[str, ...]) -> list[Part]:
    known = {part.name: part for part in PARTS}
    for name in names:
        if name not in known:
            raise ValueError(
                f"No part is named {name!r}.{did_you_mean(name, known)} The parts are: "
                f"{', '.join(known)}."
            )
    return [known[name] for name in names or known]


def _run_part(part: Part, options: Arguments) -> list[Row]:
    seconds = part.seconds * options.scale
    logger.info("%s, about %.0f s", part.name, seconds)
    with ProgressBar(part.name, "s", round(seconds)) as bar:
        try:
            rows = part.run(seconds, options.seed, bar.show)
            # Where nothing was tried, nothing was shown.
            return [row._replace(ok=row.ok and row.count > 0) for row in rows]
        except Exception as error:
            logger.exception("The part %r did not finish.", part.name)
            return [Row(part.name, 0, f"{type(error).__name__}: {error}", "finishes", ok=False)]


if __name__ == "__main__":
    raise SystemExit(run_command(lambda: run(tyro.cli(Arguments))))
