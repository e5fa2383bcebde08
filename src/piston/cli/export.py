"""`piston export CHECKPOINT FILE.pt2`: a policy compiled ahead of time, for `piston serve`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import tyro

from piston.cli.command import Command, named, read_robot_option
from piston.cli.console import console


def _export(
    checkpoint: Annotated[str, tyro.conf.Positional, named("CHECKPOINT")],
    file: Annotated[Path, tyro.conf.Positional, named("FILE.pt2")],
    preset: str | None = None,
    robot: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    device: str | None = None,
    num_steps: int | None = None,
    max_batch: int = 8,
) -> None:
    """Compile π0 or π0.5 for this machine, into one file for `piston serve`.

    It holds weights, robot and statistics, and fits this version of torch.

    Args:
        checkpoint: A folder that `piston train` wrote, or any checkpoint with --preset.
        file: The new file; its name ends in .pt2.
        preset: The robot, for checkpoints that do not say it themselves.
        robot: One of the robots that the checkpoint was trained with, or a file that describes it.
        dtype: What weights are held in; by default as they are stored.
        device: cpu, cuda, cuda:1 …; by default a GPU where there is one.
        num_steps: Denoising steps per chunk; by default as many as the checkpoint was made for.
        max_batch: Requests that may share one inference.
    """
    if file.suffix != ".pt2":
        raise ValueError(f"The file is {file}; expected a name that ends in .pt2.")
    if num_steps is not None and num_steps < 1:
        raise ValueError(f"--num-steps must be at least 1, is {num_steps}.")
    from piston.inference.loading import export_policy  # imports torch

    started = time.perf_counter()
    export_policy(
        *(checkpoint, file),
        preset=preset,
        robot=read_robot_option(robot),
        dtype=dtype,
        device=device,
        num_steps=num_steps,
        max_batch=max_batch,
    )
    seconds, size = time.perf_counter() - started, file.stat().st_size
    console().print(f"Wrote {file}: {size / 1e6:,.1f} MB in {seconds:.0f} s.")


run_export = Command("export", _export)
