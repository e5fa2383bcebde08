"""The order of samples: which of them make up which batch, on which rank.

    epoch 0: shuffled | epoch 1: shuffled anew | epoch 2 …      one endless row of samples
    [batch 0][batch 1][batch 2][batch 3][batch 4] …             cut into batches, nothing dropped
     r0  r1   r0  r1                                            each rank takes its slice of each

The row depends on the seed and nothing else, so a global batch is the same for any number of ranks,
and a position in it is one number. Knows nothing of what a sample holds.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int64

from piston.data.subsets import Samples, WeightedMixture, shuffled

logger = logging.getLogger(__name__)

Indices = Int64[np.ndarray, " n"]


class Order:
    """`take(position)` gives this rank's part of the batch that starts at a position.

    A position counts the samples that all ranks together have had. A `WeightedMixture` is taken in
    its own shares.
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
        self.samples_per_epoch, epoch_order = _epochs(samples, seed)
        self.mixture = _described(samples)
        # A batch may lie across the end of an epoch.
        self._epoch_order = functools.lru_cache(maxsize=2)(epoch_order)

    @property
    def local_batch_size(self) -> int:
        """Samples per batch on this rank."""
        return self.batch_size // self.world_size

    def take(self, position: int) -> Indices:
        start = position + self.rank * self.local_batch_size
        return self._row(start, start + self.local_batch_size)

    def epoch(self, position: int) -> float:
        """Passes over the data, fractions included."""
        return position / self.samples_per_epoch

    def _row(self, start: int, stop: int) -> Indices:
        parts = []
        while start < stop:
            epoch, inside = divmod(start, self.samples_per_epoch)
            part = self._epoch_order(epoch)[inside : inside + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts)

    def state_dict(self, position: int) -> dict[str, Any]:
        """All that is needed to go on from a position, whatever the number of ranks then is."""
        return {
            "position": position,
            "seed": self.seed,
            "samples_per_epoch": self.samples_per_epoch,
            "mixture": self.mixture,
        }

    def position_of(self, state: Mapping[str, Any]) -> int:
        """The position in a saved state; of other data it is one in their new order.

        Another seed is refused: it belongs to all that is random in a run.
        """
        if state.get("seed") != self.seed:
            raise ValueError(
                f"The saved data position belongs to another order: its seed is "
                f"{state.get('seed')}, now it is {self.seed}. Continue with the same seed, or "
                "start a new run."
            )
        changed = [
            f"{name} was {_in_words(state.get(name))}, now it is {_in_words(getattr(self, name))}"
            for name in ("samples_per_epoch", "mixture")
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
    """A mixture as people read it: `32 samples (66.7 %), 16 samples (33.3 %)`."""
    if not isinstance(value, Mapping):
        return value
    sets = zip(value["sizes"], value["weights"])
    return ", ".join(f"{size:,.0f} samples ({weight:.1%})" for size, weight in sets)


def _described(samples: Samples) -> dict[str, list[float]] | None:
    """What the order of a mixture depends on besides the seed; as JSON keeps it."""
    if not isinstance(samples, WeightedMixture):
        return None
    sizes = [float(len(dataset)) for dataset in samples.datasets]
    return {"sizes": sizes, "weights": list(samples.weights)}


def _epochs(samples: Samples, seed: int) -> tuple[int, Callable[[int], Indices]]:
    """The length of an epoch, and the order of any one of them."""
    if isinstance(samples, WeightedMixture):
        mixture = samples
        return mixture.samples_per_epoch, lambda epoch: mixture.flat(
            mixture.plan(seed=seed, epoch=epoch)
        )
    count = len(samples)
    return count, lambda epoch: shuffled(count, seed, epoch)
