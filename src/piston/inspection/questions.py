"""Every input of a frame changed, one at a time: cameras, words, the sentence and the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from piston.inspection.frames import Frame, Frames, StateDim, state_dims
from piston.inspection.probe import Intervention, Probe
from piston.inspection.results import NO_MOTION

# "other" is the input of another moment of the data set: a change within what training has shown.
Change = Literal["off", "black", "other", "left out", "empty", "opposite", "moved"]
# The subject of questions about all cameras, the whole sentence or the whole state.
ALL = "all"

_MARKS = ".,;:!?\"'()"
_OPPOSITES = (
    "open close, left right, push pull, up down, on off, in out, pick place, lift lower, "
    "front back, top bottom, upper lower, insert remove, near far, first last, forward backward, "
    "fold unfold"
)


class InputChange(NamedTuple):
    """Which input is changed, and how. A subject is a camera's slot, a word, or a state's name."""

    input: Literal["camera", "word", "sentence", "state"]
    subject: str
    change: Change


# The change itself, or why it cannot be made.
Changes = Iterator[tuple[InputChange, Intervention | str]]


def input_changes(probe: Probe, frames: Frames, shown: Sequence[Frame], number: int) -> Changes:
    """Yield every change of one of the shown frames, or the reason why it cannot be made."""
    frame = shown[number]
    other = _other_moment(frames, shown, number)
    yield from _of_cameras(probe, frame, other)
    yield from _of_words(frame.prompt)
    yield from _of_sentence(frame.prompt, frames.tasks, number)
    yield from _of_state(probe, frames, frame, other)


def _of_cameras(probe: Probe, frame: Frame, other: Frame | None) -> Changes:
    present = tuple(probe.pictures(frame))
    others = {} if other is None else probe.pictures(other)
    groups: dict[str, tuple[str, ...]] = {camera: (camera,) for camera in present}
    if len(present) > 1:
        groups[ALL] = present
    for subject, cameras in groups.items():
        yield InputChange("camera", subject, "off"), Intervention(off=cameras)
        yield InputChange("camera", subject, "black"), Intervention(black=cameras)
        seen = {camera: others[camera] for camera in cameras if camera in others}
        replaced = Intervention(shown=seen) if seen else "no other moment has an image of it"
        yield InputChange("camera", subject, "other"), replaced


def _of_words(prompt: str) -> Changes:
    words = prompt.split()
    for place, subject in enumerate(word_subjects(words)):
        rest = " ".join(words[:place] + words[place + 1 :])
        yield InputChange("word", subject, "left out"), Intervention(prompt=rest)


def word_subjects(words: Sequence[str]) -> list[str]:
    """Return the subjects of the questions about words: each word, "wait (2)" if it is repeated."""
    counts = [words[: place + 1].count(word) for place, word in enumerate(words)]
    return [word if n == 1 else f"{word} ({n})" for word, n in zip(words, counts)]


def _of_sentence(prompt: str, tasks: Sequence[str], number: int) -> Changes:
    others = [task for task in tasks if task != prompt]
    other = others[number % len(others)] if others else None
    sentences: dict[Change, tuple[str | None, str]] = {
        "empty": ("", ""),
        "other": (other, "the dataset has one sentence only"),
        "opposite": (opposite(prompt), "no word of the sentence has an opposite that is known"),
    }
    for change, (sentence, reason) in sentences.items():
        made: Intervention | str = reason
        if not prompt:  # The policy adds its own, whatever the sentences of the dataset are.
            made = "the observation has no sentence"
        elif sentence is not None:
            made = Intervention(prompt=sentence)
        yield InputChange("sentence", ALL, change), made


def _of_state(probe: Probe, frames: Frames, frame: Frame, other: Frame | None) -> Changes:
    dims = state_dims(probe.policy, frame.observation)
    own = _state(frame, dims)
    if dims and other is not None:
        others = _state(other, dims)
        difference = {dim.name: others[dim.name] - own[dim.name] for dim in dims}
        yield InputChange("state", ALL, "other"), Intervention(state=difference)
    for dim in dims:
        values = frames.state_values(dim)
        made: Intervention | str
        if values is None:
            made = f"{dim.key!r} is not a column of the dataset"
        elif not (deviation := float(values.std())) > NO_MOTION:
            made = "it never moves in the dataset"
        else:
            # Towards the mean, so that the state stays among those that training has shown.
            amount = deviation if own[dim.name] < values.mean() else -deviation
            made = Intervention(state={dim.name: amount})
        yield InputChange("state", dim.name, "moved"), made


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
    return {dim.name: dim.of(frame.observation) for dim in dims}


def opposite(sentence: str) -> str | None:
    """Return the sentence with every word that has a known opposite replaced by it, if any."""
    pairs = [pair.split() for pair in _OPPOSITES.split(", ")]
    table = {word: other for pair in pairs for word, other in (pair, pair[::-1])}
    words = sentence.split()
    changed = [_replaced(word, table) for word in words]
    return " ".join(changed) if changed != words else None


def _replaced(word: str, table: Mapping[str, str]) -> str:
    """Return a word's opposite with its capital and its punctuation marks, or the word itself."""
    bare = word.strip(_MARKS)
    other = table.get(bare.lower(), bare)
    return word.replace(bare, other.capitalize() if bare.istitle() else other) if bare else word
