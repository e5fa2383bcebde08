"""Conclusions from the influence of inputs and from predictions along episodes: tables of rules.

An input counts as ignored if another one of the dataset in its place changes hardly anything. A
black image or an empty sentence is something that training has not shown: a policy may react to it
although it ignores all that it knows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from piston.inspection.influence import Influence
from piston.inspection.open_loop import OpenLoop, Together
from piston.inspection.questions import ALL, InputChange
from piston.inspection.results import Verdict, judge
from piston.rules import Rule, Severity

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


class _Effect(NamedTuple):
    """What one change of an input did, in the unit that decides."""

    # Of the verdict, if this is too little.
    kind: str
    number: float
    limit: float
    unit: str
    # The robot's name of the camera, and the model's.
    camera: str
    slot: str

    @property
    def amount(self) -> str:
        return f"changes the actions by {self.number:.2g} of {self.unit}"


def _effects(found: Influence) -> Iterator[_Effect]:
    """Yield the changes that tell whether an input is ignored."""
    has_others = InputChange("sentence", ALL, "other") in found.questions
    for place, (input, subject, change) in enumerate(found.questions):
        if (input, change) == ("sentence", "empty") and not has_others:
            kind = "sentence-not-needed"
        elif change != "other":
            continue
        else:
            is_several = (input, subject) == ("camera", ALL)
            kind = f"{input}s-ignored" if is_several else f"{input}-ignored"
        spreads = found.strength_in_spreads
        if spreads is not None and spreads[place] < IGNORED_IN_SPREADS:
            amount = float(spreads[place]), IGNORED_IN_SPREADS, "the spread over noise seeds"
        else:
            unit = "their standard deviation in the dataset"
            amount = float(found.strength[place]), IGNORED_IN_DEVIATIONS, unit
        yield _Effect(kind, *amount, found.cameras.get(subject, subject), subject)


def _ignored(
    kind: str,
    severity: Severity,
    message: str,
    subject: str = "",
    change: str = "another one of the dataset",
) -> Rule[_Effect]:
    meaning = (
        f"{change} changes the actions by less than {IGNORED_IN_SPREADS:g} spreads, or less than "
        f"{IGNORED_IN_DEVIATIONS:g} standard deviations"
    )

    def number(effect: _Effect) -> float | None:
        return effect.number if effect.kind == kind else None

    limit: Callable[[_Effect], float] = operator.attrgetter("limit")
    return Rule(kind, severity, limit, message, number, subject, meaning, operator.lt)


INPUT_RULES = (
    _ignored(
        "camera-ignored",
        "problem",
        "Showing the camera {of.camera} the images of another moment {of.amount}: the policy "
        "ignores it.",
        "{of.slot}",
    ),
    _ignored(
        "cameras-ignored",
        "problem",
        "Showing all cameras the images of another moment {of.amount}: the policy ignores them.",
        ALL,
    ),
    _ignored(
        "sentence-ignored",
        "problem",
        "Another sentence of the dataset {of.amount}: the policy ignores the sentence.",
    ),
    _ignored(
        "sentence-not-needed",
        "remark",
        "An empty sentence {of.amount}: the dataset has one sentence only, so the policy did not "
        "have to learn to read it.",
        change="the dataset has one sentence only, and an empty one",
    ),
    _ignored(
        "state-ignored",
        "remark",
        "The state of another moment {of.amount}: the policy ignores the state.",
    ),
)
# Of the name of a state, and the share of its error that is carried to the end of the chunk.
CARRIED_RULE: Rule[tuple[str, float]] = Rule(
    "state-error-carried",
    "remark",
    CARRIED,
    "Of an error of {of[0]}, {number:.0%} remains in its target at the end of the chunk: the "
    "policy repeats the state that it is sent, and errors may add up.",
    lambda carried: carried[1],
    "{of[0]}",
    f"share of a state's error that is in its target at the end of the chunk, above {CARRIED:g}",
)
NOISE_RULE: Rule[Influence] = Rule(
    "undecided",
    "remark",
    UNDECIDED,
    "Noise alone changes the actions by {number:.2f} of their standard deviation in the dataset: "
    "the policy is undecided, or has several ways to do the task.",
    lambda found: found.noise,
    meaning=f"standard deviations by which noise alone changes the actions, above {UNDECIDED:g}",
)
INFLUENCE_RULES = (*INPUT_RULES, CARRIED_RULE, NOISE_RULE)


def influence_verdicts(found: Influence) -> list[Verdict]:
    """Return what is worth knowing, problems first."""
    verdicts: list[Verdict] = []
    for effect in _effects(found):
        verdicts += judge(INPUT_RULES, effect)
    for name, share in zip(found.carried_names, found.carried, strict=True):
        kept = float(np.mean(share[-max(1, len(share) // 4) :]))
        verdicts += judge([CARRIED_RULE], (name, kept))
    verdicts += judge([NOISE_RULE], found)
    return problems_first(verdicts)


def problems_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=lambda verdict: verdict.severity != "problem")


# The limits of the error were chosen by these trials, the others by what they mean: the demo's
# policy as it is, and with random numbers of three sizes added to its weights once.
#   success      8 of 8   8 of 8   2 of 8   0 of 8
#   error        0.07     0.09     0.13     0.25      standard deviations in the worst dimension
#   standing     0.04     0.06     0.10     0.21      times the error of standing still
#   jump         0.26     0.28     0.44     0.77      times the largest recorded step

# In standard deviations of a dimension: a remark, and a problem. Tasks that need less precision, or
# that people demonstrated in several ways, may succeed with more than the first. A policy that
# predicts the mean whatever it observes is 0.8 wrong.
NOTABLE_ERROR, LARGE_ERROR = 0.12, 0.2
# Such a policy is nearly as close to a robot that does nothing as to the recording.
SHARE_OF_STANDING = 0.5
# From the first quarter of a chunk to its last, where the last is a large error. An error below the
# second number counts as that.
GROWTH, PRECISE = 3.0, 0.01
# A typical jump is larger than any step that the robot was told to make. A recording of steady
# motion has nearly 1 by itself.
LARGE_JUMP = 1.0


def _error(
    severity: Severity, limit: float, number: Callable[[Together], float | None]
) -> Rule[Together]:
    return Rule(
        "open-loop-error",
        severity,
        limit,
        "The error of {of.worst_dim} is {number:.2g} standard deviations, the largest of all"
        "{of.worst}.",
        number,
        "{of.worst_dim}",
        f"error of the worst action along an episode, in standard deviations, above {limit:g}",
    )


OPEN_LOOP_RULES: tuple[Rule[Together], ...] = (
    _error("problem", LARGE_ERROR, lambda of: of.worst_error),
    _error(
        "remark",
        NOTABLE_ERROR,
        lambda of: of.worst_error if of.worst_error <= LARGE_ERROR else None,
    ),
    Rule(
        "no-better-than-standing",
        "problem",
        SHARE_OF_STANDING,
        "The predicted chunks are {number:.2g} times as far from the recording as a command that "
        "stays as it is ({of.error:.2g} against {of.standing:.2g} standard deviations).",
        lambda of: of.error / of.standing if of.standing > 0 else None,
        "actions",
        f"error, as a share of that of a command that stays as it is, above {SHARE_OF_STANDING:g}",
    ),
    Rule(
        "error-grows",
        "remark",
        GROWTH,
        "The error grows along the chunk: {of.first:.2g} standard deviations in its first quarter, "
        "{of.last:.2g} in its last, {number:.2g} times as much. Executing fewer steps of a chunk "
        "before requesting the next avoids the late ones.",
        lambda of: of.last / max(of.first, PRECISE) if of.last > LARGE_ERROR else None,
        "horizon",
        f"error in the chunk's last quarter, divided by that in its first, above {GROWTH:g}; and "
        f"the last above {LARGE_ERROR:g}",
    ),
    Rule(
        "seam-jump",
        "problem",
        LARGE_JUMP,
        "Where a new chunk takes over, every {of.execute_horizon} steps, {of.jump_dim} jumps: half "
        "of the jumps are more than {number:.2g} times the largest step that was recorded.",
        lambda of: of.jump,
        "{of.jump_dim}",
        f"typical jump between chunks, divided by the largest recorded step, above {LARGE_JUMP:g}",
    ),
)


def open_loop_verdicts(results: Sequence[OpenLoop]) -> list[Verdict]:
    """Return what the episodes of one dataset show together."""
    return list(judge(OPEN_LOOP_RULES, Together(results)))
