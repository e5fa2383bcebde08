"""Conclusions from the influence of inputs and from predictions along episodes: tables of rules.

An input counts as ignored if another one of the dataset in its place changes hardly anything. A
black image or an empty sentence is something that training has not shown: a policy may react to it
although it ignores all that it knows.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from piston.inspection.influence import Influence
from piston.inspection.open_loop import OpenLoop
from piston.inspection.questions import ALL, InputChange
from piston.inspection.results import Verdict, judge, known_mean
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


@dataclasses.dataclass(frozen=True)
class _Effect:
    """What one change of an input did."""

    found: Influence
    change: InputChange

    @property
    def camera(self) -> str:
        return self.found.cameras.get(self.change.subject, self.change.subject)

    @functools.cached_property
    def _spreads(self) -> float | None:
        """The effect in spreads, if it is so small that it counts."""
        spreads = self.found.strength_in_spreads
        number = None if spreads is None else float(spreads[self._place])
        return number if number is not None and number < IGNORED_IN_SPREADS else None

    @property
    def _place(self) -> int:
        return self.found.questions.index(self.change)

    @property
    def number(self) -> float:
        return float(self.found.strength[self._place]) if self._spreads is None else self._spreads

    @property
    def limit(self) -> float:
        return IGNORED_IN_DEVIATIONS if self._spreads is None else IGNORED_IN_SPREADS

    @property
    def amount(self) -> str:
        unit = "of the spread over noise seeds"
        if self._spreads is None:
            unit = "of their standard deviation in the dataset"
        return f"changes the actions by {self.number:.2g} {unit}"


def _of(input: str, change: str, *, is_all: bool = True) -> Callable[[_Effect], float | None]:
    """Return the number of a rule about one change of an input."""

    def number(effect: _Effect) -> float | None:
        asked = effect.change
        applies = asked.input == input and asked.change == change
        return effect.number if applies and (asked.subject == ALL) == is_all else None

    return number


def _of_empty_sentence(effect: _Effect) -> float | None:
    has_others = InputChange("sentence", ALL, "other") in effect.found.questions
    return None if has_others else _of("sentence", "empty")(effect)


_BELOW = (
    f"changes the actions by less than {IGNORED_IN_SPREADS:g} spreads, or less than "
    f"{IGNORED_IN_DEVIATIONS:g} standard deviations"
)


def _ignored(
    kind: str,
    severity: Severity,
    message: str,
    number: Callable[[_Effect], float | None],
    subject: str = "",
    change: str = "another one of the dataset",
) -> Rule[_Effect]:
    meaning = f"{change} {_BELOW}"
    limit: Callable[[_Effect], float] = operator.attrgetter("limit")
    return Rule(kind, severity, limit, message, number, subject, meaning, operator.lt)


INPUT_RULES = (
    _ignored(
        "camera-ignored",
        "problem",
        "Showing the camera {of.camera} the images of another moment {of.amount}: the policy "
        "ignores it.",
        _of("camera", "other", is_all=False),
        subject="{of.change.subject}",
    ),
    _ignored(
        "cameras-ignored",
        "problem",
        "Showing all cameras the images of another moment {of.amount}: the policy ignores them.",
        _of("camera", "other"),
        subject=ALL,
    ),
    _ignored(
        "sentence-ignored",
        "problem",
        "Another sentence of the dataset {of.amount}: the policy ignores the sentence.",
        _of("sentence", "other"),
    ),
    _ignored(
        "sentence-not-needed",
        "remark",
        "An empty sentence {of.amount}: the dataset has one sentence only, so the policy did not "
        "have to learn to read it.",
        _of_empty_sentence,
        change="the dataset has one sentence only, and an empty one",
    ),
    _ignored(
        "state-ignored",
        "remark",
        "The state of another moment {of.amount}: the policy ignores the state.",
        _of("state", "other"),
    ),
)
# Of the name of a state, and the share of its error that is carried to the end of the chunk.
CARRIED_RULE: Rule[tuple[str, float]] = Rule(
    kind="state-error-carried",
    severity="remark",
    limit=CARRIED,
    message="Of an error of {of[0]}, {number:.0%} remains in its target at the end of the chunk: "
    "the policy repeats the state that it is sent, and errors may add up.",
    number=lambda carried: carried[1],
    subject="{of[0]}",
    meaning=f"share of a state's error that is in its target at the end of the chunk, above "
    f"{CARRIED:g}",
)
NOISE_RULE: Rule[Influence] = Rule(
    kind="undecided",
    severity="remark",
    limit=UNDECIDED,
    message="Noise alone changes the actions by {number:.2f} of their standard deviation in the "
    "dataset: the policy is undecided, or has several ways to do the task.",
    number=lambda found: found.noise,
    meaning=f"standard deviations by which noise alone changes the actions, above {UNDECIDED:g}",
)
INFLUENCE_RULES = (*INPUT_RULES, CARRIED_RULE, NOISE_RULE)


def influence_verdicts(found: Influence) -> list[Verdict]:
    """Return what is worth knowing, problems first."""
    verdicts: list[Verdict] = []
    for change in found.questions:
        verdicts += judge(INPUT_RULES, _Effect(found, change))
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
# Below this share of the error, the spread over seeds does not explain it.
AGREED = 0.5


class _Together:
    """What the episodes of one dataset show together; errors are in standard deviations."""

    def __init__(self, results: Sequence[OpenLoop]) -> None:
        self._results, self._names = results, results[0].names
        self.execute_horizon = results[0].execute_horizon
        per_dim = self._mean([one.error_std for one in results], axis=0)
        self.worst_dim, self.worst_error = self._largest(per_dim)
        quarter = max(1, len(results[0].error) // 4)
        self.error = float(self._mean([one.error_std for one in results]))
        self.standing = float(self._mean([one.error_of_standing / one.std for one in results]))
        self.first = float(self._mean([one.error_std[:quarter] for one in results]))
        self.last = float(self._mean([one.error_std[-quarter:] for one in results]))
        ratios = [one.jump_ratios.reshape(-1, len(self._names)) for one in results]
        jumps = np.concatenate(ratios)
        # Not a number for dimensions that never move.
        typical = np.median(jumps, axis=0) if len(jumps) else np.full(len(self._names), np.nan)
        self.jump_dim, self.jump = self._largest(typical)

    @staticmethod
    def _mean(parts: Sequence[np.ndarray], axis: int | None = None) -> np.ndarray:
        return known_mean(np.concatenate(parts), axis)

    def _largest(self, values: Float[np.ndarray, " a"]) -> tuple[str, float]:
        dim = int(np.nan_to_num(values).argmax())
        return self._names[dim], float(values[dim])

    @property
    def worst(self) -> str:
        """Where the worst dimension is worst, and whether the seeds agree there."""
        moments = [one for result in self._results for one in result.worst]
        moments = [one for one in moments if one.dimension == self.worst_dim]
        if not moments:
            return ""
        worst = max(moments, key=lambda one: one.error_std)
        text = (
            f"; it is worst at episode {worst.episode}, frame {worst.frame} ({worst.error_std:.2g})"
        )
        if self._results[0].chunks.shape[1] > 1:
            agree = worst.seed_spread_std < AGREED * worst.error_std
            meaning = "they agree on a wrong motion" if agree else "it is not sure what to do"
            text += f", where noise seeds differ by {worst.seed_spread_std:.2g}: {meaning}"
        return text

    @property
    def growth(self) -> float | None:
        return self.last / max(self.first, PRECISE) if self.last > LARGE_ERROR else None


_ERROR = (
    "The error of {of.worst_dim} is {number:.2g} standard deviations, the largest of all{of.worst}."
)
_ERROR_MEANING = (
    "error of the worst action along an episode, in standard deviations, above {limit:g}"
)
OPEN_LOOP_RULES: tuple[Rule[_Together], ...] = (
    Rule(
        kind="open-loop-error",
        severity="problem",
        limit=LARGE_ERROR,
        message=_ERROR,
        number=lambda of: of.worst_error,
        subject="{of.worst_dim}",
        meaning=_ERROR_MEANING.format(limit=LARGE_ERROR),
    ),
    Rule(
        kind="open-loop-error",
        severity="remark",
        limit=NOTABLE_ERROR,
        message=_ERROR,
        number=lambda of: of.worst_error if of.worst_error <= LARGE_ERROR else None,
        subject="{of.worst_dim}",
        meaning=_ERROR_MEANING.format(limit=NOTABLE_ERROR),
    ),
    Rule(
        kind="no-better-than-standing",
        severity="problem",
        limit=SHARE_OF_STANDING,
        message="The predicted chunks are {number:.2g} times as far from the recording as a "
        "command that stays as it is ({of.error:.2g} against {of.standing:.2g} standard "
        "deviations).",
        number=lambda of: of.error / of.standing if of.standing > 0 else None,
        subject="actions",
        meaning="error, as a share of that of a command that stays as it is, above "
        f"{SHARE_OF_STANDING:g}",
    ),
    Rule(
        kind="error-grows",
        severity="remark",
        limit=GROWTH,
        message="The error grows along the chunk: {of.first:.2g} standard deviations in its first "
        "quarter, {of.last:.2g} in its last, {number:.2g} times as much. Executing fewer steps of "
        "a chunk before requesting the next avoids the late ones.",
        number=lambda of: of.growth,
        subject="horizon",
        meaning=f"error in the chunk's last quarter, divided by that in its first, above "
        f"{GROWTH:g}; and the last above {LARGE_ERROR:g}",
    ),
    Rule(
        kind="seam-jump",
        severity="problem",
        limit=LARGE_JUMP,
        message="Where a new chunk takes over, every {of.execute_horizon} steps, {of.jump_dim} "
        "jumps: half of the jumps are more than {number:.2g} times the largest step that was "
        "recorded.",
        number=lambda of: of.jump,
        subject="{of.jump_dim}",
        meaning="typical jump between chunks, divided by the largest recorded step, above "
        f"{LARGE_JUMP:g}",
    ),
)


def open_loop_verdicts(results: Sequence[OpenLoop]) -> list[Verdict]:
    """Return what the episodes of one dataset show together."""
    return list(judge(OPEN_LOOP_RULES, _Together(results)))
