"""What is asked about a frame: every input changed, one at a time.

Cameras, words, the sentence and the state. A question that cannot be asked is kept with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from piston.inspection.frames import Frame, Frames, StateDim, state_dims
from piston.inspection.probe import Intervention, Probe

# "other" is the input of another moment of the data set: a change within what training has shown.
Change = Literal["off", "black", "other", "left out", "empty", "opposite", "moved"]
# The subject of questions about all cameras, the whole sentence or the whole state.
ALL = "all"

# A state with a smaller standard deviation does not move: its numbers would be those of rounding.
_MOVES = 1e-5
_MARKS = ".,;:!?\"'()"
_OPPOSITES = (
    *(("open", "close"), ("left", "right"), ("push", "pull"), ("up", "down"), ("on", "off")),
    *(("in", "out"), ("pick", "place"), ("lift", "lower"), ("front", "back")),
    *(("top", "bottom"), ("upper", "lower"), ("insert", "remove"), ("near", "far")),
    *(("first", "last"), ("forward", "backward"), ("fold", "unfold")),
)


class Question(NamedTuple):
    """Which input is changed, and how. A subject is a camera's slot, a word, or a state's name."""

    input: Literal["camera", "word", "sentence", "state"]
    subject: str
    change: Change


class Questions:
    """The questions of one frame, and those that cannot be asked, with the reason."""

    def __init__(self, probe: Probe, frames: Frames, shown: Sequence[Frame], number: int) -> None:
        self.asked: dict[Question, Intervention] = {}
        self.skipped: dict[Question, str] = {}
        frame = shown[number]
        other = _other_moment(frames, shown, number)
        self._cameras(probe, frame, other)
        self._words(frame.prompt)
        self._sentences(frame.prompt, frames.tasks, number)
        self._states(probe, frames, frame, other)

    def _cameras(self, probe: Probe, frame: Frame, other: Frame | None) -> None:
        present = tuple(probe.pictures(frame))
        others = {} if other is None else probe.pictures(other)
        groups: dict[str, tuple[str, ...]] = {camera: (camera,) for camera in present}
        if len(present) > 1:
            groups[ALL] = present
        for subject, cameras in groups.items():
            self.asked[Question("camera", subject, "off")] = Intervention(off=cameras)
            self.asked[Question("camera", subject, "black")] = Intervention(black=cameras)
            question = Question("camera", subject, "other")
            if shown := {camera: others[camera] for camera in cameras if camera in others}:
                self.asked[question] = Intervention(shown=shown)
            else:
                self.skipped[question] = "no other moment has a picture of it"

    def _words(self, prompt: str) -> None:
        words = prompt.split()
        for place, word in enumerate(words):
            repeated = words[: place + 1].count(word)
            subject = word if repeated == 1 else f"{word} ({repeated})"
            rest = " ".join(words[:place] + words[place + 1 :])
            self.asked[Question("word", subject, "left out")] = Intervention(prompt=rest)

    def _sentences(self, prompt: str, tasks: Sequence[str], number: int) -> None:
        others = [task for task in tasks if task != prompt]
        other = others[number % len(others)] if others else None
        sentences: dict[Change, tuple[str | None, str]] = {
            "empty": ("", ""),
            "other": (other, "the data set has one sentence only"),
            "opposite": (opposite(prompt), "no word of the sentence has an opposite that is known"),
        }
        for change, (sentence, reason) in sentences.items():
            question = Question("sentence", ALL, change)
            if not prompt:  # The policy adds its own, whatever the sentences of the data set are.
                self.skipped[question] = "the observation has no sentence"
            elif sentence is None:
                self.skipped[question] = reason
            else:
                self.asked[question] = Intervention(prompt=sentence)

    def _states(self, probe: Probe, frames: Frames, frame: Frame, other: Frame | None) -> None:
        dims = state_dims(probe.policy, frame.observation)
        own = _state(frame, dims)
        if dims and other is not None:
            others = _state(other, dims)
            difference = {dim.name: others[dim.name] - own[dim.name] for dim in dims}
            self.asked[Question("state", ALL, "other")] = Intervention(state=difference)
        for dim in dims:
            question = Question("state", dim.name, "moved")
            values = frames.state_values(dim)
            if values is None:
                self.skipped[question] = f"{dim.key!r} is not a column of the data set"
            elif not (deviation := float(values.std())) > _MOVES:
                self.skipped[question] = "it never moves in the data set"
            else:
                # Towards the mean, so that the state stays among those that training has shown.
                amount = deviation if own[dim.name] < values.mean() else -deviation
                self.asked[question] = Intervention(state={dim.name: amount})


def _other_moment(frames: Frames, shown: Sequence[Frame], number: int) -> Frame | None:
    """Return another of the frames, of another episode if possible; None if there is no other."""
    frame = shown[number]
    others = [*shown[number + 1 :], *shown[:number]]
    for one in others:
        if one.episode != frame.episode:
            return one
    place = (frame.episode, frame.frame)
    known = [(one.episode, one.frame) for one in others] + frames.spread_out(8)
    far = max(known, key=lambda one: (one[0] != place[0], abs(one[1] - place[1])))
    return None if far == place else frames[far]


def _state(frame: Frame, dims: Sequence[StateDim]) -> dict[str, float]:
    return {dim.name: float(np.ravel(frame.observation[dim.key])[dim.position]) for dim in dims}


def opposite(sentence: str) -> str | None:
    """Return the sentence with every word that has a known opposite replaced by it, if any."""
    table = {word: other for pair in _OPPOSITES for word, other in (pair, pair[::-1])}
    words = sentence.split()
    changed = [_replaced(word, table) for word in words]
    return " ".join(changed) if changed != words else None


def _replaced(word: str, table: Mapping[str, str]) -> str:
    """Return a word's opposite with its capital and its punctuation marks, or the word itself."""
    bare = word.strip(_MARKS)
    other = table.get(bare.lower(), bare)
    return word.replace(bare, other.capitalize() if bare.istitle() else other) if bare else word
