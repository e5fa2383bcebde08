"""Where the demo's policy looks when an episode starts, with different covers: is it the cube?

    python benchmarks/occlusion.py runs/demo

The cube's place in the picture is where pictures with and without it differ. A start counts if the
strongest cell of the map is on the cube, or at most one smallest cell beside it.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image, ImageFilter
from rich.table import Table

from common import main
from piston.cli.console import console
from piston.inference.loading import load_policy
from piston.inspection import Frames, Probe
from piston.inspection.occlusion import Occlusion, OcclusionMap, Picture
from piston.sim import make_environment
from piston.sim.environment import Environment, Observation

CAMERA, ROBOT_CAMERA = "base_0_rgb", "cam_high"
# The right arm reaches for the cube, and hands it to the left one later.
ARM = "right_arm_"
# A pixel belongs to the cube if its colours differ by this much without it. The map's smallest cell
# has 3 pixels.
DIFFERENT, BESIDE = 40, 3


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Occlusion maps of the ALOHA demo's policy."""

    # The demo's folder, with `data` and `checkpoints`.
    run: Annotated[Path, tyro.conf.Positional] = Path("runs/demo")
    starts: int = 10
    budget: int = 160
    seeds: int = 1


def run(options: Arguments) -> None:
    checkpoints = sorted(options.run.glob("checkpoints/*/*/*/config.json"))
    policy = load_policy(checkpoints[-1].parent)
    frames = Frames.open(policy, options.run / "data")
    names = [name for name in frames.action_names if name.startswith(ARM)]
    probe = Probe(policy, range(options.seeds))
    maps = Occlusion(probe, frames, actions=names, budget=options.budget)
    environment = make_environment("aloha_transfer_cube")
    table = Table("start", "cover", "on the cube", "value there", "largest elsewhere", "s")
    found: dict[str, list[bool]] = {}
    for seed in range(options.starts):
        observation = environment.reset(seed)
        cube = _cube(environment, observation)
        for name, cover in _covers(observation, maps).items():
            begun = time.perf_counter()
            one = maps.map(observation, CAMERA, cover)
            seconds = time.perf_counter() - begun
            there, elsewhere = _compare(one, cube)
            found.setdefault(name, []).append(there > elsewhere)
            answer = "yes" if there > elsewhere else "no"
            numbers = (f"{there:.2f}", f"{elsewhere:.2f}", f"{seconds:.1f}")
            table.add_row(str(seed), name, answer, *numbers)
    console().print(table)
    for name, hits in found.items():
        console().print(f"{name}: {sum(hits)} of {len(hits)} starts")


def _cube(environment: Environment, observation: Observation) -> np.ndarray:
    """Return which pixels the cube has, and those beside it."""
    pose = environment.pose()  # type: ignore[attr-defined]
    away = pose.copy()
    away[-5] = -5.0  # the cube's height: far below the table
    environment.set_pose(away)  # type: ignore[attr-defined]
    without = environment.observe()["images"][ROBOT_CAMERA]
    environment.set_pose(pose)  # type: ignore[attr-defined]
    shown = observation["images"][ROBOT_CAMERA].astype(int)
    rows, columns = np.nonzero(np.abs(shown - without).sum(-1) > DIFFERENT)
    cube = np.zeros(shown.shape[:2], bool)
    top, left = (max(0, places.min() - BESIDE) for places in (rows, columns))
    cube[top : rows.max() + 1 + BESIDE, left : columns.max() + 1 + BESIDE] = True
    return cube


def _covers(observation: Observation, maps: Occlusion) -> dict[str, Picture]:
    shown = maps.picture(observation, CAMERA)
    mean = np.full_like(shown, shown.mean((0, 1)).round())
    blurred = np.asarray(Image.fromarray(shown).filter(ImageFilter.GaussianBlur(8)))
    return {"background": maps.background(CAMERA), "mean colour": mean, "blurred": blurred}


def _compare(one: OcclusionMap, cube: np.ndarray) -> tuple[float, float]:
    """Return the largest value of a cell that touches the cube, and of all others."""
    height, width = cube.shape
    touches = np.array([cube[cell.pixels(height, width)].any() for cell in one.cells])
    return float(one.value[touches].max()), float(one.value[~touches].max())


if __name__ == "__main__":
    main(run, Arguments)
