"""Batches for training, without end, read by this process or by worker processes.

    with Loader(data, Order(data, batch_size=32, seed=42), num_workers=2) as loader:
        for batch in loader: …          # nested dictionaries of tensors; images stay uint8
        loader.state_dict()             # the position after the last batch handed out

`torch.utils.data.DataLoader` runs the workers. They are forked from a fork server, a fresh process
that has only imported this module, so they inherit no GPU, thread or lock of the training process.
Data sets and batches pass between processes in anonymous shared memory: all workers share one copy
of the columns, and /dev/shm, which is small in containers, is not used.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import mmap
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, reduction, resource_tracker
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Int64
from torch.utils.data import DataLoader, get_worker_info

from piston.data.mixture import WeightedMixture, epoch_order
from piston.data.protocol import Samples, blocks_of
from piston.observation import stack_samples
from piston.serialization import ImportedFiles
from piston.signals import exit_with_parent, ignore_stop_signals

logger = logging.getLogger(__name__)

Batch = dict[str, Any]  # tensors, in nested dictionaries as the samples are
Indices = Int64[np.ndarray, " n"]

# Batches that each worker reads ahead.
PREFETCH = 2
# Seconds between two checks that all workers are alive, and before a busy one is killed at the end.
_CHECK_INTERVAL, _GRACE = 1.0, 1.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# By the number of the signal: Windows has no name for SIGKILL.
_DEATH_HINTS = {
    9: " The system kills processes when it runs out of memory: try fewer workers "
    "(--num-workers) or a smaller batch.",
    11: " A video may be damaged: run piston data check.",
}


class Order:
    """The order of samples: which of them make up which batch, on which rank.

        epoch 0: shuffled | epoch 1: shuffled anew | epoch 2 …   one endless row of samples
        [batch 0][batch 1][batch 2][batch 3][batch 4] …          cut into batches, nothing dropped
         r0  r1   r0  r1                                         each rank takes its slice

    The row is a function of the seed, so a global batch is the same for any number of ranks. A
    position counts the samples that all ranks together have had. A `WeightedMixture` is taken in
    its own shares. Samples with blocks are shuffled within windows of blocks.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, world_size {world_size}; expected 0 ≤ rank < size.")
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(
                f"The batch size ({batch_size}) must be a multiple of the number of processes "
                f"({world_size}): each takes an equal part."
            )
        if not len(samples):
            raise ValueError("There are no samples to put in order.")
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world_size = rank, world_size
        mixture = samples if isinstance(samples, WeightedMixture) else None
        # What the order depends on besides the seed, as JSON keeps it.
        self.samples_per_epoch = mixture.samples_per_epoch if mixture else len(samples)
        self.mixture = mixture and {
            "sizes": [float(len(dataset)) for dataset in mixture.datasets],
            "weights": list(mixture.weights),
        }
        parts = [blocks_of(one) for one in (mixture.datasets if mixture else (samples,))]
        # How many blocks each dataset has; None if none has any, as with cached frames.
        counts = [0 if blocks is None else len(blocks) for blocks in parts]
        self.blocks = counts if any(counts) else None

        @functools.lru_cache(maxsize=2)  # a batch may extend over the end of an epoch
        def order_of(epoch: int) -> Indices:
            if mixture:
                return mixture.plan(seed=seed, epoch=epoch)
            return epoch_order(samples, seed, epoch)

        self._epoch_order = order_of

    def take(self, position: int) -> Indices:
        """Return this rank's part of the batch that starts at a position."""
        count = self.batch_size // self.world_size
        start = position + self.rank * count
        stop, parts = start + count, []
        while start < stop:
            epoch, inside = divmod(start, self.samples_per_epoch)
            parts.append(self._epoch_order(epoch)[inside : inside + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)

    def batches(self, position: int) -> Iterator[list[int]]:
        """Yield the indices of this rank's batches from a position on, without end."""
        while True:
            yield self.take(position).tolist()
            position += self.batch_size

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return what is needed to continue from a position, on any number of ranks."""
        state = {
            "position": position,
            "seed": self.seed,
            "samples_per_epoch": self.samples_per_epoch,
            "mixture": self.mixture,
        }
        return state if self.blocks is None else {**state, "blocks": self.blocks}

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return the position of a saved state. Raise ValueError if its seed is another.

        If the data have changed, the position counts in their new order, with a warning.
        """
        if state.get("seed") != self.seed:
            raise ValueError(
                f"The saved data position belongs to another order: its seed is "
                f"{state.get('seed')}, now it is {self.seed}. Continue with the same seed, or "
                "start a new run."
            )
        changed = [
            f"{name} was {_in_words(state.get(name))}, now it is {_in_words(getattr(self, name))}"
            for name in ("samples_per_epoch", "mixture", "blocks")
            if state.get(name) != getattr(self, name)
        ]
        if changed and self.rank == 0:
            logger.warning(
                "The data are not those of the saved position: %s. Samples are taken in a new "
                "order from here on.",
                "; ".join(changed),
            )
        return int(state["position"])


def _in_words(value: Any) -> Any:
    """Describe a mixture for people: `32 samples (66.7%), 16 samples (33.3%)`."""
    if not isinstance(value, Mapping):
        return value
    sets = zip(value["sizes"], value["weights"])
    return ", ".join(f"{size:,.0f} samples ({weight:.1%})" for size, weight in sets)


class WorkerError(RuntimeError):
    """A worker process ended unexpectedly."""


class Loader(Iterator[Batch]):
    """An endless iterator over batches. Use it in a `with` statement, or call `close`.

    If there is a GPU, batches lie in pinned memory.
    """

    def __init__(self, samples: Samples, order: Order, *, num_workers: int = 0) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; expected at least 0.")
        self.order = order
        self._samples, self._num_workers = samples, num_workers
        self._pin_memory = torch.cuda.is_available()
        self._position = 0
        self._batches: Any = None  # DataLoader's iterator
        self._slots: list[list[_SharedMemory]] = []  # of each worker, one per batch
        self._kill_workers = functools.partial(_kill, ())

    def __next__(self) -> Batch:
        try:
            batch = self._receive() if self._num_workers else self._read()
        except BaseException:
            self.close()
            raise
        self._position += self.order.batch_size
        return batch

    @property
    def epoch(self) -> float:
        """The number of passes over the data, fractions included."""
        return self._position / self.order.samples_per_epoch

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was taken."""
        position = self.order.position_of(state)
        self.close()
        self._position = position

    def close(self) -> None:
        """End the workers. The next batch would start new ones."""
        if self._batches is not None:
            # Not by deleting the iterator: the traceback of an error may refer to it.
            timer = threading.Timer(_GRACE, self._kill_workers)
            timer.start()
            self._batches._shutdown_workers()
            timer.cancel()
            atexit.unregister(self._kill_workers)
        self._batches, self._slots = None, []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Batch:
        samples = [self._samples[int(index)] for index in self.order.take(self._position)]
        batch = stack_samples(samples)
        return _mapped(torch.Tensor.pin_memory, batch) if self._pin_memory else batch

    def _receive(self) -> Batch:
        if self._batches is None:
            self._start_workers()
        while True:
            try:
                answer = next(self._batches)
                break
            except (RuntimeError, OSError, EOFError) as error:
                self._check_workers()
                if "timed out" not in str(error):  # else the batch takes longer than the interval
                    raise
        if isinstance(answer, Exception):
            raise answer
        worker, slot, layout = answer
        memory = self._slots[worker][slot].clear()
        # Copied before the worker uses the slot again.
        copy = torch.Tensor.pin_memory if self._pin_memory else torch.Tensor.clone
        return _mapped(lambda like: copy(torch.from_numpy(memory.allocate(*like))), layout)

    def _start_workers(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports torch once, not in every worker
        resource_tracker.ensure_running()  # unblocks signals where it has to start the tracker
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            forkserver.ensure_running()  # inherits that these signals are blocked
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # One slot more than batches ahead: DataLoader asks for the next batch before one is copied.
        self._slots = [
            [_SharedMemory() for _ in range(PREFETCH + 1)] for _ in range(self._num_workers)
        ]
        loader: DataLoader[Any] = DataLoader(
            _Batches(self._samples, self._slots),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self.order.batches(self._position),
            num_workers=self._num_workers,
            prefetch_factor=PREFETCH,
            timeout=_CHECK_INTERVAL,
            multiprocessing_context=context,
            worker_init_fn=_prepare_worker,
            generator=torch.Generator(),  # leaves the global generator alone
        )
        self._batches = iter(loader)
        # Workers ignore SIGTERM, which multiprocessing sends at exit.
        self._kill_workers = functools.partial(_kill, self._batches._workers)
        atexit.register(self._kill_workers)

    def _check_workers(self) -> None:
        """Raise WorkerError if a worker is dead."""
        workers = self._batches._workers
        connection.wait([worker.sentinel for worker in workers], timeout=0.1)
        for number, worker in enumerate(workers):
            if worker.exitcode is None:
                continue
            cause = f"ended with exit code {worker.exitcode}."
            if worker.exitcode < 0:
                cause = f"was killed by {signal.Signals(-worker.exitcode).name}."
            hint = _DEATH_HINTS.get(-worker.exitcode, "")
            raise WorkerError(
                f"Worker {number} (process {worker.pid}), which reads data, {cause}{hint}"
            ) from None


def _kill(workers: Sequence[Any]) -> None:
    for worker in workers:
        worker.kill()


def _mapped(function: Callable[[Any], Any], batch: Batch) -> Batch:
    return {
        key: _mapped(function, value) if isinstance(value, dict) else function(value)
        for key, value in batch.items()
    }


def _prepare_worker(_: int) -> None:
    """Leave signals to the training process, which may be sent to a whole group; end with it."""
    ignore_stop_signals(*_STOP_SIGNALS)
    # DataLoader watches the process that forked the worker, which is the fork server.
    exit_with_parent()


class _Batches:
    """What a worker runs: `batches[indices]` puts a batch into shared memory, or returns an error.

    Read-only arrays of the samples (the columns of a data set) are in shared memory as well.
    """

    def __init__(self, samples: Samples, slots: Sequence[Sequence[_SharedMemory]]) -> None:
        arrays: list[memoryview] = []

        def is_copied(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.readonly:
                arrays.append(raw)
            return not raw.readonly

        try:
            sent = (ImportedFiles(), samples)
            self._pickled = pickle.dumps(sent, protocol=5, buffer_callback=is_copied)
        except Exception as error:
            error.add_note(
                "The data cannot be handed to worker processes. Transforms must be importable (no "
                "lambdas, nothing defined inside a function); or set --num-workers 0."
            )
            raise
        self._shared = _SharedMemory()
        self._sizes = [len(array) for array in arrays]
        for array in arrays:
            self._shared.allocate((len(array),), "u1")[:] = array
        self._slots = slots
        self._num_stacked = 0

    @functools.cached_property
    def _samples(self) -> Samples:
        memory = self._shared.clear()
        arrays = [memory.allocate((size,), "u1") for size in self._sizes]
        buffers = [array.data.toreadonly() for array in arrays]
        _, samples = pickle.loads(self._pickled, buffers=buffers)
        return samples

    def __getitem__(self, indices: list[int]) -> Any:
        try:
            worker = get_worker_info().id  # type: ignore[union-attr]
            slot = self._num_stacked % len(self._slots[worker])
            self._num_stacked += 1
            memory = self._slots[worker][slot].clear()
            batch = stack_samples([self._samples[index] for index in indices], memory.allocate)
            return worker, slot, _mapped(lambda t: (tuple(t.shape), t.numpy().dtype.str), batch)
        except Exception as error:
            # DataLoader itself would raise an error without the attributes of this one.
            return ExceptionWithTraceback(_picklable(error), error.__traceback__)


def _picklable(error: Exception) -> Exception:
    """Return the error, or one that says the same if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            same.add_note(note)
        return same


class _SharedMemory:
    """Memory for arrays, shared by all processes that it is given to.

    Each process that allocates the same arrays in the same order gets the same memory. It has no
    name, so it is freed with the last process that uses it, however that one ends. It is used again
    and again, because fresh memory takes much longer to fill.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._open(os.memfd_create("piston"))
        else:
            with tempfile.TemporaryFile() as file:
                self._open(os.dup(file.fileno()))

    def _open(self, file: int) -> None:
        self._file, self._memory, self._used = file, mmap.mmap(-1, 1), 0

    def clear(self) -> Self:
        self._used = 0
        return self

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype | str) -> np.ndarray:
        start = -(-self._used // 64) * 64
        self._used = start + math.prod(shape) * np.dtype(dtype).itemsize
        if self._used > len(self._memory):
            if self._used > os.fstat(self._file).st_size:
                os.ftruncate(self._file, self._used)
            self._memory = mmap.mmap(self._file, 0)
        return np.ndarray(shape, dtype, buffer=self._memory, offset=start)

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._file)

    def __setstate__(self, handle: Any) -> None:
        self._open(handle.detach())

    def __del__(self) -> None:
        os.close(self._file)
