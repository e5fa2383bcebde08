"""A run's folder: opened, resumed or begun again, and never lost by mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from piston.config import TrainConfig
from piston.serialization import to_json
from piston.training.checkpoint import UNFINISHED, newest_whole_step, saved_steps
from piston.training.distributed import Processes
from piston.training.trackers import METRICS, forget_after, read_lines

logger = logging.getLogger(__name__)

CONFIG = "run.json"
# Seconds until a file of one machine is seen on another, at the latest.
_PATIENCE = 60.0


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    # The step to go on after; None for a run that begins.
    resumed: int | None

    @property
    def first_step(self) -> int:
        return 0 if self.resumed is None else self.resumed + 1

    @property
    def resumed_folder(self) -> Path | None:
        return None if self.resumed is None else self.folder / str(self.resumed)


@contextlib.contextmanager
def open_run(config: TrainConfig, processes: Processes) -> Iterator[Run]:
    """Finds where to go on, or refuses; changes nothing yet. No two can have the same run."""
    folder = config.checkpoint_dir.absolute()
    with contextlib.ExitStack() as stack:
        if processes.is_first:
            stack.enter_context(_lock(folder))
        yield Run(folder, processes.from_first(lambda: _find_step(config, folder)))


def begin(run: Run, config: TrainConfig, processes: Processes) -> None:
    """Make the folder ready for steps. Here, and not before, --overwrite deletes."""
    if processes.is_first:
        if run.resumed is None and run.folder.exists():
            shutil.rmtree(run.folder)
        run.folder.mkdir(parents=True, exist_ok=True)
        _tidy(run)
        (run.folder / CONFIG).write_text(json.dumps(to_json(config), indent=2))
    processes.wait_for_all()
    _check_shared(run.folder)


def _find_step(config: TrainConfig, folder: Path) -> int | None:
    if config.resume:
        step = newest_whole_step(folder)
        if step is None and saved_steps(folder):
            raise ValueError(
                f"None of the checkpoints in {folder} is whole (see the warnings above), so there "
                "is nothing to resume from. Give --overwrite to begin again; it deletes them."
            )
        if step is None:
            logger.info("Nothing to resume in %s: the run begins.", folder)
        return step
    if folder.exists() and any(folder.iterdir()) and not config.overwrite:
        raise FileExistsError(
            f"{folder} exists already. Give --resume to go on with that run, --overwrite to delete "
            "it and begin again, or another --exp-name."
        )
    return None


def _tidy(run: Run) -> None:
    """Put away what a process that was killed left behind."""
    for pattern in UNFINISHED:
        for leftover in run.folder.glob(pattern):
            shutil.rmtree(leftover)
    for step in saved_steps(run.folder):
        if step >= run.first_step:  # damaged, and told of
            damaged = run.folder / f"{step}.damaged"
            shutil.rmtree(damaged, ignore_errors=True)
            (run.folder / str(step)).rename(damaged)
    forget_after(run.folder / METRICS, run.first_step - 1)


def _check_shared(folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not (folder / CONFIG).is_file():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"This process does not see {folder}, which the first one has made. All machines "
                "of a run need the same disk there: set --checkpoint-base-dir."
            )
        time.sleep(0.5)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """The system takes the lock away from a process that ends, however it ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise FileExistsError(
            f"Another process is training {folder}. End it first, or give another --exp-name."
        ) from None
    try:
        yield
    finally:
        lock.release()


def list_runs(base: Path) -> list[dict[str, Any]]:
    """Every run below a folder: its name, last logged step and loss, and newest checkpoint."""
    runs = []
    for path in sorted(base.glob(f"*/*/{CONFIG}")):
        folder = path.parent
        steps = saved_steps(folder)
        logged = [line for line in read_lines(folder / METRICS) if "loss" in line]
        runs.append(
            {
                "preset": folder.parent.name,
                "name": folder.name,
                "folder": folder,
                "num_train_steps": json.loads(path.read_text())["num_train_steps"],
                "step": logged[-1]["step"] if logged else None,
                "loss": logged[-1]["loss"] if logged else None,
                "checkpoint": folder / str(steps[-1]) if steps else None,
            }
        )
    return runs
