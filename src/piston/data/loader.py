"""Batches for training, without end: in order, from this process or from workers.

    with Loader(data, Order(data, batch_size=32, seed=42), num_workers=2) as loader:
        for batch in loader: …          # nested dictionaries of tensors; images stay uint8
        loader.state_dict()             # counts the batches that were handed out, not those ahead

Knows nothing of models or devices, except that memory is pinned where there is a GPU.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch

from piston.data.batches import Batch, collate
from piston.data.order import Order
from piston.data.subsets import Samples
from piston.data.workers import Workers

# Batches that each worker is ahead.
PREFETCH = 2


class Loader(Iterator[Batch]):
    """An endless iterator. Use it in a `with`, or call `close`; it is also closed at exit."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        *,
        num_workers: int = 0,
        prefetch: int = PREFETCH,
        pin_memory: bool | None = None,
    ) -> None:
        if num_workers < 0 or prefetch < 1:
            raise ValueError(
                f"num_workers is {num_workers} (at least 0 expected), prefetch {prefetch} (at "
                "least 1)."
            )
        self.order = order
        self._samples, self._num_workers, self._prefetch = samples, num_workers, prefetch
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._position = 0
        self._workers: Workers | None = None
        self._stop_workers: weakref.finalize[..., Any] | None = None
        self._asked: collections.deque[int] = collections.deque()
        self._next_worker = 0

    def __next__(self) -> Batch:
        try:
            batch = self._read() if self._num_workers == 0 else self._receive()
        except BaseException:
            self.close()
            raise
        self._position += self.order.batch_size
        return batch

    @property
    def epoch(self) -> float:
        return self.order.epoch(self._position)

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken."""
        position = self.order.position_of(state)
        self.close()
        self._position = position

    def close(self) -> None:
        """Ends the workers. The next batch would start new ones."""
        if self._stop_workers is not None:
            self._stop_workers()
        self._workers = self._stop_workers = None
        self._asked.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Batch:
        samples = [self._samples[int(index)] for index in self.order.take(self._position)]
        return collate(samples, pin_memory=self._pin_memory)

    def _receive(self) -> Batch:
        if self._workers is None:
            self._workers = Workers(
                self._samples, self._num_workers, self._prefetch, pin_memory=self._pin_memory
            )
            # Also at the interpreter's exit, and when the loader is forgotten.
            self._stop_workers = weakref.finalize(self, self._workers.close)
            self._next_worker = 0
        while len(self._asked) < self._num_workers * self._prefetch:
            ahead = self._position + len(self._asked) * self.order.batch_size
            self._workers.ask(self._next_worker, self.order.take(ahead).tolist())
            self._asked.append(self._next_worker)
            self._next_worker = (self._next_worker + 1) % self._num_workers
        batch = self._workers.answer(self._asked[0])
        self._asked.popleft()
        return batch
