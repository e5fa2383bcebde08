"""Processes that read samples, and how batches come back from them.

    this process ──indices──▶ worker 0, 1, …      one socket per worker
                 ◀──batch───                      in a slot of memory that the two share
          │                      ▲
          └──▶ nursery ──forks───┘                loads the data set's columns once

The nursery is a fresh process (forkserver), so workers inherit no GPU, threads or locks of the
training process; they are forked from it, so all of them share one copy of what it has read.

How it ends: whoever loses its partner stops. A worker whose socket closes exits, even if this
process was killed; a worker that dies is noticed at once, because its socket closes. Workers ignore
Ctrl-C and SIGTERM, which may be sent to all processes of a group: it is this process that decides.

A slot is used again and again (fresh memory costs ten times as much as filling it): a batch is
copied out as soon as it has arrived, and no worker is asked for more batches than it has slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import mmap
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

from piston.data.batches import Batch, Layout, allocate, arrange, fill, view
from piston.data.subsets import Samples

# Seconds that a worker's last words may take to arrive, and that the nursery may take to end.
PATIENCE = 5.0


class WorkerError(RuntimeError):
    """A worker process ended without being asked to."""


class RemoteTraceback(Exception):
    """Where in the worker an error arose: shown as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclasses.dataclass(frozen=True)
class _InSlot:
    """A batch is in this slot; with `new_size`, the slot's new file follows."""

    slot: int
    layout: Layout
    new_size: int | None


class Workers:
    """`ask(worker, indices)`, then `answer(worker)`: each worker answers in the order asked.

    At most `num_slots` questions to a worker may be open at a time.
    """

    def __init__(
        self, samples: Samples, num_workers: int, num_slots: int, *, pin_memory: bool = False
    ) -> None:
        self._num_slots, self._pin_memory = num_slots, pin_memory
        self._num_open = [0] * num_workers
        self._slots: dict[tuple[int, int], mmap.mmap] = {}
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports torch once, not for every loader
        pairs = [mp.Pipe() for _ in range(num_workers)]
        self._control, control = mp.Pipe()
        self._connections = [ours for ours, _ in pairs]
        theirs = [their for _, their in pairs]
        self._nursery = context.Process(
            target=_raise_workers,
            args=(_pickled(samples), theirs, control, num_slots),
            name="piston-nursery",
        )
        self._nursery.start()
        for end in (*theirs, control):
            end.close()

    def ask(self, worker: int, indices: Sequence[int]) -> None:
        if self._num_open[worker] == self._num_slots:
            raise ValueError(f"Worker {worker} has no slot for a further batch: take one first.")
        self._num_open[worker] += 1
        try:
            self._connections[worker].send(list(indices))
        except OSError:
            raise self._death(worker) from None

    def answer(self, worker: int) -> Batch:
        """Waits for the batch; an error of the worker's is raised here as it was there."""
        end = self._connections[worker]
        try:
            answer = end.recv()
            if isinstance(answer, _InSlot):
                return self._copy_out(worker, answer)
        except (EOFError, OSError):
            raise self._death(worker) from None
        error, where = pickle.loads(answer)
        raise error from RemoteTraceback(where)

    def _copy_out(self, worker: int, answer: _InSlot) -> Batch:
        place = (worker, answer.slot)
        if answer.new_size is not None:
            file = reduction.recv_handle(self._connections[worker])
            self._slots[place] = mmap.mmap(file, answer.new_size)
            os.close(file)
        shared = torch.frombuffer(self._slots[place], dtype=torch.uint8)
        memory = allocate(answer.layout, pin=self._pin_memory)
        memory.copy_(shared[: len(memory)])
        self._num_open[worker] -= 1
        return view(memory, answer.layout)

    def close(self) -> None:
        """Workers are stopped wherever they are; they hold nothing that could be lost."""
        for end in (self._control, *self._connections):
            end.close()
        self._nursery.join(PATIENCE)
        if self._nursery.exitcode is None:
            self._nursery.kill()
            self._nursery.join()

    def _death(self, worker: int) -> BaseException:
        """What is known about the end of a worker."""
        with contextlib.suppress(EOFError, OSError):
            while self._control.poll(PATIENCE):
                number, pid, report = self._control.recv()
                if number is None:
                    error, where = pickle.loads(report)
                    error.__cause__ = RemoteTraceback(where)
                    return error
                if number == worker:
                    return WorkerError(_obituary(worker, pid, report))
        self._nursery.join(PATIENCE)
        return WorkerError(
            f"Worker {worker} is gone, and so is the process that started it (exit code "
            f"{self._nursery.exitcode}). If nothing is said above, the system may have run out of "
            "memory: try fewer workers (--num-workers)."
        )


def _pickled(samples: Samples) -> bytes:
    try:
        return bytes(reduction.ForkingPickler.dumps(samples))
    except Exception as error:
        error.add_note(
            "The data cannot be handed to worker processes. Transforms must be importable (no "
            "lambdas, nothing defined inside a function); or set --num-workers 0."
        )
        raise


def _obituary(worker: int, pid: int, exit_code: int) -> str:
    told = f"Worker {worker} (process {pid}) that reads data "
    if exit_code >= 0:
        return told + f"ended with exit code {exit_code}."
    name = signal.Signals(-exit_code).name
    hint = {
        "SIGKILL": " The system kills processes when it runs out of memory: try fewer workers "
        "(--num-workers) or a smaller batch.",
        "SIGSEGV": " A video may be damaged: run piston data check.",
    }
    return told + f"was killed by {name}." + hint.get(name, "")


def _raise_workers(
    data: bytes, ends: list[Connection], control: Connection, num_slots: int
) -> None:
    """The nursery: reads what all share, forks the workers, reports deaths, outlives none."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        samples = pickle.loads(data)
        for part in getattr(samples, "datasets", (samples,)):  # of a mixture
            getattr(part, "preload", lambda: None)()
    except Exception as error:
        control.send((None, os.getpid(), _portable(error)))
        return
    gc.freeze()  # what is never collected is never written to, and stays shared
    context = mp.get_context("fork")
    processes = [
        context.Process(target=_work, args=(samples, number, ends, control, num_slots), daemon=True)
        for number in range(len(ends))
    ]
    for process in processes:
        process.start()
    for end in ends:
        end.close()
    with contextlib.suppress(OSError):
        _watch(processes, control)
    for process in processes:
        process.kill()


def _watch(processes: Sequence[Any], control: Connection) -> None:
    """Until the training process closes its end, or no worker is left."""
    alive = {process.sentinel: number for number, process in enumerate(processes)}
    while alive:
        for ready in connection.wait([control, *alive]):
            if ready is control:
                return
            number = alive.pop(ready)
            processes[number].join()
            control.send((number, processes[number].pid, processes[number].exitcode))


def _work(
    samples: Samples, number: int, ends: list[Connection], control: Connection, num_slots: int
) -> None:
    """A worker: batches for indices, as long as somebody asks."""
    for end in (*ends[:number], *ends[number + 1 :], control):
        end.close()  # else the death of its owner would go unnoticed
    end, slots = ends[number], itertools.cycle([_Slot(slot) for slot in range(num_slots)])
    with contextlib.suppress(EOFError, OSError):
        while True:
            indices = end.recv()
            try:
                rows, layout = arrange([samples[index] for index in indices])
            except Exception as error:
                end.send(_portable(error))
            else:
                next(slots).send(end, rows, layout)


class _Slot:
    """A worker's end of a slot."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._memory: mmap.mmap | None = None

    def send(self, end: Connection, rows: Sequence[Mapping[str, Any]], layout: Layout) -> None:
        if self._memory is not None and layout.num_bytes <= len(self._memory):
            fill(self._memory, rows, layout)
            end.send(_InSlot(self._number, layout, None))
            return
        with _anonymous_file() as file:
            os.ftruncate(file, layout.num_bytes)
            self._memory = mmap.mmap(file, layout.num_bytes)
            fill(self._memory, rows, layout)
            end.send(_InSlot(self._number, layout, layout.num_bytes))
            reduction.send_handle(end, file, None)


def _portable(error: Exception) -> bytes:
    """The error and its traceback; its type is kept where it survives the journey."""
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        told = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", []):
            told.add_note(note)
        error = told
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return pickle.dumps((error, where))


@contextlib.contextmanager
def _anonymous_file() -> Iterator[int]:
    """Memory without a name: nothing is left behind, and /dev/shm may be as small as it likes."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("piston-batch")
        try:
            yield file
        finally:
            os.close(file)
    else:
        with tempfile.TemporaryFile() as temporary:
            yield temporary.fileno()
