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
from piston.files import write_text
from piston.serialization import to_json
from piston.training.checkpoint import UNFINISHED, newest_whole_step, saved_steps
from piston.training.distributed import Processes
from piston.training.manifest import find_damage
from piston.training.trackers import METRICS, WANDB_ID, forget_after, read_lines
from piston.transforms.keys import flatten_dict

logger = logging.getLogger(__name__)

CONFIG = "run.json"
# Not worth a word when it is other than before: what one changes to go on, and where things are.
_MEANT_TO_CHANGE = ("resume", "overwrite", "num_train_steps", "checkpoint_base_dir")
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
        if config.overwrite and run.folder.exists():
            shutil.rmtree(run.folder)
        run.folder.mkdir(parents=True, exist_ok=True)
        _tidy(run)
        text = json.dumps(to_json(config), indent=2)
        _tell_changes(run.folder / CONFIG, json.loads(text))
        write_text(run.folder / CONFIG, text)
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
    if run.resumed is None:
        (run.folder / WANDB_ID).unlink(missing_ok=True)


def _tell_changes(path: Path, now: dict[str, Any]) -> None:
    """One line with what is configured otherwise than when the run was last started."""
    before = flatten_dict(_read_config(path) or {}, ".")
    changed = [
        f"{name} {before[name]} → {value}"
        for name, value in flatten_dict(now, ".").items()
        if name in before and before[name] != value and name not in _MEANT_TO_CHANGE
    ]
    if changed:
        logger.info("changed since the last start: %s", ", ".join(changed))


def _read_config(path: Path) -> dict[str, Any] | None:
    """None where there is none, or none that can be read."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


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
    """Every run below a folder: its name, last logged step and loss, and newest checkpoint.

    `num_train_steps` is None where the run's configuration cannot be read.
    """
    runs = []
    for path in sorted(base.glob(f"*/*/{CONFIG}")):
        folder, config = path.parent, _read_config(path) or {}
        logged = [line for line in read_lines(folder / METRICS) if "loss" in line]
        runs.append(
            {
                "preset": folder.parent.name,
                "name": folder.name,
                "folder": folder,
                "num_train_steps": config.get("num_train_steps"),
                "step": logged[-1]["step"] if logged else None,
                "loss": logged[-1]["loss"] if logged else None,
                "checkpoint": _newest_checkpoint(folder),
            }
        )
    return runs


def _newest_checkpoint(folder: Path) -> Path | None:
    """By the sizes of its files; their contents are looked at when a run is resumed."""
    checkpoints = [folder / str(step) for step in reversed(saved_steps(folder))]
    return next((path for path in checkpoints if not find_damage(path, only_sizes=True)), None)
