"""Conclusions from the influence of inputs, as sentences with their numbers.

An input counts as ignored if another one of the data set in its place changes hardly anything. A
black picture or an empty sentence is something that training has not shown: a policy may react to
it although it ignores all that it knows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from piston.inspection.influence import Influence
from piston.inspection.questions import ALL, Question
from piston.inspection.results import Severity, Verdict

# An input that changes actions by less than this many spreads over noise seeds is ignored: chance
# decides far more about the motion than the input does. Measured (docs/why-it-fails.md): at most
# 0.2 for inputs that training had disconnected from the actions, at least 0.6 for others.
IGNORED_IN_SPREADS = 0.35
# The same in standard deviations of the recorded actions, for models that start from no noise, and
# for policies that are so sure of themselves that any rounding is many spreads.
IGNORED_IN_DEVIATIONS = 0.02
# More than this share of an error of the state is still in the target at the end of the chunk: the
# policy repeats the state that it is told, and errors add up.
CARRIED = 0.8
# Above this many standard deviations, noise alone makes other motions: the policy is undecided.
UNDECIDED = 0.5


def influence_verdicts(found: Influence) -> list[Verdict]:
    """Return what is worth knowing, problems first."""
    verdicts = [*_cameras(found), *_sentence(found), *_state(found), *_noise(found)]
    return sorted(verdicts, key=lambda verdict: verdict.severity != "problem")


def _cameras(found: Influence) -> Iterator[Verdict]:
    for question in found.questions:
        if question.input != "camera" or question.change != "other":
            continue
        if question.subject == ALL:
            kind, name, it = "cameras-ignored", "all cameras", "them"
        else:
            name = f"the camera {found.cameras.get(question.subject, question.subject)}"
            kind, it = "camera-ignored", "it"
        told = f"Showing {name} the pictures of another moment changes the actions by "
        yield from _if_weak(found, question, kind, "problem", told, f"the policy ignores {it}")


def _sentence(found: Influence) -> Iterator[Verdict]:
    other, empty = Question("sentence", ALL, "other"), Question("sentence", ALL, "empty")
    if other in found.questions:
        told = "Another sentence of the data set changes the actions by "
        why = "the policy ignores the sentence"
        yield from _if_weak(found, other, "sentence-ignored", "problem", told, why)
    elif empty in found.questions:
        told = "An empty sentence changes the actions by "
        why = "the data set has one sentence only, so the policy did not have to learn to read it"
        yield from _if_weak(found, empty, "sentence-not-needed", "remark", told, why)


def _state(found: Influence) -> Iterator[Verdict]:
    other = Question("state", ALL, "other")
    if other in found.questions:
        told = "The state of another moment changes the actions by "
        why = "the policy ignores the state"
        yield from _if_weak(found, other, "state-ignored", "remark", told, why)
    for name, share in zip(found.carried_names, found.carried, strict=True):
        kept = float(np.mean(share[-max(1, len(share) // 4) :]))
        if kept > CARRIED:
            sentence = (
                f"Of an error of {name}, {kept:.0%} remains in its target at the end of the chunk: "
                "the policy repeats the state that it is told, and errors may add up."
            )
            yield Verdict("state-error-carried", name, "remark", sentence, kept, CARRIED)


def _noise(found: Influence) -> Iterator[Verdict]:
    if found.noise is not None and found.noise > UNDECIDED:
        sentence = (
            f"Noise alone changes the actions by {found.noise:.2f} of their standard deviation in "
            "the data set: the policy is undecided, or has several ways to do the task."
        )
        yield Verdict("undecided", "", "remark", sentence, found.noise, UNDECIDED)


def _if_weak(
    found: Influence,
    question: Question,
    kind: str,
    severity: Severity,
    told: str,
    why: str,
) -> Iterator[Verdict]:
    """Yield a verdict if the question changed hardly anything."""
    place, spreads = found.questions.index(question), found.strength_in_spreads
    deviations = float(found.strength[place])
    number = None if spreads is None else float(spreads[place])
    limit, unit = IGNORED_IN_SPREADS, "of the spread over noise seeds"
    if number is None or not number < limit:
        number, limit = deviations, IGNORED_IN_DEVIATIONS
        unit = "of their standard deviation in the data set"
    if number < limit:
        sentence = f"{told}{number:.2g} {unit}: {why}."
        subject = "" if question.input != "camera" else question.subject
        yield Verdict(kind, subject, severity, sentence, number, limit)
