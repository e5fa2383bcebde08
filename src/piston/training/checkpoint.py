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
from piston.serialization import to_json
from piston.training.distributed import Processes
from piston.training.manifest import find_damage, seal, sync
from piston.training.state import prepare_to_load, snapshot
from piston.training.step import Trainer
from piston.transforms.normalize import NormStats, write_norm_stats

logger = logging.getLogger(__name__)

_STATE = "train_state"
_PROGRESS = "progress.json"
# Names of folders that are being written or removed: of no use to anyone after a kill.
UNFINISHED = ("*.partial", "*.removed")

# It tells a single process that it is one. (Not within `catch_warnings`, which threads share.)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the folder carries so that the policy can be served from it alone."""

    asset_id: str
    stats: Mapping[str, NormStats]


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

    def save(self, trainer: Trainer, step: int, progress: Mapping[str, Any]) -> None:
        """Copies now, writes in the background. An earlier save is finished first."""
        self.wait()
        if self._takes_part:
            self._thread = threading.Thread(
                target=self._write, args=(*snapshot(trainer), step, progress), name="checkpoint"
            )
            self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written, by any process. A failure is told of, not raised."""
        self._join()
        self._processes.wait_for_all()

    def finish(self) -> None:
        """As `wait`, at the end of the run: if the last save failed, that is an error."""
        self.wait()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._join()  # without waiting for others, which may have come to grief elsewhere

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self,
        state: dict[str, Tensor],
        served: dict[str, Tensor],
        step: int,
        progress: Mapping[str, Any],
    ) -> None:
        fresh, self._error = self._folder / f"{step}.partial", None
        try:
            dcp.save(
                state, checkpoint_id=fresh / _STATE, **_together(self._config, self._processes)
            )
            if self._processes.is_first:
                self._complete(fresh, served, progress)
                fresh.rename(self._folder / str(step))
                sync(self._folder)
                logger.info("Saved checkpoint %s", self._folder / str(step))
                self._remove_old()
        except (Exception, CheckpointException) as failure:
            # Training goes on: the next save may find room again, and nothing older is touched.
            self._error = _cause(failure)
            logger.error(
                "The checkpoint of step %d was not saved: %s (%.1f GB are free there). Earlier "
                "ones are untouched; training goes on and tries again at the next one.",
                step,
                self._error,
                shutil.disk_usage(self._folder).free / 1e9,
            )
            if self._processes.is_first:
                shutil.rmtree(fresh, ignore_errors=True)

    def _complete(
        self, fresh: Path, served: dict[str, Tensor], progress: Mapping[str, Any]
    ) -> None:
        (fresh / _STATE / _PROGRESS).write_text(json.dumps(progress, indent=2))
        sections = {TRAIN_SECTION: to_json(self._config)}
        weights.save_model(served, self._config.model, fresh, sections=sections)
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
                (self._folder / str(step)).rename(removed)
                shutil.rmtree(removed)


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
