"""What moves a policy: every input is changed, and the change of its actions measured.

All versions of a frame start from the same noise, so that what differs comes from the input alone.
A change is given in the robot's units, in standard deviations of the recorded actions, and in
spreads: the standard deviation over noise seeds with nothing changed.

Dims: f frames, q questions, v versions, n noise seeds, h steps of a chunk, a action dim, s states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from piston.inspection.frames import Frames, camera_names
from piston.inspection.probe import Intervention, Probe
from piston.inspection.questions import Question, Questions
from piston.inspection.results import seed_spread
from piston.progress import Progress, no_progress

# An action with a smaller standard deviation does not move in the data set: a change cannot be
# given in standard deviations.
_MOVES = 1e-6


class Skipped(NamedTuple):
    """A question that was not asked, and why."""

    question: Question
    reason: str


@dataclasses.dataclass(frozen=True)
class Influence:
    """What every question changed, over all frames. NaN: it was not asked in that frame.

    In spreads is None for a model that starts from no noise.
    """

    places: tuple[tuple[int, int], ...]
    action_names: tuple[str, ...]
    cameras: Mapping[str, str]
    questions: tuple[Question, ...]
    # The mean absolute change of every action, in the robot's units and in spreads.
    change: Float[np.ndarray, "q h a"]
    change_in_spreads: Float[np.ndarray, "q h a"] | None
    # In one number: the root mean square over steps and dimensions, each in standard deviations of
    # the recorded actions; and the same divided by that of the spread.
    strength: Float[np.ndarray, " q"]
    strength_in_spreads: Float[np.ndarray, " q"] | None
    strength_per_frame: Float[np.ndarray, "f q"]
    # The standard deviation over noise seeds in the robot's units, and in one number.
    spread: Float[np.ndarray, "h a"] | None
    noise: float | None
    noise_per_frame: Float[np.ndarray, " f"] | None
    # How much of an error of a state remains in the action of the same name, per step: 1 means that
    # the whole error is carried on, 0 that it is corrected.
    carried_names: tuple[str, ...]
    carried: Float[np.ndarray, "s h"]
    skipped: tuple[Skipped, ...]


def influence(
    probe: Probe,
    frames: Frames,
    places: Sequence[tuple[int, int]],
    progress: Progress = no_progress,
) -> Influence:
    """Ask all questions in every frame. Raises ValueError if there are no frames."""
    if not places:
        raise ValueError("Influence is measured in at least one frame; none was given.")
    shown = [frames[place] for place in places]
    asked = [Questions(probe, frames, shown, number) for number in range(len(shown))]
    measured = _Measured(probe, frames, list(dict.fromkeys(q for one in asked for q in one.asked)))
    versions = [
        (frame, intervention)
        for frame, questions in zip(shown, asked, strict=True)
        for intervention in (Intervention(), *questions.asked.values())
    ]
    chunks = iter(probe.ask(versions, progress))
    for questions in asked:
        measured.add(questions.asked, next(chunks), [next(chunks) for _ in questions.asked])
    skipped = {question: reason for one in asked for question, reason in one.skipped.items()}
    return measured.result(tuple(places), skipped)


class _Measured:
    """What the frames gave, one after the other."""

    def __init__(self, probe: Probe, frames: Frames, questions: Sequence[Question]) -> None:
        self._probe, self._names = probe, frames.action_names
        self._scale = frames.action_scale()
        self._places = {question: place for place, question in enumerate(questions)}
        # The robot names its states and actions alike; a data set may have other names.
        names = probe.policy.metadata.get("actions", {}).get("names") or self._names
        self._actions = {name: place for place, name in enumerate(names)}
        self._followed: dict[str, list[np.ndarray]] = {}
        self._changes: list[np.ndarray] = []
        self._strengths: list[np.ndarray] = []
        self._variances: list[np.ndarray] = []

    def add(
        self,
        asked: Mapping[Question, Intervention],
        unchanged: Float[np.ndarray, "n h a"],
        changed: Sequence[Float[np.ndarray, "n h a"]],
    ) -> None:
        """Add one frame."""
        num_seeds, *_, dim = shape = unchanged.shape
        if dim != len(self._scale):
            raise ValueError(
                f"The policy has {dim} actions, the data set {len(self._scale)}: the data set is "
                "not of the policy's robot."
            )
        change = np.full((len(self._places), *shape[1:]), np.nan)
        strength = np.full(len(self._places), np.nan)
        for (question, intervention), chunks in zip(asked.items(), changed, strict=True):
            place, one = self._places[question], chunks.astype(np.float64) - unchanged
            change[place], strength[place] = np.abs(one).mean(0), in_one_number(one, self._scale)
            if question.change == "moved" and question.subject in self._actions:
                moved = intervention.state[question.subject]
                followed = one[:, :, self._actions[question.subject]].mean(0) / moved
                self._followed.setdefault(question.subject, []).append(followed)
        self._changes.append(change)
        self._strengths.append(strength)
        if num_seeds > 1:
            self._variances.append(seed_spread(unchanged) ** 2)

    def result(
        self, places: tuple[tuple[int, int], ...], skipped: Mapping[Question, str]
    ) -> Influence:
        strengths = np.stack(self._strengths)
        asked = ~np.isnan(strengths)
        share = (asked / asked.sum(0)).T  # of each frame in the mean of a question
        change = np.einsum("qf,fqha->qha", share, np.nan_to_num(np.stack(self._changes)))
        strength = np.sqrt((share * np.nan_to_num(strengths.T) ** 2).sum(1))
        spread = noise = None
        if self._variances:
            variances = np.stack(self._variances)
            noise = np.array([in_one_number(np.sqrt(one), self._scale) for one in variances])
            spread = np.sqrt(np.tensordot(share, variances, 1))
        return Influence(
            places=places,
            action_names=self._names,
            cameras=camera_names(self._probe.policy),
            questions=tuple(self._places),
            change=change,
            change_in_spreads=None if spread is None else _ratio(change, spread),
            strength=strength,
            strength_in_spreads=(
                None if noise is None else _ratio(strength, np.sqrt(share @ noise**2))
            ),
            strength_per_frame=strengths,
            spread=None if not self._variances else np.sqrt(np.mean(self._variances, 0)),
            noise=None if noise is None else float(np.sqrt(np.mean(noise**2))),
            noise_per_frame=noise,
            carried_names=tuple(self._followed),
            carried=np.array([np.mean(one, 0) for one in self._followed.values()]),
            skipped=tuple(Skipped(*one) for one in skipped.items() if one[0] not in self._places),
        )


def in_one_number(values: Float[np.ndarray, "*_ a"], scale: Float[np.ndarray, " a"]) -> float:
    """Return the root mean square in standard deviations; actions that never move are left out."""
    moves = scale > _MOVES
    if not moves.any():
        raise ValueError("No action moves in the data set: changes of it cannot be compared.")
    return float(np.sqrt(np.square(values[..., moves] / scale[moves]).mean()))


def _ratio(change: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return a change in spreads; none is 0 even where there is no spread."""
    infinite = np.where(change > 0, np.inf, 0.0)
    return np.divide(change, spread, out=infinite, where=spread > 0)
