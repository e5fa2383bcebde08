"""Checkpoints of a run: written in the background, complete or absent, and read again.

    <run>/<step>/model.safetensors, config.json      the served weights: `piston serve <run>/<step>`
                 assets/<asset_id>/norm_stats.json
                 train_state/                        what a resumed run needs (see `state_tensors`)
                 manifest.json                       size and checksum of every file, written last

A folder is written under a temporary name, flushed to disk and renamed. A checkpoint that is to be
deleted is renamed first. A damaged checkpoint is skipped with a warning, never used.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from piston import weights
from piston.config import TRAIN_SECTION, TrainConfig
from piston.files import find_damage, read_json, sync, write_json, write_manifest
from piston.serialization import to_json
from piston.training.distributed import Processes, whole
from piston.training.step import Trainer
from piston.transforms.normalize import NormStats, read_norm_stats, write_norm_stats

logger = logging.getLogger(__name__)

_STATE = "train_state"
_PROGRESS = "progress.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Folders that are being written or deleted; after a kill they are of no use.
UNFINISHED = ("[0-9]*.partial", "[0-9]*.removed")

# How often the last save is tried again, and the seconds before each attempt.
_ATTEMPTS, _PAUSE = 20, 30.0

# DCP warns a single process that it is alone. (`catch_warnings` is not safe with threads.)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

# -- the state of a run as tensors -----------------------------------------------------------------


def state_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the whole state of a run under these names; the tensors themselves, not copies.

        model/<name>                master weights, frozen ones included
        optimizer/<name>/<part>     AdamW's moments and its step count
        ema/<name>                  exponential moving average of the weights that train

    Under FSDP the tensors are sharded. Random numbers have no state: they follow from the seed and
    the step.
    """
    tensors = {f"model/{name}": value for name, value in trainer.model.state_dict().items()}
    for name, parameter in trainer.parameters.items():
        # A parameter on which no loss depends has no optimizer state.
        for part, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{part}"] = value
    if trainer.ema is not None:
        tensors |= {f"ema/{name}": value for name, value in trainer.ema.mean.items()}
    return tensors


def _served(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the weights to serve: the moving average where there is one."""
    names = [name.removeprefix("model/") for name in tensors if name.startswith("model/")]
    return {name: tensors.get(f"ema/{name}", tensors[f"model/{name}"]) for name in names}


def _to_be_filled(trainer: Trainer, saved: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the state tensors to load into, with optimizer state where the saved run had one."""
    for name, parameter in trainer.parameters.items():
        if f"optimizer/{name}/step" in saved:
            state = trainer.optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
    tensors = state_tensors(trainer)
    present = {name: tuple(value.shape) for name, value in tensors.items()}
    differing = [name for name in {**saved, **present} if saved.get(name) != present.get(name)]
    if differing:
        examples = "; ".join(
            f"{name} (saved: {saved.get(name, 'none')}, now: {present.get(name, 'none')})"
            for name in differing[:4]
        )
        raise ValueError(
            f"The checkpoint belongs to another run: {len(differing)} tensors differ, such as "
            f"{examples}. Resume with the same model, --freeze and --ema-decay, or start a new run "
            "with --weights."
        )
    return tensors


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The normalisation statistics that a checkpoint carries."""

    asset_id: str
    stats: Mapping[str, NormStats]


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """Copies on the CPU of what a checkpoint holds; training does not change them."""

    # Under FSDP this process's shards.
    state: dict[str, Tensor]
    # Shares memory with `state`, except under FSDP: there the first process holds whole tensors.
    served: dict[str, Tensor]
    step: int
    progress: Mapping[str, Any]

    @classmethod
    def of(cls, trainer: Trainer, step: int, progress: Mapping[str, Any]) -> _Snapshot:
        tensors = state_tensors(trainer)
        state = {name: _copied(value) for name, value in tensors.items()}
        if trainer.config.sharding != "fsdp":
            return cls(state, _served(state), step, progress)
        served = {}
        for name, value in _served(tensors).items():
            gathered = whole(value)  # one tensor at a time; every process takes part
            if trainer.processes.is_first:
                served[name] = _copied(gathered)
        return cls(state, served, step, progress)

    @property
    def num_bytes(self) -> int:
        """Size on disk without small files. (A sharded tensor reports its whole size.)"""
        tensors = (*self.state.values(), *self.served.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _copied(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


# -- writing ---------------------------------------------------------------------------------------


class CheckpointWriter:
    """Saves a run's checkpoints, one at a time, and deletes those that are not to be kept.

    Under DDP every process has the whole state, and the first one saves.
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
        # The last save of the run, which is tried again if it fails.
        self._last: _Snapshot | None = None

    def save(
        self, trainer: Trainer, step: int, progress: Mapping[str, Any], *, last: bool = False
    ) -> None:
        """Copy the state now and write it in the background, after any earlier save has finished.

        The copy of the `last` save is kept for `finish`, which must follow.
        """
        self.wait()
        if self._takes_part:
            snapshot = _Snapshot.of(trainer, step, progress)
            self._last = snapshot if last else None
            self._start(snapshot)

    def wait(self) -> None:
        """Wait until no process is writing. A failed save has been logged and is not raised."""
        self._join()
        self._processes.wait_for_all()

    def finish(self) -> None:
        """Wait for the last save; if the disk was full, try it again for some minutes.

        Raise OSError if it still fails: what was trained since the previous save would be lost.
        """
        self.wait()
        for _ in range(_ATTEMPTS):
            may_help = self._last is not None and isinstance(self._error, OSError)
            if not self._processes.any(may_help):
                break
            if self._processes.is_first:
                logger.error(
                    "The trained weights are still in memory. Free some space in %s: saving is "
                    "tried again in %d seconds, for %d minutes in all.",
                    self._folder,
                    _PAUSE,
                    _ATTEMPTS * _PAUSE / 60,
                )
            time.sleep(_PAUSE)
            if self._last is not None:
                self._start(self._last)
            self.wait()
        if self._error is not None:
            raise self._not_saved(self._error) from self._error

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._join()  # without waiting for other processes, which may have failed elsewhere

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _start(self, snapshot: _Snapshot) -> None:
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def _write(self, snapshot: _Snapshot) -> None:
        temporary, self._error = self._folder / f"{snapshot.step}.partial", None
        try:
            group = _process_group(self._config, self._processes)
            dcp.save(snapshot.state, checkpoint_id=temporary / _STATE, **group)
            if self._processes.is_first:
                self._complete(temporary, snapshot)
                temporary.rename(self._folder / str(snapshot.step))
                sync(self._folder)
                logger.info("Saved checkpoint %s", self._folder / str(snapshot.step))
                self._delete_old()
        except (Exception, CheckpointException) as failure:
            # Training continues: the next save may succeed, and earlier ones are untouched.
            self._error = _cause(failure)
            if self._processes.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
                is_last = snapshot is self._last
                logger.error(
                    "The checkpoint of step %d was not saved: %s (about %.1f GB are needed, %.1f "
                    "GB are free there). Earlier ones are untouched%s",
                    snapshot.step,
                    self._error,
                    snapshot.num_bytes / 1e9,
                    shutil.disk_usage(self._folder).free / 1e9,
                    "." if is_last else "; training continues, and the next save tries again.",
                )

    def _not_saved(self, error: Exception) -> OSError:
        steps = saved_steps(self._folder)
        size = f", about {self._last.num_bytes / 1e9:.1f} GB," if self._last else ""
        start = f"after step {steps[-1]}, the newest checkpoint" if steps else "from the start"
        return OSError(
            f"The last checkpoint{size} could not be written to {self._folder}: {error}. Free some "
            f"space there and continue with --resume, {start}."
        )

    def _complete(self, folder: Path, snapshot: _Snapshot) -> None:
        write_json(folder / _STATE / _PROGRESS, snapshot.progress)
        sections = {TRAIN_SECTION: to_json(self._config)}
        weights.save_model(snapshot.served, self._config.model, folder, sections=sections)
        if self._statistics is not None:
            assets = folder / "assets" / self._statistics.asset_id
            write_norm_stats(assets, self._statistics.stats)
        write_manifest(folder)

    def _delete_old(self) -> None:
        steps = saved_steps(self._folder)
        period, newest = self._config.keep_period, steps[-self._config.keep_last :]
        for step in steps:
            is_permanent = period is not None and step % period == 0
            if step not in newest and not is_permanent:
                removed = self._folder / f"{step}.removed"
                try:
                    (self._folder / str(step)).rename(removed)
                    shutil.rmtree(removed)
                except OSError as error:  # the new checkpoint is saved all the same
                    logger.warning("Checkpoint %d was not deleted: %s", step, error)


# -- reading ---------------------------------------------------------------------------------------


def saved_steps(run: Path) -> list[int]:
    """Return the steps that have a checkpoint folder, in order."""
    return sorted(int(path.name) for path in run.glob("*") if path.name.isdecimal())


def newest_whole_step(run: Path) -> int | None:
    """Return the newest undamaged checkpoint's step; log a warning for each damaged one."""
    for step in reversed(saved_steps(run)):
        damage = find_damage(run / str(step))
        if damage is None:
            return step
        logger.warning("Checkpoint %s is not used: %s", run / str(step), damage)
    return None


def warn_of_other_statistics(folder: Path, statistics: Statistics | None) -> None:
    """Log a warning if a resumed run would use other statistics than its checkpoint."""
    if statistics is None:
        return
    saved = folder / "assets" / statistics.asset_id
    if not saved.is_dir():
        logger.warning("%s was trained with other statistics than %s", folder, statistics.asset_id)
    elif read_norm_stats(saved) != statistics.stats:
        logger.warning(
            "The statistics of %s are not those that %s was trained with (in its assets/ folder): "
            "states and actions are now normalised differently. Restore them to undo that.",
            statistics.asset_id,
            folder,
        )


def restore(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Load a checkpoint into the trainer in place and return the loop's saved progress."""
    reader = _StateReader(folder / _STATE)
    saved = {
        name: tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    group = _process_group(trainer.config, trainer.processes)
    dcp.load(_to_be_filled(trainer, saved), storage_reader=reader, **group)
    progress: dict[str, Any] = read_json(folder / _STATE / _PROGRESS)
    return progress


class _StateReader(dcp.FileSystemReader):
    """DCP's reader, except that `.metadata`, a pickle, may create only what DCP itself stores."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # noqa: ARG002
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{self.path}/.metadata does not describe a saved training state.")
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Creates DCP's own records and nothing else: a checkpoint file must not run code."""

    _OTHERS = frozenset(
        {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "Path"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._path = getattr(file, "name", "the file")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata":
            found = getattr(dcp.metadata, name, None)
            if dataclasses.is_dataclass(found) or name == "_MEM_FORMAT_ENCODING":
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in self._OTHERS:
            return super().find_class(module, name)
        raise ValueError(
            f"{self._path} refers to {module}.{name}, which no training state contains. The file "
            "is damaged or was made to run code: do not resume from it."
        )


def _process_group(config: TrainConfig, processes: Processes) -> dict[str, Any]:
    """Return DCP's options: together under FSDP, else each process for itself."""
    if config.sharding == "fsdp":
        return {"process_group": processes.patient_group}
    return {"no_dist": True}


def _cause(failure: BaseException) -> Exception:
    """Return the first error on the first process that had one."""
    if isinstance(failure, CheckpointException):
        failure = next(iter(failure.failures.values()))[0]
    found: BaseException | None = failure
    while found is not None:  # a full disk may be hidden behind the error it led to
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return failure if isinstance(failure, Exception) else RuntimeError(str(failure))
