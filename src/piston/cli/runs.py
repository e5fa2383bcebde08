"""`piston runs`: every run with its step, loss and newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.table import Table

from piston.cli.console import console
from piston.training.run import CONFIG, list_runs


def run(args: list[str]) -> int:
    tyro.cli(_show, args=args, prog="piston runs")
    return 0


def _show(folder: Annotated[Path, tyro.conf.Positional] = Path("checkpoints")) -> None:
    """List the runs below a folder.

    Args:
        folder: Where runs are kept (--checkpoint-base-dir of `piston train`).
    """
    runs = list_runs(folder)
    if not runs:
        raise ValueError(
            f"There are no runs in {folder}. Start one: piston train PRESET --exp-name X"
        )
    table = Table(title=escape(f"Runs in {folder}"), title_justify="left")
    for column in ("preset", "run", "step", "loss", "newest checkpoint"):
        # A path that is too long goes on in the next line: cut, it would be of no use.
        is_number = column in ("step", "loss")
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in runs:
        loss = "–" if row["loss"] is None else f"{row['loss']:.4f}"
        checkpoint = "none yet" if row["checkpoint"] is None else str(row["checkpoint"])
        names = escape(row["preset"]), escape(row["name"])
        table.add_row(*names, _progress(row), loss, escape(checkpoint))
    console().print(table)


def _progress(row: Mapping[str, Any]) -> str:
    step = "–" if row["step"] is None else f"{row['step'] + 1:,}"
    if row["num_train_steps"] is None:
        return f"{step} ({CONFIG} is damaged)"
    return step if row["step"] is None else f"{step} of {row['num_train_steps']:,}"
