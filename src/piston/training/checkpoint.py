"""Checkpoints of a run: written in the background, whole or not at all, and found again.

    <run>/<step>/model.safetensors, config.json      the served weights: `piston serve <run>/<step>`
                 assets/<asset_id>/norm_stats.json
                 train_state/                        all that a resumed run needs
                 manifest.json                       every file with its size and checksum, last

A folder is written under another name, brought to the disk, and renamed; one that is to go is
renamed first. So whatever has the name of a step was once whole. Should it not be so any more, it
is passed over with a warning, never used.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from piston import weights
from piston.config import TRAIN_SECTION, TrainConfig
from piston.files import sync
from piston.serialization import to_json
from piston.training.distributed import Processes
from piston.training.manifest import find_damage, seal
from piston.training.state import prepare_to_load, snapshot
from piston.training.step import Trainer
from piston.transforms.normalize import NormStats, read_norm_stats, write_norm_stats

logger = logging.getLogger(__name__)

_STATE = "train_state"
_PROGRESS = "progress.json"
# Names of folders that are being written or removed: of no use to anyone after a kill.
UNFINISHED = ("*.partial", "*.removed")

# How often the last save is tried again, and the seconds before each time.
_ATTEMPTS, _PAUSE = 20, 30.0

# It tells a single process that it is one. (Not within `catch_warnings`, which threads share.)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the folder carries so that the policy can be served from it alone."""

    asset_id: str
    stats: Mapping[str, NormStats]


@dataclasses.dataclass(frozen=True)
class _Copy:
    """What a checkpoint is written from; training does not change it any more."""

    state: dict[str, Tensor]
    served: dict[str, Tensor]
    step: int
    progress: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """On the disk, but for small files. (The size of a sharded tensor is that of the whole.)"""
        tensors = (*self.state.values(), *self.served.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class CheckpointWriter:
    """Saves a run's checkpoints, one at a time, and removes those that are not to be kept.

    Where every process has a copy of everything (DDP), the first one saves.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        processes: Processes,
        statistics: Statistics | None,
    ) -> None:
        self._config, self._folder = config, folder
        self._processes, self._statistics = processes, statistics
        self._takes_part = processes.is_first or config.sharding == "fsdp"
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        # Of the last save, which is tried again if it fails.
        self._last: _Copy | None = None

    def save(
        self, trainer: Trainer, step: int, progress: Mapping[str, Any], *, last: bool = False
    ) -> None:
        """Copies now, writes in the background. An earlier save is finished first.

        The copy of the `last` one is kept for `finish`, which has to follow.
        """
        self.wait()
        if self._takes_part:
            copy = _Copy(*snapshot(trainer), step, progress)
            self._last = copy if last else None
            self._start(copy)

    def wait(self) -> None:
        """Until nothing is being written, by any process. A failure is told of, not raised."""
        self._join()
        self._processes.wait_for_all()

    def finish(self) -> None:
        """As `wait`, at the end of the run: a save that found no room is tried again for a while.

        All that was learned since the save before is in memory alone.
        """
        self.wait()
        for _ in range(_ATTEMPTS):
            may_help = self._last is not None and isinstance(self._error, OSError)
            if not self._processes.agree(may_help):
                break
            if self._processes.is_first:
                logger.error(
                    "What was trained is still in memory. Make room there (%s); it is tried again "
                    "in %d seconds, for %d minutes in all.",
                    self._folder,
                    _PAUSE,
                    _ATTEMPTS * _PAUSE / 60,
                )
            time.sleep(_PAUSE)
            if self._last is not None:
                self._start(self._last)
            self.wait()
        if self._error is not None:
            raise self._lost(self._error) from self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._join()  # without waiting for others, which may have come to grief elsewhere

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _start(self, copy: _Copy) -> None:
        self._thread = threading.Thread(target=self._write, args=(copy,), name="checkpoint")
        self._thread.start()

    def _write(self, copy: _Copy) -> None:
        fresh, self._error = self._folder / f"{copy.step}.partial", None
        try:
            together = _together(self._config, self._processes)
            dcp.save(copy.state, checkpoint_id=fresh / _STATE, **together)
            if self._processes.is_first:
                self._complete(fresh, copy)
                fresh.rename(self._folder / str(copy.step))
                sync(self._folder)
                logger.info("Saved checkpoint %s", self._folder / str(copy.step))
                self._remove_old()
        except (Exception, CheckpointException) as failure:
            # Training goes on: the next save may find room again, and nothing older is touched.
            self._error = _cause(failure)
            if self._processes.is_first:
                shutil.rmtree(fresh, ignore_errors=True)
                is_last = copy is self._last
                logger.error(
                    "The checkpoint of step %d was not saved: %s (about %.1f GB are needed, %.1f "
                    "GB are free there). Earlier ones are untouched%s",
                    copy.step,
                    self._error,
                    copy.num_bytes / 1e9,
                    shutil.disk_usage(self._folder).free / 1e9,
                    "." if is_last else "; training goes on and tries again at the next one.",
                )

    def _lost(self, error: Exception) -> OSError:
        steps = saved_steps(self._folder)
        size = f", about {self._last.num_bytes / 1e9:.1f} GB," if self._last else ""
        kept = f"after step {steps[-1]}, the newest that is saved" if steps else "from the start"
        return OSError(
            f"The last checkpoint{size} could not be written to {self._folder}: {error}. Make room "
            f"there and go on with --resume, {kept}."
        )

    def _complete(self, fresh: Path, copy: _Copy) -> None:
        (fresh / _STATE / _PROGRESS).write_text(json.dumps(copy.progress, indent=2))
        sections = {TRAIN_SECTION: to_json(self._config)}
        weights.save_model(copy.served, self._config.model, fresh, sections=sections)
        if self._statistics is not None:
            folder = fresh / "assets" / self._statistics.asset_id
            write_norm_stats(folder, self._statistics.stats)
        seal(fresh)

    def _remove_old(self) -> None:
        steps = saved_steps(self._folder)
        period, newest = self._config.keep_period, steps[-self._config.keep_last :]
        for step in steps:
            kept_for_good = period is not None and step % period == 0
            if step not in newest and not kept_for_good:
                removed = self._folder / f"{step}.removed"
                try:
                    (self._folder / str(step)).rename(removed)
                    shutil.rmtree(removed)
                except OSError as error:  # no reason to call the new one not saved
                    logger.warning("Checkpoint %d was not removed: %s", step, error)


def saved_steps(run: Path) -> list[int]:
    """Steps of which there is a folder, in order."""
    return sorted(int(path.name) for path in run.glob("*") if path.name.isdecimal())


def newest_whole_step(run: Path) -> int | None:
    """The newest checkpoint that is as it was written; damaged ones are passed over, and told."""
    for step in reversed(saved_steps(run)):
        damage = find_damage(run / str(step))
        if damage is None:
            return step
        logger.warning("Checkpoint %s is not used: %s", run / str(step), damage)
    return None


def tell_other_statistics(folder: Path, statistics: Statistics | None) -> None:
    """Warn where a run that is resumed would go on with other statistics than it was saved with."""
    if statistics is None:
        return
    inside = folder / "assets" / statistics.asset_id
    if not inside.is_dir():
        logger.warning("%s was trained with other statistics than %s", folder, statistics.asset_id)
    elif read_norm_stats(inside) != statistics.stats:
        logger.warning(
            "The statistics of %s are not those that %s was trained with (in its assets/): states "
            "and actions now mean something else to the model. Put those back to undo that.",
            statistics.asset_id,
            folder,
        )


def restore(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Fill the trainer in place; what the loop had written of its own progress."""
    reader = dcp.FileSystemReader(folder / _STATE)
    saved = {
        name: tuple(facts.size)
        for name, facts in reader.read_metadata().state_dict_metadata.items()
        if isinstance(facts, TensorStorageMetadata)
    }
    together = _together(trainer.config, trainer.processes)
    dcp.load(prepare_to_load(trainer, saved), storage_reader=reader, **together)
    progress: dict[str, Any] = json.loads((folder / _STATE / _PROGRESS).read_text())
    return progress


def _together(config: TrainConfig, processes: Processes) -> dict[str, Any]:
    """With the others where each has a part; else each for itself."""
    if config.sharding == "fsdp":
        return {"process_group": processes.patient_group}
    return {"no_dist": True}


def _cause(failure: BaseException) -> Exception:
    """What went wrong first, on the first process on which something did."""
    if isinstance(failure, CheckpointException):
        failure = next(iter(failure.failures.values()))[0]
    found: BaseException | None = failure
    while found is not None:  # a full disk may be hidden behind what it led to
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return failure if isinstance(failure, Exception) else RuntimeError(str(failure))
