"""Which samples are used, and in which order: chosen and held-out episodes, mixtures of data sets.

    choose_episodes(metadata.episodes, "0:50,!7")  # or [3, 8], "3,7,9-12", a function of an Episode
    train, held_out = split_episodes(episodes, 0.1, seed=0)
    WeightedMixture([a, b], [3, 1]).plan(seed=0, epoch=2)  # indices of the mixture's samples

Everything is a function of the seed and the weights; samples are not read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int64

from piston.config import DataConfig
from piston.data.protocol import Episode, Samples, blocks_of

# The multiples of the golden ratio, modulo 1, are spread evenly over the unit interval.
_GOLDEN_RATIO = 0.6180339887498949
# Frames are shuffled over so many blocks; a reader that keeps as many reads each once per epoch.
BLOCKS_PER_WINDOW = 8


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
        steps = np.concatenate([np.arange(length) for length in lengths])
        starts = np.flatnonzero(steps < frames)
        self._samples = samples
        self._indices = np.concatenate([np.arange(len(samples)), np.tile(starts, times - 1)])
        self.blocks = blocks_of(samples)
        if self.blocks is not None:  # a repetition belongs to the block of its sample
            owners = np.searchsorted(self.blocks[:, 0], self._indices, side="right")
            self._indices = self._indices[np.argsort(owners, kind="stable")]
            stops = np.cumsum(np.bincount(owners)[1:])
            self.blocks = np.stack([np.concatenate([[0], stops[:-1]]), stops], axis=1)

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

    def plan(self, *, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
        """Return the order of one epoch, as indices for `mixture[i]`.

        Each data set gives its share and continues in the next epoch where it stopped, so that all
        of its samples are seen equally often, however large or small its weight.
        """
        counts = self._counts(epoch + 1)
        begins: np.ndarray = counts[:-1].sum(axis=0)
        parts = [
            self._starts[number] + self._take(seed, number, begin, count)
            for number, (begin, count) in enumerate(zip(begins, counts[-1]))
        ]
        order = shuffled(self.samples_per_epoch, seed, epoch)
        edges = np.cumsum([0, *counts[-1]])
        for dataset, first, stop in zip(self.datasets, edges, edges[1:]):
            if blocks_of(dataset) is not None:
                # Its places in the epoch are random; its samples fill them in their own order.
                own = (order >= first) & (order < stop)
                order[own] = np.arange(first, stop)
        return np.concatenate(parts)[order]

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
        dataset, size = self.datasets[number], len(self.datasets[number])
        passes = range(begin // size, -(-(begin + count) // size))
        row = [epoch_order(dataset, seed, number, which, 1) for which in passes]
        return np.concatenate([np.empty(0, np.int64), *row])[begin % size :][:count]


def joined(datasets: Sequence[Samples]) -> Samples:
    """Return one data set as it is, several one after another."""
    if len(datasets) == 1:
        return datasets[0]
    return WeightedMixture(datasets, [len(dataset) for dataset in datasets])


def mixed(datasets: Sequence[Samples], pipelines: Sequence[DataConfig]) -> Samples:
    """Return one data set as it is, several as a mixture with the shares of their pipelines.

    A robot has its share of the samples, or else as many as all of its sets have; its sets divide
    them by their own shares, or else by their samples.
    """
    if len(datasets) == 1:
        return joined(datasets)
    within = [
        float(len(samples)) if one.set_share is None else one.set_share
        for samples, one in zip(datasets, pipelines, strict=True)
    ]
    weights = []
    for weight, one in zip(within, pipelines):
        own = [number for number, other in enumerate(pipelines) if other.entry == one.entry]
        total = sum(within[number] for number in own)
        share = sum(len(datasets[number]) for number in own) if one.share is None else one.share
        weights.append(weight * (share / total))
    return WeightedMixture(datasets, weights)


def epoch_order(samples: Samples, *key: int) -> Int64[np.ndarray, " n"]:
    """Return the indices of all samples in an order that is a function of the key.

    Samples with blocks are shuffled within a window of blocks that are next to each other in a
    random order:

        blocks  0 1 2 3 4 5 6 7 …  →  5 2 7 0 | 3 6 1 4 | …  →  frames of 5 2 7 0 | of 3 6 1 4 | …
    """
    blocks = blocks_of(samples)
    if blocks is None:
        return shuffled(len(samples), *key)
    blocks, parts = blocks[shuffled(len(blocks), *key)], []
    for number, first in enumerate(range(0, len(blocks), BLOCKS_PER_WINDOW)):
        window = blocks[first : first + BLOCKS_PER_WINDOW]
        frames = np.concatenate([np.arange(start, stop) for start, stop in window])
        parts.append(frames[shuffled(len(frames), *key, number)])
    return np.concatenate(parts)


def shuffled(count: int, *key: int) -> Int64[np.ndarray, " count"]:
    """Return 0 … count − 1 in an order that is a function of the key.

    NumPy guarantees that the raw output of a bit generator stays the same over its versions, which
    it does not guarantee for `permutation`.
    """
    if min(key, default=0) < 0:
        raise ValueError(f"Seed and epoch are {key}; expected are numbers from 0 up.")
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(raw, kind="stable")


EpisodeChoice = str | Iterable[int] | Callable[[Any], bool] | None
AnyEpisode = TypeVar("AnyEpisode", bound=Episode)


def choose_episodes(episodes: Sequence[AnyEpisode], choice: EpisodeChoice) -> list[AnyEpisode]:
    """Return the episodes that a list, a text or a function selects, in their own order.

    Numbers are episode indices. "0:50" are those of 0 … 49 that exist, "9-12" is 9 … 12 exactly,
    "!7" excludes 7; a text with exclusions only selects all other episodes.
    """
    known = {episode.index for episode in episodes}
    if choice is None:
        numbers = named = known
    elif callable(choice):
        numbers = named = {episode.index for episode in episodes if choice(episode)}
    elif isinstance(choice, str):
        numbers, named = _parse(choice, known)
    else:
        given = list(choice)
        numbers = named = {int(number) for number in given}
        for number in given:
            # A mask of all episodes would select the episodes 0 and 1.
            if isinstance(number, bool | np.bool_) or int(number) != number:
                raise ValueError(
                    f"Episodes are chosen by their numbers, e.g. [3, 7]; found {number!r}. For a "
                    "mask, give np.flatnonzero(mask)."
                )
    if unknown := named - known:
        raise ValueError(
            f"Episodes {shorten(unknown)} were asked for; the data set has {shorten(known)}."
        )
    if not numbers:
        raise ValueError(f"The choice {choice!r} selects none of {len(episodes)} episodes.")
    return [episode for episode in episodes if episode.index in numbers]


def _parse(text: str, known: set[int]) -> tuple[set[int], set[int]]:
    """Return the selected numbers, and all that the text names, exclusions included."""
    named: dict[str, set[int]] = {}  # by the mark before them, which is ! or nothing
    for part in text.split(","):
        match = re.fullmatch(r"\s*(!?)\s*(?:(\d+)(?:-(\d+))?|(\d*):(\d*))\s*", part)
        if match is None:
            raise ValueError(
                f"{part.strip()!r} in {text!r} names no episodes; expected e.g. 0:50 or 3,7,9-12, "
                "with ! before those to exclude."
            )
        mark, first, last, start, stop = match.groups()
        if first is not None:
            numbers = set(range(int(first), int(last or first) + 1))
        else:
            span = range(int(start or 0), int(stop or max(known) + 1))
            numbers = {number for number in known if number in span}
        named[mark] = named.get(mark, set()) | numbers
    chosen, without = named.get("", known), named.get("!", set())
    return chosen - without, chosen | without


def shorten(numbers: Iterable[int]) -> str:
    """Return a list of numbers for a message, without the middle of a long one."""
    listed = sorted(numbers)
    if len(listed) <= 8:
        return ", ".join(map(str, listed))
    return f"{', '.join(map(str, listed[:4]))} … {listed[-1]} ({len(listed)} in all)"


def split_episodes(
    episodes: Sequence[Episode], held_out: float | int, *, seed: int = 0
) -> tuple[list[int], list[int]]:
    """Return the indices of episodes to train on and to hold out: a share (0.1) or a number (5).

    The order of episodes depends on the seed and their indices only: if more episodes are recorded
    later, most stay on their side.
    """
    if isinstance(held_out, float) and not 0 < held_out < 1:
        raise ValueError(f"The share to hold out is {held_out}; expected between 0 and 1.")
    is_share = isinstance(held_out, float)
    count = max(round(held_out * len(episodes)), 1) if is_share else int(held_out)
    if not 0 < count < len(episodes):
        raise ValueError(
            f"{count} of {len(episodes)} episodes are to be held out; at least one episode has to "
            "be held out, and one to remain."
        )
    order = sorted(
        (episode.index for episode in episodes),
        key=lambda index: hashlib.sha256(f"{seed}/{index}".encode()).digest(),
    )
    return sorted(order[count:]), sorted(order[:count])
