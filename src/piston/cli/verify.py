"""`piston verify PATH…`: replay reference cases; one line per quantity; fails on any error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.markup import escape

from piston.cli.console import console

if TYPE_CHECKING:
    from piston.verification import Quantity


def run_verify(args: list[str]) -> int:
    paths = tyro.cli(_paths_argument, args=args, prog="piston verify")
    from piston import verification  # imports torch

    cases = [case for path in paths for case in verification.find_cases(path)]
    quantities = [quantity for case in cases for quantity in _replay(case)]
    wrong = sum(not quantity.ok for quantity in quantities)
    console().print(
        f"\n{len(quantities)} quantities in {len(cases)} cases: "
        + (f"[red]{wrong} wrong[/red]" if wrong else "[green]all ok[/green]")
    )
    return 1 if wrong else 0


def _paths_argument(paths: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> tuple[Path, ...]:
    """Replay reference cases and compare every quantity with its expected value.

    Args:
        paths: Case folders or files, or folders that hold some.
    """
    if not paths:
        raise ValueError("Name at least one case: piston verify PATH…")
    return paths


def _replay(case: Path) -> list[Quantity]:
    from piston import verification

    screen = console()
    screen.print(f"\n[bold]{escape(str(case))}[/bold]", soft_wrap=True)
    quantities = []
    for quantity in verification.replay(case):
        quantities.append(quantity)
        verdict = "[green]ok[/green]" if quantity.ok else "[red]WRONG[/red]"
        screen.print(
            f"  {escape(quantity.name):<44} {quantity.error:>10.2e}  "
            f"tolerance {quantity.tolerance:.0e}  {verdict}  [dim]{escape(quantity.note)}[/dim]",
            highlight=False,
            soft_wrap=True,
        )
    return quantities
