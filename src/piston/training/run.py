"""A run's folder: opened, resumed or begun again, and never lost by mistake."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from piston.config import TrainConfig
from piston.serialization import to_json
from piston.training.checkpoint import newest_whole_step, saved_steps
from piston.training.distributed import Processes
from piston.training.trackers import METRICS, forget_after

logger = logging.getLogger(__name__)

CONFIG = "run.json"


def open_run(config: TrainConfig, processes: Processes) -> tuple[Path, int | None]:
    """The folder, and the step to go on after; None for a run that begins."""
    folder = config.checkpoint_dir.absolute()
    resumed: int | None = None
    if config.resume:
        resumed = newest_whole_step(folder)
        if resumed is None and saved_steps(folder):
            raise ValueError(
                f"None of the checkpoints in {folder} is whole (see the warnings above), so there "
                "is nothing to resume from. Give --overwrite to begin again; it deletes them."
            )
        if resumed is None:
            logger.info("Nothing to resume in %s: the run begins.", folder)
    elif folder.exists() and any(folder.iterdir()) and not config.overwrite:
        raise FileExistsError(
            f"{folder} exists already. Give --resume to go on with that run, --overwrite to delete "
            "it and begin again, or another --exp-name."
        )
    processes.wait_for_all()  # all have looked before the first one changes anything
    if processes.is_first:
        if resumed is None and folder.exists():
            shutil.rmtree(folder)
        _prepare(folder, config, resumed)
    processes.wait_for_all()
    return folder, resumed


def _prepare(folder: Path, config: TrainConfig, resumed: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("*.partial"):  # of a process that was killed while it saved
        shutil.rmtree(leftover)
    for step in saved_steps(folder):
        if resumed is not None and step > resumed:  # damaged, and told of
            (folder / str(step)).rename(folder / f"{step}.damaged")
    if resumed is not None:
        forget_after(folder / METRICS, resumed)
    (folder / CONFIG).write_text(json.dumps(to_json(config), indent=2))


def list_runs(base: Path) -> list[dict[str, Any]]:
    """Every run below a folder: its name, last logged step and loss, and newest checkpoint."""
    runs = []
    for path in sorted(base.glob(f"*/*/{CONFIG}")):
        folder = path.parent
        steps = saved_steps(folder)
        runs.append(
            {
                "preset": folder.parent.name,
                "name": folder.name,
                "folder": folder,
                "num_train_steps": json.loads(path.read_text())["num_train_steps"],
                **_last_numbers(folder / METRICS),
                "checkpoint": folder / str(steps[-1]) if steps else None,
            }
        )
    return runs


def _last_numbers(path: Path) -> dict[str, Any]:
    lines = path.read_text().splitlines() if path.is_file() else []
    for line in reversed(lines):
        numbers = json.loads(line)
        if "loss" in numbers:
            return {"step": numbers["step"], "loss": numbers["loss"]}
    return {"step": None, "loss": None}
