"""`piston data convert SOURCE TARGET`: LeRobot v2.x, or ALOHA's HDF5 episodes, become v3.0."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from piston.cli.console import console
from piston.data.aloha_hdf5 import convert_aloha_hdf5
from piston.data.convert import Conversion, convert_to_v30
from piston.data.location import locate
from piston.progress import ProgressBar

_HDF5 = (".hdf5", ".h5")


@dataclasses.dataclass(frozen=True)
class ConvertArguments:
    """Write a data set as LeRobot v3.0. The target appears only when it is complete."""

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


def run(args: list[str]) -> int:
    arguments = tyro.cli(ConvertArguments, args=args, prog="piston data convert")
    with ProgressBar("converting", "frames") as bar:
        conversion = _convert(arguments, bar.show)
    _tell(conversion)
    return 0


def _convert(arguments: ConvertArguments, progress: object) -> Conversion:
    shared = {
        "codec": arguments.codec,
        "skip_broken": arguments.skip_broken,
        "overwrite": arguments.overwrite,
        "progress": progress,
    }
    if not is_hdf5(arguments.source):
        if arguments.bgr or arguments.fps != ConvertArguments.fps:
            raise ValueError("--bgr and --fps are for HDF5 episodes; a LeRobot set says its own.")
        root = locate(arguments.source)
        return convert_to_v30(root, arguments.target, task=arguments.task, **shared)  # type: ignore[arg-type]
    if arguments.task is None:
        raise ValueError("HDF5 episodes do not say what was done: give --task 'Fold the towel'.")
    return convert_aloha_hdf5(
        arguments.source,
        arguments.target,
        arguments.task,
        arguments.fps,
        bgr=arguments.bgr,
        **shared,  # type: ignore[arg-type]
    )


def is_hdf5(source: str) -> bool:
    path = Path(source)
    if path.is_dir():
        return any(child.suffix in _HDF5 for child in path.iterdir())
    return path.suffix in _HDF5


def _tell(conversion: Conversion) -> None:
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
