"""`piston data check|info|convert`: check a data set, show what it holds, convert it to v3.0."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from piston.cli.console import console, table
from piston.data.check import check_dataset, readable_cameras, readable_episodes, usable
from piston.data.convert import SUFFIXES, convert_aloha_hdf5, convert_to_v30
from piston.data.format import Metadata, Problem, locate
from piston.progress import ProgressBar

_MAX_PLACES = 20
_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


@dataclasses.dataclass(frozen=True)
class Check:
    """Read a whole data set, show everything that is wrong with it and what follows from that."""

    # A folder, owner/name on the Hugging Face hub, or hf://…
    path: Annotated[str, tyro.conf.Positional]


@dataclasses.dataclass(frozen=True)
class Info:
    """Show episodes, length, features and tasks, from meta/ alone."""

    # A folder, owner/name on the Hugging Face hub, or hf://…
    path: Annotated[str, tyro.conf.Positional]


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write LeRobot v2.x or ALOHA's HDF5 episodes as v3.0. The target appears once complete."""

    # A LeRobot v2.0 or v2.1 set (folder or owner/name), or a folder of ALOHA .hdf5 episodes.
    source: Annotated[str, tyro.conf.Positional]
    # The new folder.
    target: Annotated[Path, tyro.conf.Positional]
    # The sentence of all HDF5 episodes, and of episodes of a set that name no task.
    task: str | None = None
    # Frames per second of HDF5 episodes.
    fps: float = 50
    # HDF5 images hold blue first.
    bgr: bool = False
    # How video is encoded where it has to be; by default av1, as LeRobot does.
    codec: Literal["av1", "h264"] | None = None
    # Leave out episodes that cannot be read, instead of stopping.
    skip_broken: bool = False
    # Replace the target if it exists.
    overwrite: bool = False


def run_data(args: list[str]) -> int:
    """Parse and run one sub-command; without any, show the help."""
    chosen: Check | Info | Convert = tyro.extras.subcommand_cli_from_dict(
        {"check": Check, "info": Info, "convert": Convert},
        args=args or ["--help"],
        prog="piston data",
    )
    if isinstance(chosen, Check):
        return _check(chosen.path)
    if isinstance(chosen, Info):
        return _info(chosen.path)
    return _convert(chosen)


def _check(path: str) -> int:
    screen = console()
    with ProgressBar("checking", "frames and rows") as bar:
        problems = check_dataset(path, progress=bar.show)
    if problems:
        screen.print(_problem_table(problems))
    ok = usable(problems)
    counts = ", ".join(
        f"{sum(problem.severity == severity for problem in problems)} {severity}s"
        for severity in _COLOURS
    )
    verdict = "[green]training can use it[/green]" if ok else "[red]training cannot use it[/red]"
    metadata = Metadata.read(locate(path))
    num_read, num_all = len(readable_episodes(metadata, problems)), len(metadata.episodes)
    cameras = ", ".join(readable_cameras(metadata, problems)) or "none"
    what = f"{num_read} of {num_all} episodes, cameras: {cameras}; {counts}"
    screen.print(f"{escape(path)}: {escape(what)}: {verdict}", soft_wrap=True)
    return 0 if ok else 1


def _problem_table(problems: list[Problem]) -> Table:
    """Return a table in which the same problem in many places is one row."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for problem in problems:
        key = (problem.severity, problem.what, problem.consequence)
        places.setdefault(key, []).append(problem.where)
    rows = []
    for (severity, what, consequence), where in places.items():
        more = [f"… {len(where)} places in all"] if len(where) > _MAX_PLACES else []
        listed = "\n".join([*where[:_MAX_PLACES], *more])
        rows.append((Text(severity, style=_COLOURS[severity]), listed, what, consequence))
    return table(("", "where", "what", "what happens"), rows, show_lines=True)


def _info(path: str) -> int:
    metadata = Metadata.read(locate(path, only_meta=True), files=False)
    screen = console()
    seconds, robot = metadata.total_frames / metadata.fps, metadata.robot_type or "not given"
    screen.print(
        f"[bold]{escape(path)}[/bold]  LeRobot {metadata.version}, robot {robot}\n"
        f"{len(metadata.episodes):,} episodes, {metadata.total_frames:,} frames, "
        f"{metadata.fps:g} fps, {seconds / 60:.1f} minutes"
    )
    rows = [
        (one.name, one.dtype, str(list(one.shape)), str(one.names or "")[:60])
        for one in metadata.features.values()
    ]
    screen.print(table(("feature", "dtype", "shape", "names"), rows))
    for number, text in metadata.tasks.items():
        screen.print(f"task {number}: {escape(text)}", highlight=False)
    return 0


def _convert(chosen: Convert) -> int:
    source = Path(chosen.source)
    files = source.iterdir() if source.is_dir() else [source]
    is_hdf5 = any(path.suffix in SUFFIXES for path in files)
    if not is_hdf5 and (chosen.bgr or chosen.fps != Convert.fps):
        raise ValueError("--bgr and --fps are for HDF5 episodes; a LeRobot set says its own.")
    with ProgressBar("converting", "frames") as bar:
        options: dict[str, Any] = {
            "codec": chosen.codec,
            "skip_broken": chosen.skip_broken,
            "overwrite": chosen.overwrite,
            "progress": bar.show,
        }
        if not is_hdf5:
            found = locate(chosen.source)
            conversion = convert_to_v30(found, chosen.target, task=chosen.task, **options)
        elif chosen.task is None:
            raise ValueError("HDF5 episodes do not name their task: give --task 'Fold the towel'.")
        else:
            conversion = convert_aloha_hdf5(
                source, chosen.target, chosen.task, chosen.fps, bgr=chosen.bgr, **options
            )
    screen = console()
    screen.print(
        f"Wrote {conversion.target}: {conversion.num_episodes} episodes, "
        f"{conversion.num_frames:,} frames."
    )
    for what, why in conversion.skipped.items():
        screen.print(f"[yellow]left out[/yellow] {what}: {why}")
    for feature in conversion.ignored:
        screen.print(f"[yellow]left out[/yellow] {feature}: declared, but without any data")
    if conversion.num_encoded:
        screen.print(f"{conversion.num_encoded} videos had to be encoded anew.")
    if conversion.num_retimed:
        screen.print(f"{conversion.num_retimed} episodes got new time stamps (frame / fps).")
    return 0
