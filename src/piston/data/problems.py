"""What is wrong with a data set: a `Problem` for each place, a `ProblemGroup` for each kind.

for group in grouped(check_dataset("folder")):
    print(group.severity, group.places, group.what, group.consequence)
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from piston.config import DataConfig
from piston.suggestions import did_you_mean

Severity = Literal["error", "warning", "note"]

_NUMBERS = re.compile(r"-?\d[\d.,–\s…]*")
_SHOWN = 3  # places of a group that are not episodes


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is wrong with a data set, and its consequence.

    An `error` keeps training from using the data set. `leaves_out` means that readers leave out
    `episode`; if a `camera` is named, only readers of that camera do.
    """

    severity: Severity
    where: str
    what: str
    consequence: str
    episode: int | None = None
    camera: str | None = None
    leaves_out: bool = False

    @property
    def kind(self) -> tuple[str, ...]:
        """What problems of one kind have in common: all but their place and their numbers."""
        what = self.what.replace(self.camera, "#") if self.camera else self.what
        return self.severity, _NUMBERS.sub("#", what), self.consequence


def episode_problem(
    episode: int,
    what: str,
    camera: str | None = None,
    consequence: str | None = None,
    severity: Severity = "warning",
) -> Problem:
    """Return the problem of an episode. Without another `consequence`, readers leave it out."""
    where = f"episode {episode}" + (f", {camera}" if camera else "")
    left_out = "the episode is left out" + (", unless read without the camera" if camera else "")
    result = consequence or left_out
    return Problem(severity, where, what, result, episode, camera, leaves_out=consequence is None)


class EpisodeError(ValueError):
    """An episode cannot be used. Callers that know the configuration add how to leave it out."""

    def __init__(self, message: str, episode: int = -1) -> None:
        super().__init__(message)
        self.episode = episode


@dataclasses.dataclass(frozen=True)
class ProblemGroup:
    """All problems of one kind."""

    problems: tuple[Problem, ...]

    @property
    def severity(self) -> Severity:
        return self.problems[0].severity

    @property
    def consequence(self) -> str:
        return self.problems[0].consequence

    @property
    def what(self) -> str:
        """What is wrong; where the numbers differ, those of the first place."""
        first = self.problems[0].what
        same = all(problem.what == first for problem in self.problems)
        return first if same else f"e.g. {first}"

    @property
    def places(self) -> str:
        """The episodes with their cameras, or the first other places, and how many there are."""
        problems = self.problems
        if problems[0].episode is None:
            names = list(dict.fromkeys(problem.where for problem in problems))
            more = f" … ({len(names)} in all)" if len(names) > _SHOWN else ""
            return ", ".join(names[:_SHOWN]) + more
        numbers = sorted({one.episode for one in problems if one.episode is not None})
        if len(numbers) == 1:
            text = f"episode {numbers[0]}"
        else:
            text = f"{len(numbers)} episodes: {ranges(numbers)}"
        cameras = dict.fromkeys(one.camera for one in problems if one.camera is not None)
        return f"{text}; {', '.join(cameras)}" if cameras else text


def grouped(problems: Iterable[Problem]) -> list[ProblemGroup]:
    """Group problems by their kind, in the order in which the kinds occur."""
    kinds: dict[tuple[str, ...], list[Problem]] = {}
    for problem in problems:
        kinds.setdefault((*problem.kind, str(problem.episode is None)), []).append(problem)
    return [ProblemGroup(tuple(members)) for members in kinds.values()]


def unknown_key(
    source: str,
    key: str,
    cameras: Sequence[str],
    columns: Sequence[str],
    *,
    is_camera: bool = False,
    used: Collection[str] = (),
) -> KeyError:
    """Return the error for a key that a data set does not have, with what it has.

    For a camera, the most similar camera that is not `used` already is suggested, however different
    it is.
    """
    if is_camera or re.search("image|cam|rgb|video", key):
        hint = did_you_mean(key, [one for one in cameras if one not in used], cutoff=0.0)
    else:
        hint = did_you_mean(key, columns)
    return KeyError(
        f"{source} has no {key!r}.{hint} Its cameras: {', '.join(cameras) or 'none'}. Its other "
        f"keys: {', '.join(columns) or 'none'}."
    )


def ranges(numbers: Sequence[int]) -> str:
    """Return the first few of ascending numbers as ranges: 0–4, 7, 9–11."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs[:5]]
    return ", ".join(shown) + (" …" if len(runs) > 5 else "")


def leave_out(config: DataConfig, episodes: Iterable[int | str]) -> str:
    """Return the option that also leaves out these episodes, for a message."""
    exclusions = ",".join(f"!{episode}" for episode in episodes)
    choice = f"{config.episodes},{exclusions}" if config.episodes else exclusions
    if config.is_extra:
        return f"'{config.repo_id}#{choice}' in {config.flag('extra-datasets')}"
    return f"{config.flag('episodes')} '{choice}'"


def leave_out_any(pipelines: Sequence[DataConfig]) -> str:
    """Return how to leave out an episode N where it is not known which data set has it."""
    first = leave_out(pipelines[0], ["N"])
    if len(pipelines) == 1:
        return first
    return f"{first}, or of another set likewise: {leave_out(pipelines[1], ['N'])}"


@contextlib.contextmanager
def advising(config: DataConfig) -> Iterator[None]:
    """Add to an error which data set it is about, and how to leave out an episode."""
    try:
        yield
    except ValueError as error:
        advice = ""
        if isinstance(error, EpisodeError):
            advice = f". To leave the episode out: {leave_out(config, [error.episode])}"
        error.add_note(f"in {config.title}{advice}")
        raise
