"""`piston data check|info|convert`: what a data set holds, what is wrong, and a newer format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import tyro
from rich.markup import escape
from rich.table import Table

from piston.cli import data_convert
from piston.cli.console import console
from piston.data.check import check_dataset, readable_cameras, readable_episodes, usable
from piston.data.episodes import Problem
from piston.data.location import locate
from piston.data.metadata import Metadata
from piston.progress import ProgressBar

MAX_PLACES = 20
COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


def run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0
    if args[0] not in SUB_VERBS:
        raise ValueError(f"`piston data` has no {args[0]!r}.\n\n{_help()}")
    return SUB_VERBS[args[0]][0](args[1:])


def check(args: list[str]) -> int:
    path = tyro.cli(_check_argument, args=args, prog="piston data check")
    screen = console()
    with ProgressBar("checking", "frames and rows") as bar:
        problems = check_dataset(path, progress=bar.show)
    if problems:
        screen.print(_problem_table(problems))
    ok = usable(problems)
    counts = ", ".join(
        f"{sum(problem.severity == severity for problem in problems)} {severity}s"
        for severity in COLOURS
    )
    verdict = "[green]training can use it[/green]" if ok else "[red]training cannot use it[/red]"
    metadata = Metadata.read(locate(path))
    num_read, num_all = len(readable_episodes(metadata, problems)), len(metadata.episodes)
    cameras = ", ".join(readable_cameras(metadata, problems)) or "none"
    what = f"{num_read} of {num_all} episodes, cameras: {cameras}; {counts}"
    screen.print(f"{escape(path)}: {escape(what)}: {verdict}", soft_wrap=True)
    return 0 if ok else 1


def info(args: list[str]) -> int:
    path = tyro.cli(_info_argument, args=args, prog="piston data info")
    metadata = Metadata.read(locate(path, only_meta=True), files=False)
    screen = console()
    seconds, robot = metadata.total_frames / metadata.fps, metadata.robot_type or "not said"
    screen.print(
        f"[bold]{escape(path)}[/bold]  LeRobot {metadata.version}, robot {robot}\n"
        f"{len(metadata.episodes):,} episodes, {metadata.total_frames:,} frames, "
        f"{metadata.fps:g} fps, {seconds / 60:.1f} minutes"
    )
    table = Table("feature", "dtype", "shape", "names")
    for feature in metadata.features.values():
        names = "" if feature.names is None else str(feature.names)
        table.add_row(feature.name, feature.dtype, str(list(feature.shape)), names[:60])
    screen.print(table)
    for number, text in metadata.tasks.items():
        screen.print(f"task {number}: {escape(text)}", highlight=False)
    return 0


def _check_argument(path: Annotated[str, tyro.conf.Positional]) -> str:
    """Read a whole data set, tell everything that is wrong with it and what will happen.

    Args:
        path: A folder, owner/name on the Hugging Face hub, or hf://…
    """
    return path


def _info_argument(path: Annotated[str, tyro.conf.Positional]) -> str:
    """Episodes, length, features and tasks, from meta/ alone.

    Args:
        path: A folder, owner/name on the Hugging Face hub, or hf://…
    """
    return path


def _problem_table(problems: list[Problem]) -> Table:
    """The same trouble in many places is one row."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for problem in problems:
        key = (problem.severity, problem.what, problem.consequence)
        places.setdefault(key, []).append(problem.where)
    table = Table("", "where", "what", "what happens", show_lines=True)
    for (severity, what, consequence), where in places.items():
        more = f"\n… {len(where)} places in all" if len(where) > MAX_PLACES else ""
        listed = escape("\n".join(where[:MAX_PLACES])) + more
        colour = COLOURS[severity]
        table.add_row(f"[{colour}]{severity}[/]", listed, escape(what), consequence)
    return table


SUB_VERBS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "check": (check, "read a whole data set and tell what is wrong with it"),
    "info": (info, "episodes, length, features and tasks"),
    "convert": (data_convert.run, "LeRobot v2.x, or ALOHA's HDF5 episodes, to v3.0"),
}


def _help() -> str:
    rows = (f"  {verb:<8} {what}" for verb, (_, what) in SUB_VERBS.items())
    return "\n".join(["usage: piston data VERB …", "", *rows])
