"""Checkpoints of a run: written in the background, whole or not at all, and found again.

    <run>/<step>/model.safetensors, config.json      the served weights: `piston serve <run>/<step>`
                 assets/<asset_id>/norm_stats.json
                 train_state/                        all that a resumed run needs
                 manifest.json                       every file with its size and checksum, last

A folder is written under another name, brought to the disk, and renamed. One without a manifest
that fits was not finished or has been damaged: it is passed over with a warning, never used.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import threading
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from piston import weights
from piston.config import TRAIN_SECTION, TrainConfig
from piston.serialization import to_json
from piston.training.distributed import Processes, whole
from piston.training.state import prepare_to_load, state_tensors
from piston.training.step import Trainer
from piston.transforms.normalize import NormStats, write_norm_stats

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_STATE = "train_state"
_PROGRESS = "progress.json"


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the folder carries so that the policy can be served from it alone."""

    asset_id: str
    stats: Mapping[str, NormStats]


class CheckpointWriter:
    """Saves a run's checkpoints, one at a time, and removes those that are not to be kept."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        processes: Processes,
        statistics: Statistics | None,
    ) -> None:
        self._config, self._folder = config, folder
        self._processes, self._statistics = processes, statistics
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, trainer: Trainer, step: int, progress: Mapping[str, Any]) -> None:
        """Copies now, writes in the background. An earlier save is finished first."""
        self.wait()
        state = {name: _copied(value) for name, value in state_tensors(trainer).items()}
        served = {name: _copied(whole(value)) for name, value in trainer.served_state().items()}
        self._thread = threading.Thread(
            target=self._write, args=(state, served, step, dict(progress)), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written. A save that failed is told of, not raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._processes.wait_for_all()

    def finish(self) -> None:
        """As `wait`, at the end of the run: here a save that failed is an error."""
        self.wait()
        if self._error is not None:
            raise self._error

    def _write(
        self,
        state: dict[str, Tensor],
        served: dict[str, Tensor],
        step: int,
        progress: dict[str, Any],
    ) -> None:
        fresh = self._folder / f"{step}.partial"
        self._error = None
        try:
            if self._processes.is_first:
                shutil.rmtree(fresh, ignore_errors=True)
            with warnings.catch_warnings():
                # It tells a single process that it is one.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(
                    state,
                    checkpoint_id=fresh / _STATE,
                    process_group=self._processes.background_group,
                    no_dist=self._processes.world_size == 1,
                )
            if self._processes.is_first:
                self._complete(fresh, served, progress)
                fresh.rename(self._folder / str(step))
                _sync(self._folder)
                logger.info("Saved checkpoint %s", self._folder / str(step))
                self._remove_old()
        except Exception as error:
            # Training goes on: the next save may find room again, and nothing older is touched.
            self._error = error
            logger.error("Checkpoint of step %d was not saved: %s", step, error)
            if self._processes.is_first:
                shutil.rmtree(fresh, ignore_errors=True)

    def _complete(self, fresh: Path, served: dict[str, Tensor], progress: dict[str, Any]) -> None:
        (fresh / _STATE / _PROGRESS).write_text(json.dumps(progress, indent=2))
        sections = {TRAIN_SECTION: to_json(self._config)}
        weights.save_model(served, self._config.model, fresh, sections=sections)
        if self._statistics is not None:
            folder = fresh / "assets" / self._statistics.asset_id
            write_norm_stats(folder, self._statistics.stats)
        files = sorted(path for path in fresh.rglob("*") if path.is_file())
        contents = {str(path.relative_to(fresh)): _facts(path) for path in files}
        manifest = fresh / _MANIFEST
        manifest.write_text(json.dumps(contents, indent=2))
        for path in (*files, manifest, *(p for p in fresh.rglob("*") if p.is_dir()), fresh):
            _sync(path)

    def _remove_old(self) -> None:
        steps = saved_steps(self._folder)
        period, newest = self._config.keep_period, steps[-self._config.keep_last :]
        for step in steps:
            kept_for_good = period is not None and step % period == 0
            if step not in newest and not kept_for_good:
                shutil.rmtree(self._folder / str(step), ignore_errors=True)


def saved_steps(run: Path) -> list[int]:
    """Steps of which there is a folder, in order; whether it is whole is another question."""
    return sorted(int(path.name) for path in run.glob("*") if path.name.isdecimal())


def newest_whole_step(run: Path) -> int | None:
    """The newest checkpoint that is as it was written; damaged ones are passed over, and told."""
    for step in reversed(saved_steps(run)):
        damage = find_damage(run / str(step))
        if damage is None:
            return step
        logger.warning("Checkpoint %s is not used: %s", run / str(step), damage)
    return None


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, if anything is."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        for name, facts in manifest.items():
            if _facts(folder / name) != facts:
                return f"{name} is not as it was written"
    except (OSError, ValueError, AttributeError) as error:
        return f"it is not complete ({error})"
    return None


def restore(trainer: Trainer, folder: Path, processes: Processes) -> dict[str, Any]:
    """Fill the trainer in place; what the loop had written of its own progress."""
    reader = dcp.FileSystemReader(folder / _STATE)
    saved = reader.read_metadata().state_dict_metadata
    tensors = prepare_to_load(trainer, saved)
    dcp.load(
        tensors,
        storage_reader=reader,
        process_group=processes.background_group,
        no_dist=processes.world_size == 1,
    )
    progress: dict[str, Any] = json.loads((folder / _STATE / _PROGRESS).read_text())
    return progress


def _copied(tensor: Tensor) -> Tensor:
    """On the CPU, where training does not change it any more."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _facts(path: Path) -> dict[str, int]:
    checksum, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return {"size": size, "crc32": checksum}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
