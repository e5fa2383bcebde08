"""`piston record TASK --episodes N --out DIR`: an expert shows a simulated robot's task.

Ends with 130 or 143 when Ctrl-C or SIGTERM stopped it; what is recorded by then is a data set.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import tyro

from piston.cli.console import console
from piston.cli.demo_job import ends_with_children
from piston.data.episode_store import INFO, read_info
from piston.progress import ProgressBar
from piston.sim.recording import Recording, record


def run(args: list[str]) -> int:
    tyro.cli(_record, args=args, prog="piston record")
    return 0


def _record(
    task: Annotated[str, tyro.conf.Positional],
    /,
    episodes: int,
    out: Path,
    workers: int = 2,
    seed: int = 0,
    pixels: int | None = None,
    codec: Literal["h264", "av1"] = "h264",
) -> None:
    """Record scripted demonstrations as a LeRobot data set; run again to go on after a stop.

    Args:
        task: For example aloha_transfer_cube, aloha_insertion, metaworld:tiny, metaworld:door-open.
        episodes: How many the data set shall hold at least. Only successful ones are kept.
        out: The data set's folder.
        workers: Processes that simulate. The result does not depend on it.
        seed: Another seed gives other starts; none of them is ever used in evaluation.
        pixels: Side of the camera images; by default the environment's own.
        codec: h264 is quick to write, av1 is smaller.
    """
    began = time.monotonic()
    there = read_info(out)["total_episodes"] if (out / INFO).exists() else 0
    bar = ProgressBar(f"recording {task}", "episodes", episodes, done=there, after=0)
    with ends_with_children(), bar:
        recorded = record(
            Recording(task, seed, pixels),
            episodes,
            out,
            workers=workers,
            codec=codec,
            progress=lambda kept, _: bar.show(kept),
        )
    console().print(
        f"{out} holds {_count(recorded.num_episodes, 'episode', 'episodes')} of {task}: "
        f"{_count(recorded.num_tried, 'try', 'tries')}, {time.monotonic() - began:.1f} s."
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
