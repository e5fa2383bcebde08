"""The folder of a run: checked before anything slow happens, opened, resumed or begun again."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import torch
import tyro

import piston
from piston import presets, weights
from piston.assets import local_path
from piston.config import DataConfig, TrainConfig
from piston.data.location import lerobot_home
from piston.files import (
    append_json_lines,
    atomic_folder,
    check_new_folder,
    find_damage,
    read_json_object,
    write_text,
)
from piston.serialization import to_json
from piston.training.checkpoint import UNFINISHED, newest_whole_step, saved_steps
from piston.training.distributed import Processes
from piston.training.trackers import METRICS, WANDB_ID, read_metrics, remove_metrics_after
from piston.transforms import flatten_dict

logger = logging.getLogger(__name__)

CONFIG = "run.json"
# How the run was started, a line for each time.
HISTORY = "history.jsonl"
# Options that say nothing about a run: how it was continued, what it is called and where it is.
UNCOMPARED = ("resume", "overwrite", "checkpoint_base_dir", "exp_name")
# Options whose change is not logged on resume.
_EXPECTED_TO_CHANGE = (*UNCOMPARED, "num_train_steps")
# Seconds within which a file that one machine wrote must be visible on the others.
_FILE_SYSTEM_DELAY = 60.0


def check_weights(config: TrainConfig) -> None:
    """Raise an error if the initial checkpoint is missing or does not fit; reads headers only."""
    if config.weights is not None:
        weights.open_checkpoint(config.weights, config.model, allow_missing=config.allow_missing)


def read_statistics(config: TrainConfig) -> tuple[DataConfig, ...]:
    """Return all pipelines with their statistics; an error names the command that computes them."""
    words = [config.name]
    with contextlib.suppress(presets.UnknownPreset):
        preset = presets.get(config.name)
        for entry, factory in config.data.entries.items():
            before = preset.data.entries.get(entry)
            words += _changed(before, factory, f"--data.{entry}." if entry else "--data.")
        if config.model.action_horizon != preset.model.action_horizon:
            words += ["--model.action-horizon", str(config.model.action_horizon)]
        if config.assets_base_dir != preset.assets_base_dir:
            words += ["--assets-base-dir", config.assets_base_dir]
        if config.validation_episodes:  # chosen by the seed
            words += ["--validation-episodes", str(config.validation_episodes)]
            words += ["--seed", str(config.seed)] if config.seed != preset.seed else []
    return tuple(one.with_norm_stats(shlex.join(words)) for one in config.pipelines())


def _changed(before: Any, now: Any, prefix: str) -> Iterator[str]:
    """Yield the options for the fields in which two configurations differ."""
    for field in dataclasses.fields(now):
        value, own = getattr(now, field.name), getattr(before, field.name, None)
        name = field.name.replace("_", "-")
        if value == own or value is tyro.MISSING:
            continue
        if dataclasses.is_dataclass(value):
            yield from _changed(own, value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield f"{prefix}{'' if value else 'no-'}{name}"
        elif value is None or isinstance(value, str | int | float | tuple):
            values = value if isinstance(value, tuple) else (value,)
            yield from (f"{prefix}{name}", *map(str, values))


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    # The step of the checkpoint to resume from; None for a new run.
    resumed: int | None

    @property
    def first_step(self) -> int:
        return 0 if self.resumed is None else self.resumed + 1

    @property
    def resumed_folder(self) -> Path | None:
        return None if self.resumed is None else self.folder / str(self.resumed)


@contextlib.contextmanager
def open_run(config: TrainConfig, processes: Processes) -> Iterator[Run]:
    """Lock the run and find the checkpoint to resume from; change nothing yet.

    The operating system releases the lock however the process ends.
    """
    folder = config.checkpoint_dir.absolute()
    with contextlib.ExitStack() as stack:
        if processes.is_first:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0)
            try:
                stack.enter_context(lock)
            except filelock.Timeout:
                raise FileExistsError(
                    f"Another process is training {folder}. Stop it first, or give another "
                    "--exp-name."
                ) from None
        yield Run(folder, processes.from_first(lambda: _find_step(config, folder)))


def _find_step(config: TrainConfig, folder: Path) -> int | None:
    if config.resume:
        step = newest_whole_step(folder)
        if step is None and saved_steps(folder):
            raise ValueError(
                f"None of the checkpoints in {folder} is whole (see the warnings above), so there "
                "is nothing to resume from. Give --overwrite to start again; it deletes them."
            )
        if step is None:
            logger.info("Nothing to resume in %s: starting a new run.", folder)
        elif saved := _read_config(folder / CONFIG):
            # Refuses options that had an effect on the run and are gone.
            presets.train_config_from_json(saved, str(folder / CONFIG))
        return step
    if folder.exists() and any(folder.iterdir()) and not config.overwrite:
        raise FileExistsError(
            f"{folder} exists already. Give --resume to continue that run, --overwrite to delete "
            "it and start again, or another --exp-name."
        )
    if config.overwrite:
        check_new_folder(folder, overwrite=_not_a_run, inputs=_inputs(config))
    return None


def _not_a_run(folder: Path) -> str | None:
    """Return why a folder is not a run that this or an earlier version wrote; None if it is."""
    is_run = "num_train_steps" in _read_config(folder / CONFIG)
    return None if is_run else f"it is not a run (it has no {CONFIG} that can be read)"


def _inputs(config: TrainConfig) -> list[Path]:
    """Return the local files and folders that a run reads."""
    pipelines = config.pipelines()
    sets = [one.repo_id for one in pipelines if one.repo_id]
    assets = [one.assets_dir for one in pipelines]
    names = [*sets, *(lerobot_home() / name for name in sets), config.weights, *assets]
    paths = [local_path(str(name)) for name in names if name]
    return [path for path in paths if path is not None and path.exists()]


def begin(run: Run, config: TrainConfig, processes: Processes) -> None:
    """Prepare the folder for training. --overwrite deletes here, not earlier."""
    path = run.folder / CONFIG
    if processes.is_first:
        text = json.dumps(to_json(config), indent=2)
        if config.overwrite:
            inputs = _inputs(config)
            with atomic_folder(run.folder, overwrite=_not_a_run, inputs=inputs) as fresh:
                write_text(fresh / CONFIG, text)
        run.folder.mkdir(parents=True, exist_ok=True)
        # Remove what a killed process left behind and set damaged checkpoints aside.
        for leftover in run.folder.glob("*"):
            number, _, ending = leftover.name.partition(".")
            if number.isdecimal() and ending in UNFINISHED:
                _clear(leftover)
        for step in saved_steps(run.folder):
            if step >= run.first_step:  # damaged; a warning has been logged
                damaged = run.folder / f"{step}.damaged"
                shutil.rmtree(damaged, ignore_errors=True)
                (run.folder / str(step)).rename(damaged)
        remove_metrics_after(run.folder / METRICS, run.first_step - 1)
        if run.resumed is None:
            (run.folder / WANDB_ID).unlink(missing_ok=True)
        before = flatten_dict(_read_config(path), ".")
        changed = [
            f"{name} {before[name]} → {value}"
            for name, value in flatten_dict(json.loads(text), ".").items()
            if name in before and before[name] != value and name not in _EXPECTED_TO_CHANGE
        ]
        if changed:
            logger.info("changed since the last start: %s", ", ".join(changed))
        write_text(path, text)
        if run.resumed is None:
            (run.folder / HISTORY).unlink(missing_ok=True)
        if run.first_step < config.num_train_steps:
            append_json_lines(run.folder / HISTORY, [_start(run, processes)])
    processes.wait_for_all()
    deadline = time.monotonic() + _FILE_SYSTEM_DELAY
    while not path.is_file():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"This process cannot see {path}, which the first process wrote. All machines of a "
                "run need the same disk: set --checkpoint-base-dir to a shared folder."
            )
        time.sleep(0.5)


def _start(run: Run, processes: Processes) -> dict[str, Any]:
    """Return by which command, when, where and with which versions the run starts."""
    program = Path(sys.argv[0])
    is_installed = program.suffix == "" and program.is_file()  # not a script, nor `python -m`
    command = [program.name, *sys.argv[1:]] if is_installed else ["python", *sys.orig_argv[1:]]
    device = f"{os.cpu_count()} CPU cores"
    if processes.device.type == "cuda":
        device = f"{processes.world_size} × {torch.cuda.get_device_name(processes.device)}"
    return {
        "first_step": run.first_step,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "folder": str(Path.cwd()),
        "piston": piston.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.node()}, {platform.system()} {platform.machine()}, {device}",
        "processes": processes.world_size,
    }


def _clear(leftover: Path) -> None:
    """Delete an unfinished checkpoint; a file of that name is not one, so give it another name."""
    if leftover.is_dir() and not leftover.is_symlink():
        shutil.rmtree(leftover)
        return
    other = leftover.with_name(f"{leftover.name}.other")
    while other.exists():
        other = other.with_name(f"{other.name}~")
    logger.warning("%s is not a folder of Piston; it is now named %s", leftover, other.name)
    leftover.rename(other)


def _read_config(path: Path) -> dict[str, Any]:
    """Return the saved configuration, empty if it is missing or unreadable."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def list_runs(base: Path) -> list[dict[str, Any]]:
    """List the runs below a folder: name, last logged step and loss, newest checkpoint.

    `num_train_steps` is None if the run's configuration cannot be read. A checkpoint counts if its
    files have the right sizes; `--resume` reads them all.
    """
    runs = []
    for path in sorted(base.glob(f"*/*/{CONFIG}")):
        folder = path.parent
        if folder.name.startswith("."):  # left by a process that was killed
            continue
        logged = [line for line in read_metrics(folder / METRICS) if "loss" in line]
        checkpoints = [folder / str(step) for step in reversed(saved_steps(folder))]
        whole = (one for one in checkpoints if find_damage(one, only_sizes=True) is None)
        num_train_steps = _read_config(path).get("num_train_steps")
        runs.append(
            {
                "preset": folder.parent.name,
                "name": folder.name,
                "folder": folder,
                "num_train_steps": num_train_steps if type(num_train_steps) is int else None,
                "step": logged[-1]["step"] if logged else None,
                "loss": logged[-1]["loss"] if logged else None,
                "checkpoint": next(whole, None),
            }
        )
    return runs
