"""`piston init-robot SET`: the description of a robot, written from a data set of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import tyro

from piston.cli.command import Command, named
from piston.cli.console import console


def _init_robot(
    path: Annotated[str, tyro.conf.Positional, named("DATASET")],
    /,
    output: Path | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a file that describes a robot (TOML), guessed from a data set.

    Commands take it as --robot FILE.

    Check every line: comments say what each one means.

    Args:
        path: A data set: a folder, owner/name on the Hugging Face hub, or hf://…
        output: The file; by default NAME.toml in this folder.
        name: The robot's name; by default the data set's robot_type, or the data set's name.
        overwrite: Replace the file if it exists.
    """
    from piston.data.describe import describe_robot
    from piston.data.location import locate
    from piston.data.metadata import Metadata
    from piston.robots.description import read_robot

    root = locate(path, only_meta=True)
    metadata = Metadata.read(root, files=False)
    name = name or metadata.robot_type or root.resolve().name
    file = output or Path(re.sub(r"[^\w.-]+", "_", name).strip(".") + ".toml")
    if file.exists() and not overwrite:
        raise FileExistsError(
            f"{file} exists. Give another file with --output, or replace it with --overwrite."
        )
    file.write_text(describe_robot(metadata, name), "utf-8")
    robot = read_robot(file)  # what was written can be read
    screen = console()
    cameras = ", ".join(f"{key} → {slot}" for key, slot in robot.cameras.items()) or "none"
    relative = f"{len(robot.relative)} of {robot.action_dim} action dimensions are relative"
    screen.print(f"{file}: cameras {cameras}; {relative}.", markup=False)
    screen.print(
        "Check it, then: piston stats tiny_robot "
        f"--robot {shlex.quote(str(file))} --data.repo-id {shlex.quote(path)}",
        soft_wrap=True,
        markup=False,
    )


run_init_robot = Command("init-robot", _init_robot)
