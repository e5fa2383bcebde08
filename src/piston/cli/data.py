"""`piston data check|info|convert`: check a data set, show what it holds, convert it to v3.0.

What reads data sets is imported where it is used: --help does without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.markup import escape
from rich.text import Text

from piston.cli.command import Command, named
from piston.cli.console import console, table
from piston.progress import ProgressBar

if TYPE_CHECKING:
    from rich.table import Table

    from piston.data.problems import Problem, ProblemGroup

_HDF5_FPS = 50.0
_SHOWN_QUESTIONS = 5
_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


def _check(path: Annotated[str, tyro.conf.Positional, named("DATASET|PRESET")]) -> int:
    """Read a whole data set; show what is wrong with it and what follows from that.

    Args:
        path: A folder (LeRobot's, or pictures with questions), owner/name on the hub, or hf://…; or
            a preset: all of its data sets.
    """
    from piston import presets

    if Path(path).exists() or path not in presets.names():
        return _check_set(path)
    codes = []
    for name in dict.fromkeys(one.repo_id for one in presets.get(path).pipelines()):
        if name is None:
            raise ValueError(f"The preset {path} names no data set: give the folder itself.")
        codes.append(_check_set(name))
    return max(codes)


def _check_set(path: str) -> int:
    from piston.data.check import check_dataset, usable
    from piston.data.problems import grouped

    screen = console()
    with ProgressBar("checking", "frames and rows") as bar:
        problems = check_dataset(path, progress=bar.show)
    groups = grouped(problems)
    if groups:
        screen.print(_problem_table(groups))
    ok = usable(problems)
    found = Counter[str](group.severity for group in groups)
    numbers = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in found.items()]
    counts = ", ".join(numbers) or "no problems"
    verdict = "[green]training can use it[/green]" if ok else "[red]training cannot use it[/red]"
    what = f"{_what_is_read(path, problems)}; {counts}"
    screen.print(f"{escape(path)}: {escape(what)}: {verdict}")
    return 0 if ok else 1


def _what_is_read(path: str, problems: Sequence[Problem]) -> str:
    from piston.data.check import readable_cameras, readable_episodes
    from piston.data.image_text import ImageTextSet, is_table
    from piston.data.location import locate
    from piston.data.metadata import Metadata
    from piston.data.open import LEROBOT, format_at

    root = locate(path)
    if is_table(root):
        wrong = {problem.where for problem in problems if problem.severity == "error"}
        try:
            num_rows = len(ImageTextSet(root, complete=False))
        except ValueError:  # one of the problems
            return "pictures with questions"
        return f"{num_rows - len(wrong):,} of {num_rows:,} pictures with questions"
    if (found := format_at(root)) is not None and found is not LEROBOT:
        dataset = found.open(root)
        num_episodes, cameras = len(dataset.episodes), ", ".join(dataset.cameras) or "none"
        return f"{found.name}, {num_episodes} episodes, cameras: {cameras}"
    metadata = Metadata.read(root)
    num_read, num_all = len(readable_episodes(metadata, problems)), len(metadata.episodes)
    cameras = ", ".join(readable_cameras(metadata, problems)) or "none"
    return f"{num_read} of {num_all} episodes, cameras: {cameras}"


def _problem_table(groups: Iterable[ProblemGroup]) -> Table:
    """Return a table with a row for each kind of problem: where, what, and what follows."""
    rows = []
    for group in groups:
        text = Text.assemble((group.places, "bold"), f"\n{group.what}\n→ {group.consequence}")
        rows.append((Text(group.severity, style=_COLOURS[group.severity]), text))
    return table(("", "where, what, and what follows"), rows, show_lines=True)


def _info(path: Annotated[str, tyro.conf.Positional, named("DATASET")]) -> int:
    """Show episodes, length, features, labels and tasks, from meta/ alone.

    Args:
        path: A folder (LeRobot's, or pictures with questions), owner/name on the hub, or hf://…
    """
    from piston.data.describe import describe_labels
    from piston.data.image_text import ImageTextSet, is_table
    from piston.data.location import locate
    from piston.data.metadata import Metadata
    from piston.data.open import LEROBOT, format_at

    root, screen = locate(path, only_meta=True), console()
    if is_table(root):
        pairs = ImageTextSet(root, complete=False)
        screen.print(f"[bold]{escape(path)}[/bold]  {len(pairs):,} pictures with questions")
        screen.print(table(("question", "answer"), pairs.pairs(_SHOWN_QUESTIONS)))
        return 0
    if (found := format_at(root)) is not None and found is not LEROBOT:
        dataset = found.open(root)
        screen.print(
            f"[bold]{escape(path)}[/bold]  {escape(found.name)}\n{len(dataset.episodes):,} "
            f"episodes, {len(dataset):,} frames, {dataset.fps:g} fps"
        )
        return 0
    metadata = Metadata.read(root, files=False)
    seconds, robot = metadata.total_frames / metadata.fps, metadata.robot_type or "not given"
    screen.print(
        f"[bold]{escape(path)}[/bold]  LeRobot {metadata.version}, robot {robot}\n"
        f"{len(metadata.episodes):,} episodes, {metadata.total_frames:,} frames, "
        f"{metadata.fps:g} fps, {seconds / 60:.1f} minutes"
    )
    rows = [
        (one.name, f"{one.dtype} {list(one.shape)}", _names(one.names))
        for one in metadata.features.values()
    ]
    screen.print(table(("feature", "type", "names of dimensions"), rows))
    for line in describe_labels(metadata):
        screen.print(escape(line), highlight=False)
    for number, text in metadata.tasks.items():
        screen.print(f"task {number}: {escape(text)}", highlight=False)
    return 0


def _names(declared: Any) -> str:
    """Return the names as text: data sets declare lists, or lists by the name of a group."""
    if isinstance(declared, dict):
        return "; ".join(f"{group}: {_names(names)}" for group, names in declared.items())
    return (
        ", ".join(map(str, declared)) if isinstance(declared, list | tuple) else str(declared or "")
    )


def _convert(
    source: Annotated[str, tyro.conf.Positional, named("SOURCE")],
    target: Annotated[Path, tyro.conf.Positional, named("TARGET")],
    /,
    task: str | None = None,
    fps: float = _HDF5_FPS,
    bgr: bool = False,
    codec: Literal["av1", "h264"] | None = None,
    skip_broken: bool = False,
    overwrite: bool = False,
) -> int:
    """Write LeRobot v2.x or ALOHA's HDF5 episodes as a v3.0 data set.

    Args:
        source: A LeRobot v2.x set (folder or owner/name), or a folder of ALOHA .hdf5 episodes.
        target: The new folder.
        task: The sentence of all HDF5 episodes, and of episodes of a set that name no task.
        fps: Frames per second of HDF5 episodes.
        bgr: HDF5 images hold blue first.
        codec: How video is encoded where it has to be; by default av1, as LeRobot does.
        skip_broken: Leave out episodes that cannot be read, instead of stopping.
        overwrite: Replace the target if Piston wrote it and it does not contain the source.
    """
    from piston.data.aloha_hdf5 import SUFFIXES, convert_aloha_hdf5
    from piston.data.convert import convert_to_v30
    from piston.data.location import locate

    folder = Path(source)
    files = folder.iterdir() if folder.is_dir() else [folder]
    is_hdf5 = any(path.suffix in SUFFIXES for path in files)
    if not is_hdf5 and (bgr or fps != _HDF5_FPS):
        raise ValueError("--bgr and --fps are for HDF5 episodes; a LeRobot set says its own.")
    with ProgressBar("converting", "frames") as bar:
        options: dict[str, Any] = {"codec": codec, "skip_broken": skip_broken}
        options |= {"overwrite": overwrite, "progress": bar.show}
        if not is_hdf5:
            conversion = convert_to_v30(locate(source), target, task=task, **options)
        elif task is None:
            raise ValueError("HDF5 episodes do not name their task: give --task 'Fold the towel'.")
        else:
            conversion = convert_aloha_hdf5(folder, target, task, fps, bgr=bgr, **options)
    screen = console()
    screen.print(
        f"Wrote {conversion.target}: {conversion.num_episodes} episodes, "
        f"{conversion.num_frames:,} frames."
    )
    empty = dict.fromkeys(conversion.ignored, "declared, but without data that can be read")
    for what, why in {**conversion.skipped, **empty}.items():
        screen.print(f"[yellow]left out[/yellow] {what}: {why}")
    if conversion.num_encoded:
        screen.print(f"{conversion.num_encoded} videos had to be encoded anew.")
    if conversion.num_retimed:
        screen.print(f"{conversion.num_retimed} episodes got new time stamps (frame / fps).")
    return 0


run_data = Command("data", {"check": _check, "info": _info, "convert": _convert})
