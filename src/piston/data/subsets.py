"""Parts of data sets and mixtures of them: which episodes, which frames, how often.

Everything here depends on numbers that are given (seeds, weights), never on time or on the machine.
Knows nothing of what a sample holds, so data sets of different robots can be mixed.

    choose_episodes(metadata.episodes, "0:50,!7")  # or [3, 8], "3,7,9-12", a function of an Episode
    train, held_out = split_episodes(episodes, 0.1, seed=0)
    WeightedMixture([a, b], [3, 1]).plan(seed=0, epoch=2)  # rows of (data set, index)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int64

from piston.data.format import Episode

EpisodeChoice = str | Iterable[int] | Callable[[Episode], bool] | None

# Its multiples fall into all parts of the unit interval equally often.
_GOLDEN_RATIO = 0.6180339887498949
_RANGE = re.compile(r"(\d+)-(\d+)")
_SLICE = re.compile(r"(\d*):(\d*)")


def choose_episodes(episodes: Sequence[Episode], choice: EpisodeChoice) -> list[Episode]:
    """Return the episodes that a list, a text or a function selects, in their own order.

    Numbers are episode indices. "0:50" are those of 0 … 49 that exist, "9-12" is 9 … 12 exactly,
    "!7" excludes 7; a text with exclusions only selects all other episodes.
    """
    if choice is None:
        chosen = list(episodes)
    elif callable(choice):
        chosen = [episode for episode in episodes if choice(episode)]
    else:
        known = {episode.index for episode in episodes}
        if isinstance(choice, str):
            numbers, named = _parse(choice, known)
        else:
            numbers = named = _whole_numbers(choice)
        if unknown := sorted(named - known):
            raise ValueError(
                f"Episodes {_shorten(unknown)} were asked for; the data set has {_shorten(known)}."
            )
        chosen = [episode for episode in episodes if episode.index in numbers]
    if not chosen:
        raise ValueError(f"The choice {choice!r} selects none of {len(episodes)} episodes.")
    return chosen


def without_episodes(choice: str | None, episodes: Iterable[int | str]) -> str:
    """Return the text of a choice that also excludes these, for --data.episodes."""
    return ",".join([*filter(None, [choice]), *(f"!{episode}" for episode in episodes)])


def _whole_numbers(choice: Iterable[int]) -> set[int]:
    numbers = list(choice)
    for number in numbers:
        # A mask of all episodes would select the episodes 0 and 1.
        if isinstance(number, bool | np.bool_) or int(number) != number:
            raise ValueError(
                f"Episodes are chosen by their numbers, e.g. [3, 7]; found {number!r}. For a mask, "
                "give np.flatnonzero(mask)."
            )
    return {int(number) for number in numbers}


def _parse(text: str, known: set[int]) -> tuple[set[int], set[int]]:
    """Return the selected numbers, and all that the text names, exclusions included."""
    chosen: set[int] = set()
    without: set[int] = set()
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        numbers = without if part.startswith("!") else chosen
        numbers |= _parse_part(part.removeprefix("!").strip(), text, known)
    if all(part.startswith("!") for part in parts):
        chosen = set(known)
    return chosen - without, chosen | without


def _parse_part(part: str, text: str, known: set[int]) -> set[int]:
    if part.isdecimal():
        return {int(part)}
    if match := _RANGE.fullmatch(part):
        return set(range(int(match[1]), int(match[2]) + 1))
    if match := _SLICE.fullmatch(part):
        start, stop = int(match[1] or 0), int(match[2] or max(known) + 1)
        return {number for number in known if start <= number < stop}
    raise ValueError(
        f"{part!r} in {text!r} names no episodes; expected e.g. 0:50 or 3,7,9-12, with ! before "
        "those to exclude."
    )


def _shorten(numbers: Iterable[int]) -> str:
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
    count = round(held_out * len(episodes)) if isinstance(held_out, float) else held_out
    if isinstance(held_out, float) and not 0 < held_out < 1:
        raise ValueError(f"The share to hold out is {held_out}; expected between 0 and 1.")
    if isinstance(held_out, float):
        count = max(count, 1)
    if not 0 < count < len(episodes):
        raise ValueError(
            f"{count} of {len(episodes)} episodes are to be held out; at least one episode has to "
            "be held out, and one to remain."
        )

    def place(index: int) -> bytes:
        return hashlib.sha256(f"{seed}/{index}".encode()).digest()

    order = sorted((episode.index for episode in episodes), key=place)
    return sorted(order[count:]), sorted(order[:count])


def split_sets(
    sets: Sequence[tuple[Hashable, Sequence[Episode]]], held_out: float | int, *, seed: int = 0
) -> list[tuple[list[int], list[int]]]:
    """Return `split_episodes` of several named data sets.

    If a name occurs twice, an episode is held out of both, and validated on in the first only.
    """
    together: dict[Hashable, dict[int, Episode]] = {}
    for name, episodes in sets:
        together.setdefault(name, {}).update({episode.index: episode for episode in episodes})
    outside: dict[Hashable, set[int]] = {}
    for name, known in together.items():
        try:
            outside[name] = set(split_episodes(list(known.values()), held_out, seed=seed)[1])
        except ValueError as error:
            error.add_note(f"in {name}")
            raise
    used: dict[Hashable, set[int]] = {name: set() for name in together}
    parts = []
    for name, episodes in sets:
        own = {episode.index for episode in episodes}
        if not own - outside[name]:
            raise ValueError(f"All episodes chosen of {name} ({_shorten(own)}) are held out.")
        chosen = own & outside[name] - used[name]
        used[name] |= chosen
        parts.append((sorted(own - outside[name]), sorted(chosen)))
    return parts


class Samples(Protocol):
    """What can be mixed: a data set as it is, or after its own robot's transforms."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class RepeatedStarts:
    """Samples in which the first `frames` of every episode occur `times` times.

    `lengths` are those of the episodes, in order. All samples come first, at their own places;
    the repetitions follow.
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
        self._places = np.concatenate([np.arange(len(samples)), *starts * (times - 1)])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        return self._samples[int(self._places[index])]

    def preload(self) -> None:
        """Read all columns now, so that worker processes that are forked later share them."""
        preload = getattr(self._samples, "preload", None)
        if preload is not None:
            preload()


class WeightedMixture:
    """Several data sets as one; `weights` are the shares of the samples, in any unit.

    `mixture[i]` numbers the samples of all data sets one after another, without weights. Order and
    weights are in `plan`, which is all that a loader needs.
    """

    def __init__(
        self,
        datasets: Sequence[Samples],
        weights: Sequence[float],
        *,
        samples_per_epoch: int | None = None,
    ):
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
        """Which data set, and which of its samples."""
        if not 0 <= index < len(self):
            raise IndexError(f"There is no sample {index}; the mixture has {len(self)}.")
        dataset = int(np.searchsorted(self._starts, index, side="right")) - 1
        return dataset, int(index - self._starts[dataset])

    def flat(self, plan: Int64[np.ndarray, "n 2"]) -> Int64[np.ndarray, " n"]:
        """The rows of a plan as indices for `mixture[i]`."""
        return self._starts[plan[:, 0]] + plan[:, 1]

    def plan(self, *, seed: int, epoch: int) -> Int64[np.ndarray, "n 2"]:
        """One epoch in order: (data set, index) for each sample.

        Each data set gives its share and goes on in the next epoch where it stopped, so that all of
        its samples are seen equally often, however large or small its weight.
        """
        *before, counts = self._counts(epoch + 1)
        begins = np.sum(before, axis=0, dtype=np.int64) if before else np.zeros_like(counts)
        parts = [
            np.stack([np.full(count, number), self._take(seed, number, begin, count)], axis=1)
            for number, (begin, count) in enumerate(zip(begins, counts))
        ]
        return np.concatenate(parts)[shuffled(self.samples_per_epoch, seed, epoch)]

    def _counts(self, epochs: int) -> Int64[np.ndarray, "e d"]:
        """How many samples each data set gives in each of the first epochs.

        What does not come out even goes to one data set in this epoch and to another in the next,
        so that over many epochs all have their share, also one of less than a sample per epoch.
        """
        exact = np.asarray(self.weights) * self.samples_per_epoch
        exact = np.where(np.isclose(exact, exact.round(), rtol=0, atol=1e-9), exact.round(), exact)
        whole = np.floor(exact)
        edges = np.concatenate([[0.0], np.cumsum(exact - whole)])
        edges[-1] = round(edges[-1])
        # Along these edges one marks whole numbers, beginning somewhere else in every epoch.
        offsets = (np.arange(epochs) * _GOLDEN_RATIO) % 1
        extra = np.diff(np.floor(edges + offsets[:, np.newaxis]), axis=1)
        return (whole + extra).astype(np.int64)

    def _take(self, seed: int, number: int, begin: int, count: int) -> np.ndarray:
        """`count` samples from an endless row of passes over the data set, each shuffled anew."""
        size = len(self.datasets[number])
        end = begin + count
        passes = range(begin // size, -(-end // size))
        if not passes:
            return np.empty(0, np.int64)
        row = np.concatenate([shuffled(size, seed, number, which, 1) for which in passes])
        return row[begin - passes[0] * size :][:count]


def mixed(datasets: Sequence[Samples], shares: Sequence[float] = ()) -> Samples:
    """One data set as it is, several as a mixture; without shares every sample counts the same."""
    if len(datasets) == 1:
        return datasets[0]
    return WeightedMixture(datasets, shares or [len(dataset) for dataset in datasets])


def shuffled(count: int, *key: int) -> Int64[np.ndarray, " count"]:
    """0 … count − 1 in an order that depends on the key alone.

    NumPy promises that the raw numbers of a bit generator stay the same over its versions, which it
    does not promise of `permutation`.
    """
    if min(key, default=0) < 0:
        raise ValueError(f"Seed and epoch are {key}; expected are numbers from 0 up.")
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(raw, kind="stable")
