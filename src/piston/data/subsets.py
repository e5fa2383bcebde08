"""Parts of data sets: which episodes are used, and which of them are held out.

choose_episodes(metadata.episodes, "0:50,!7")  # or [3, 8], "3,7,9-12", a function of an Episode
train, held_out = split_episodes(episodes, 0.1, seed=0)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from piston.data.format import Episode

EpisodeChoice = str | Iterable[int] | Callable[[Episode], bool] | None

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
                f"Episodes {shorten(unknown)} were asked for; the data set has {shorten(known)}."
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
