"""Checkpoints of a run: written in the background, complete or absent, and read again.

    <run>/<step>/model.safetensors, config.json      the served weights: `piston serve <run>/<step>`
                 assets/<asset_id>/norm_stats.json
                 train_state/                        what a resumed run needs (see `state_tensors`)
                 manifest.json                       size and checksum of every file, written last

A folder is written under a temporary name, flushed to disk and renamed. A checkpoint that is to be
deleted is renamed first. A damaged checkpoint is skipped with a warning, never used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from piston import weights
from piston.config import TRAIN_SECTION, DataConfig, TrainConfig
from piston.files import MANIFEST, find_damage, read_json, sync, write_json, write_manifest
from piston.serialization import to_json
from piston.training.distributed import Processes, whole
from piston.training.step import Trainer
from piston.transforms.normalize import read_norm_stats, write_norm_stats

logger = logging.getLogger(__name__)

_STATE = "train_state"
_PROGRESS = "progress.json"
# Endings of the folders of steps that are being written or deleted; of no use after a kill.
UNFINISHED = ("partial", "removed")

# How often the last save is tried again, and the seconds before each attempt.
_ATTEMPTS, _PAUSE = 20, 30.0

# DCP warns a single process that it is alone. (`catch_warnings` is not safe with threads.)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def state_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the whole state of a run under these names; the tensors themselves, not copies.

        model/<name>                master weights, frozen ones included
        optimizer/<name>/<part>     what the optimizer keeps: AdamW's moments and its step count
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


def copy_state(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies on the CPU of the state, and of the weights to serve.

    Served is the moving average where there is one. The second shares memory with the first, except
    under FSDP: there the first process holds whole tensors.
    """
    tensors = state_tensors(trainer)
    state = {name: _copied(value) for name, value in tensors.items()}
    served = {}
    for name in trainer.model.state_dict():
        source = f"ema/{name}" if f"ema/{name}" in tensors else f"model/{name}"
        if trainer.config.sharding != "fsdp":
            served[name] = state[source]
            continue
        gathered = whole(tensors[source])  # one tensor at a time; every process takes part
        if trainer.processes.is_first:
            served[name] = _copied(gathered)
    return state, served


def _copied(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


class CheckpointWriter:
    """Saves a run's checkpoints, one at a time, and deletes those that are not to be kept.

    A checkpoint carries the statistics of all pipelines. Under DDP every process has the whole
    state, and the first one saves.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        processes: Processes,
        pipelines: Sequence[DataConfig],
    ) -> None:
        self._config, self._folder = config, folder
        self._processes, self._pipelines = processes, pipelines
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[Exception | None] | None = None
        self._gigabytes = 0.0
        # The last save of the run, which is tried again if it fails.
        self._last: Callable[[], Exception | None] | None = None

    def save(
        self, trainer: Trainer, step: int, progress: Mapping[str, Any], *, last: bool = False
    ) -> None:
        """Copy the state now and write it in the background, after any earlier save has finished.

        The copy of the `last` save is kept for `finish`, which must follow.
        """
        self.wait()
        if self._processes.is_first or self._config.sharding == "fsdp":
            state, served = copy_state(trainer)
            # Without small files. (A sharded tensor reports its whole size.)
            self._gigabytes = sum(t.nbytes for t in (*state.values(), *served.values())) / 1e9
            write = functools.partial(self._write, step, state, served, progress)
            self._last = write if last else None
            self._saving = self._pool.submit(write)

    def wait(self) -> Exception | None:
        """Wait until no process is writing; return the error of a failed save, which was logged."""
        error = None if self._saving is None else self._saving.result()
        self._processes.wait_for_all()
        return error

    def finish(self) -> None:
        """Wait for the last save; if the disk was full, try it again for some minutes.

        Raise OSError if it still fails: what was trained since the previous save would be lost.
        """
        error = self.wait()
        for _ in range(_ATTEMPTS):
            may_help = self._last is not None and isinstance(error, OSError)
            if not any(self._processes.sum(may_help)):
                break
            if self._processes.is_first:
                logger.error(
                    "The trained weights are still in memory. Free some space in %s: saving is "
                    "tried again in %d seconds, for %d minutes in all.",
                    *(self._folder, _PAUSE, _ATTEMPTS * _PAUSE / 60),
                )
            time.sleep(_PAUSE)
            if self._last is not None:
                self._saving = self._pool.submit(self._last)
            error = self.wait()
        if error is not None:
            steps = saved_steps(self._folder)
            start = f"after step {steps[-1]}, the newest checkpoint" if steps else "from the start"
            raise OSError(
                f"The last checkpoint, about {self._gigabytes:.1f} GB, could not be written to "
                f"{self._folder}: {error}. Free some space there and continue with --resume, "
                f"{start}."
            ) from error

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()  # does not wait for other processes, which may have failed

    def _write(
        self,
        step: int,
        state: dict[str, Tensor],
        served: dict[str, Tensor],
        progress: Mapping[str, Any],
    ) -> Exception | None:
        """Write a checkpoint; return the error if that fails."""
        folder, temporary = self._folder / str(step), self._folder / f"{step}.partial"
        try:
            group = _process_group(self._config, self._processes)
            dcp.save(state, checkpoint_id=temporary / _STATE, **group)
            if self._processes.is_first:
                write_json(temporary / _STATE / _PROGRESS, progress)
                sections = {TRAIN_SECTION: to_json(self._config)}
                weights.save_model(served, self._config.model, temporary, sections=sections)
                for one in self._pipelines:
                    if one.norm_stats is not None and one.asset_id is not None:
                        write_norm_stats(temporary / "assets" / one.asset_id, one.norm_stats)
                write_manifest(temporary)
                temporary.rename(folder)
                sync(self._folder)
                logger.info("Saved checkpoint %s", folder)
                self._delete_old()
        except (Exception, CheckpointException) as failure:
            # Training continues: the next save may succeed, and earlier ones are untouched.
            error = _cause(failure)
            if self._processes.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
                logger.error(
                    "The checkpoint of step %d was not saved: %s (about %.1f GB are needed, %.1f "
                    "GB are free there). Earlier ones are untouched%s",
                    *(step, error, self._gigabytes),
                    shutil.disk_usage(self._folder).free / 1e9,
                    "." if self._last else "; training continues, and the next save tries again.",
                )
            return error
        return None

    def _delete_old(self) -> None:
        # A folder that someone else put there, with a number for a name, is not a checkpoint.
        steps = [
            step
            for step in saved_steps(self._folder)
            if (self._folder / str(step) / MANIFEST).is_file()
        ]
        period, newest = self._config.keep_period, steps[-self._config.keep_last :]
        for step in steps:
            if step in newest or (period is not None and step % period == 0):
                continue
            removed = self._folder / f"{step}.removed"
            try:
                (self._folder / str(step)).rename(removed)
                shutil.rmtree(removed)
            except OSError as error:  # the new checkpoint is saved all the same
                logger.warning("Checkpoint %d was not deleted: %s", step, error)


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


def _process_group(config: TrainConfig, processes: Processes) -> dict[str, Any]:
    """Return DCP's options: together under FSDP, else each process for itself."""
    if config.sharding == "fsdp":
        return {"process_group": processes.patient_group}
    return {"no_dist": True}


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


def warn_of_other_statistics(folder: Path, pipeline: DataConfig) -> None:
    """Log a warning if a resumed run would use other statistics than its checkpoint."""
    if pipeline.norm_stats is None or pipeline.asset_id is None:
        return
    saved = folder / "assets" / pipeline.asset_id
    if not saved.is_dir():
        logger.warning("%s was trained with other statistics than %s", folder, pipeline.asset_id)
    elif read_norm_stats(saved) != pipeline.norm_stats:
        logger.warning(
            "The statistics of %s are not those that %s was trained with (in its assets/ folder): "
            "states and actions are now normalised differently. Restore them to undo that.",
            *(pipeline.asset_id, folder),
        )


def restore(trainer: Trainer, folder: Path) -> Any:
    """Load a checkpoint into the trainer in place and return the loop's saved progress."""
    reader = _StateReader(folder / _STATE)
    with _damage_named(folder / _STATE):
        entries = {
            name: entry
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    saved = {name: tuple(entry.size) for name, entry in entries.items()}
    # The optimizer's state, which a new optimizer has only after its first step.
    for name, parameter in trainer.parameters.items():
        prefix = f"optimizer/{name}/"
        for key, entry in entries.items():
            if key.startswith(prefix):
                part = key.removeprefix(prefix)
                trainer.optimizer.state[parameter][part] = _empty_state(parameter, entry)
    tensors = state_tensors(trainer)
    present = {name: tuple(value.shape) for name, value in tensors.items()}
    differing = [
        f"{name} (saved: {saved.get(name, 'none')}, now: {present.get(name, 'none')})"
        for name in {**saved, **present}
        if saved.get(name) != present.get(name)
    ]
    if differing:
        raise ValueError(
            f"{folder} belongs to another run: {len(differing)} tensors differ, such as "
            f"{'; '.join(differing[:4])}. Resume with the same model, --freeze and --ema-decay, or "
            "start a new run with --weights."
        )
    group = _process_group(trainer.config, trainer.processes)
    with _damage_named(folder / _STATE):
        dcp.load(tensors, storage_reader=reader, **group)
    return read_json(folder / _STATE / _PROGRESS)


def _empty_state(parameter: Tensor, saved: TensorStorageMetadata) -> Tensor:
    """Return a tensor to restore optimizer state into, sharded as its parameter is."""
    dtype = saved.properties.dtype
    if saved.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype)
    return torch.zeros(saved.size, dtype=dtype, device=parameter.device)


@contextlib.contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """Raise ValueError for whatever reading a damaged state leads to."""
    try:
        yield
    except (Exception, CheckpointException) as failure:
        error = _cause(failure)
        if error is failure and str(folder) in str(error):
            raise
        raise ValueError(
            f"{folder} cannot be read: {type(error).__name__}: {error}. If it is damaged, delete "
            "this checkpoint to resume from the one before."
        ) from failure


class _StateReader(dcp.FileSystemReader):
    """DCP's reader, except that `.metadata`, a pickle, may create only what DCP itself stores."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # noqa: ARG002
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            unpickler = _MetadataUnpickler(file)
            unpickler.path = path
            try:
                metadata = unpickler.load()
            except ValueError:
                raise
            except Exception as error:  # of any kind, if the bytes are not those of a pickle
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"{path} cannot be read ({reason}).") from error
        entries = getattr(metadata, "state_dict_metadata", None)
        if not isinstance(metadata, Metadata) or not isinstance(entries, dict):
            raise ValueError(f"{path} does not describe a saved training state.")
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle._Unpickler):
    """Creates DCP's own records and nothing else: a checkpoint file must not run code.

    The unpickler in Python, not that in C, because it lets us check what attributes are set on: a
    pickle that sets them on a class such as Path would change it for the whole process.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    path: Path  # for the error message
    _OTHERS = (
        *("torch.Size", "torch.distributed.checkpoint.filesystem._StorageInfo"),
        *("torch.serialization._get_layout", "pathlib.Path", "pathlib.PosixPath"),
        *("pathlib.WindowsPath", "pathlib._local.PosixPath"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata":
            found = getattr(dcp.metadata, name, None)
            if dataclasses.is_dataclass(found) or name == "_MEM_FORMAT_ENCODING":
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if f"{module}.{name}" in self._OTHERS:
            return super().find_class(module, name)
        raise self._refused(f"refers to {module}.{name}")

    def load_build(self) -> None:
        *_, changed, _ = self.stack  # type: ignore[attr-defined]
        if isinstance(changed, type) or not dataclasses.is_dataclass(changed):
            raise self._refused(f"sets attributes of {changed!r}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def _refused(self, found: str) -> ValueError:
        return ValueError(
            f"{self.path} {found}, which no training state does. The file is damaged or was made "
            "to run code: do not resume from it."
        )
