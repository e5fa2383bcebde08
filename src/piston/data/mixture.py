"""Several data sets as one: which sample of which set comes when.

    WeightedMixture([a, b], [3, 1]).plan(seed=0, epoch=2)  # rows of (data set, index)

Everything here is a function of the seed and the weights. Samples are never looked into, so data
sets of different robots can be mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int64

# The multiples of the golden ratio, modulo 1, are spread evenly over the unit interval.
_GOLDEN_RATIO = 0.6180339887498949


class Samples(Protocol):
    """A data set as it is, or after its robot's transforms."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class RepeatedStarts:
    """A data set in which the first `frames` samples of every episode occur `times` times.

    `lengths` are the lengths of its episodes, in order. The samples themselves come first, in their
    own order; the repetitions follow.
    """

    def __init__(self, samples: Samples, lengths: Sequence[int], frames: int, times: int) -> None:
        if sum(lengths) != len(samples):
            raise ValueError(
                f"The episodes have {sum(lengths)} frames, the data set has {len(samples)} samples."
            )
        ends = np.cumsum(lengths)
        starts = [
            np.arange(end - length, end - length + min(frames, length))
            for end, length in zip(ends, lengths)
        ]
        self._samples = samples
        self._indices = np.concatenate([np.arange(len(samples)), *starts * (times - 1)])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._samples[int(self._indices[index])]


class WeightedMixture:
    """Several data sets as one; `weights` are the shares of the samples, in any unit.

    `mixture[i]` numbers the samples of all data sets one after another, without weights. `plan`
    gives the order of an epoch, in which each data set has its share.
    """

    def __init__(
        self,
        datasets: Sequence[Samples],
        weights: Sequence[float],
        *,
        samples_per_epoch: int | None = None,
    ) -> None:
        if not datasets or len(datasets) != len(weights):
            raise ValueError(
                f"{len(datasets)} data sets, {len(weights)} weights; as many expected."
            )
        if not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(f"Weights are {list(weights)}; each has to be more than 0.")
        if not all(len(dataset) for dataset in datasets):
            raise ValueError("A data set without samples cannot be mixed.")
        self.datasets = tuple(datasets)
        self.weights = tuple(float(weight) / sum(weights) for weight in weights)
        self._starts = np.cumsum([0, *(len(dataset) for dataset in datasets)])
        self.samples_per_epoch = samples_per_epoch or len(self)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        dataset, inside = self.locate(index)
        return self.datasets[dataset][inside]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the data set, and the index of the sample in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"There is no sample {index}; the mixture has {len(self)}.")
        dataset = int(np.searchsorted(self._starts, index, side="right")) - 1
        return dataset, int(index - self._starts[dataset])

    def flat(self, plan: Int64[np.ndarray, "n 2"]) -> Int64[np.ndarray, " n"]:
        """Return the rows of a plan as indices for `mixture[i]`."""
        return self._starts[plan[:, 0]] + plan[:, 1]

    def plan(self, *, seed: int, epoch: int) -> Int64[np.ndarray, "n 2"]:
        """Return the order of one epoch: (data set, index) for each sample.

        Each data set gives its share and continues in the next epoch where it stopped, so that all
        of its samples are seen equally often, however large or small its weight.
        """
        *before, counts = self._counts(epoch + 1)
        begins = np.sum(before, axis=0, dtype=np.int64) if before else np.zeros_like(counts)
        parts = [
            np.stack([np.full(count, number), self._take(seed, number, begin, count)], axis=1)
            for number, (begin, count) in enumerate(zip(begins, counts))
        ]
        return np.concatenate(parts)[shuffled(self.samples_per_epoch, seed, epoch)]

    def _counts(self, epochs: int) -> Int64[np.ndarray, "e d"]:
        """Return how many samples each data set gives in each of the first epochs.

        Fractions of a sample are rounded up for different data sets in different epochs, so that
        over many epochs every set has its share, even one of less than a sample per epoch.
        """
        exact = np.asarray(self.weights) * self.samples_per_epoch
        exact = np.where(np.isclose(exact, exact.round(), rtol=0, atol=1e-9), exact.round(), exact)
        whole = np.floor(exact)
        edges = np.concatenate([[0.0], np.cumsum(exact - whole)])
        edges[-1] = round(edges[-1])
        # A set has one sample more where a whole number falls between its two edges; the edges are
        # shifted by another offset in every epoch.
        offsets = (np.arange(epochs) * _GOLDEN_RATIO) % 1
        extra = np.diff(np.floor(edges + offsets[:, np.newaxis]), axis=1)
        return (whole + extra).astype(np.int64)

    def _take(self, seed: int, number: int, begin: int, count: int) -> np.ndarray:
        """Return `count` samples from an endless row of passes over the set, each shuffled anew."""
        size = len(self.datasets[number])
        end = begin + count
        passes = range(begin // size, -(-end // size))
        if not passes:
            return np.empty(0, np.int64)
        row = np.concatenate([shuffled(size, seed, number, which, 1) for which in passes])
        return row[begin - passes[0] * size :][:count]


def mixed(datasets: Sequence[Samples], shares: Sequence[float] = ()) -> Samples:
    """Return one data set as it is, several as a mixture (by default all samples count equally)."""
    if len(datasets) == 1:
        return datasets[0]
    return WeightedMixture(datasets, shares or [len(dataset) for dataset in datasets])


def shuffled(count: int, *key: int) -> Int64[np.ndarray, " count"]:
    """Return 0 … count − 1 in an order that is a function of the key.

    NumPy guarantees that the raw output of a bit generator stays the same over its versions, which
    it does not guarantee for `permutation`.
    """
    if min(key, default=0) < 0:
        raise ValueError(f"Seed and epoch are {key}; expected are numbers from 0 up.")
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(raw, kind="stable")
