"""What moves a policy: every input is changed, and the change of its actions measured.

All versions of a frame start from the same noise, so that what differs comes from the input alone.
A change is given in the robot's units, in standard deviations of the recorded actions, and in
spreads: the standard deviation over noise seeds with nothing changed.

Dims: f frames, q questions, v versions, n noise seeds, h steps of a chunk, a action dim, s states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from piston.inspection.frames import Frames, camera_names
from piston.inspection.probe import Intervention, Probe
from piston.inspection.questions import InputChange, input_changes
from piston.inspection.results import NO_MOTION, NOT_IN_JSON, seed_spread
from piston.progress import Progress, no_progress


class Skipped(NamedTuple):
    """A change that could not be made, and why."""

    question: InputChange
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Influence:
    """What every change of an input did, over all frames. NaN: it was not made in that frame.

    In spreads is None for a model that starts from no noise.
    """

    places: tuple[tuple[int, int], ...]
    action_names: tuple[str, ...]
    cameras: Mapping[str, str]
    questions: tuple[InputChange, ...]
    # The mean absolute change of every action, in the robot's units and in spreads.
    change: Float[np.ndarray, "q h a"]
    change_in_spreads: Float[np.ndarray, "q h a"] | None = None
    # In one number: the root mean square over steps and dimensions, each in standard deviations of
    # the recorded actions; and the same divided by that of the spread.
    strength: Float[np.ndarray, " q"]
    strength_in_spreads: Float[np.ndarray, " q"] | None = None
    strength_per_frame: Float[np.ndarray, "f q"]
    # The standard deviation over noise seeds in the robot's units, and in one number.
    spread: Float[np.ndarray, "h a"] | None = None
    noise: float | None = None
    noise_per_frame: Float[np.ndarray, " f"] | None = None
    # How much of an error of a state remains in the action of the same name, per step: 1 means that
    # the whole error is carried on, 0 that it is corrected.
    carried_names: tuple[str, ...]
    carried: Float[np.ndarray, "s h"]
    skipped: tuple[Skipped, ...]
    # The chunks of each frame with nothing changed.
    unchanged: Float[np.ndarray, "f n h a"] = dataclasses.field(metadata=NOT_IN_JSON)


def influence(
    probe: Probe,
    frames: Frames,
    places: Sequence[tuple[int, int]],
    progress: Progress = no_progress,
) -> Influence:
    """Make all changes in every frame. Raises ValueError if there are no frames."""
    if not places:
        raise ValueError("Influence is measured in at least one frame; none was given.")
    shown = [frames[place] for place in places]
    # The versions of each frame, by its place: first the unchanged one.
    asked: list[tuple[int, InputChange | None, Intervention]] = []
    reasons: dict[InputChange, str] = {}
    for number in range(len(shown)):
        asked.append((number, None, Intervention()))
        for key, change_or_reason in input_changes(probe, frames, shown, number):
            if isinstance(change_or_reason, str):
                reasons[key] = change_or_reason
            else:
                asked.append((number, key, change_or_reason))
    versions = [(shown[number], intervention) for number, _, intervention in asked]
    chunks = probe.ask(versions, progress).astype(np.float64)
    unchanged = chunks[[key is None for _, key, _ in asked]]
    scale = frames.action_scale()
    if unchanged.shape[-1] != len(scale):
        raise ValueError(
            f"The policy has {unchanged.shape[-1]} actions, the dataset {len(scale)}: the dataset "
            "is not of the policy's robot."
        )
    # The robot names its states and actions alike; a dataset may have other names.
    names = probe.policy.metadata.get("actions", {}).get("names") or frames.action_names
    questions = tuple(dict.fromkeys(key for _, key, _ in asked if key is not None))
    change = np.full((len(shown), len(questions), *unchanged.shape[2:]), np.nan)
    strength = np.full(change.shape[:2], np.nan)
    carried: dict[str, list[np.ndarray]] = {}
    for (frame, question, intervention), answer in zip(asked, chunks, strict=True):
        if question is None:
            continue
        place = questions.index(question)
        difference = answer - unchanged[frame]
        change[frame, place] = np.abs(difference).mean(0)
        strength[frame, place] = in_one_number(difference, scale)
        if question.change == "moved" and question.subject in names:
            moved = difference[:, :, names.index(question.subject)].mean(0)
            share = moved / intervention.state[question.subject]
            carried.setdefault(question.subject, []).append(share)
    return Influence(
        places=tuple(places),
        action_names=frames.action_names,
        cameras=camera_names(probe.policy),
        questions=questions,
        strength_per_frame=strength,
        carried_names=tuple(carried),
        carried=np.array([np.mean(shares, 0) for shares in carried.values()]),
        skipped=tuple(Skipped(*one) for one in reasons.items() if one[0] not in questions),
        unchanged=unchanged,
        **_over_frames(change, strength, unchanged, scale),
    )


def _over_frames(
    change: Float[np.ndarray, "f q h a"],
    strength: Float[np.ndarray, "f q"],
    unchanged: Float[np.ndarray, "f n h a"],
    scale: Float[np.ndarray, " a"],
) -> dict[str, Any]:
    """Return the fields of `Influence` that are averages over the frames."""
    asked = ~np.isnan(strength)
    share = (asked / asked.sum(0)).T  # of each frame in the mean of a question
    mean_change = np.einsum("qf,fqha->qha", share, np.nan_to_num(change))
    mean_strength = np.sqrt((share * np.nan_to_num(strength.T) ** 2).sum(1))
    found: dict[str, Any] = {"change": mean_change, "strength": mean_strength}
    if unchanged.shape[1] > 1:
        spreads = seed_spread(unchanged)
        noise = np.array([in_one_number(spread, scale) for spread in spreads])
        per_question = np.sqrt(np.tensordot(share, spreads**2, 1))
        found |= {
            "change_in_spreads": _ratio(mean_change, per_question),
            "strength_in_spreads": _ratio(mean_strength, np.sqrt(share @ noise**2)),
            "spread": np.sqrt(np.mean(spreads**2, 0)),
            "noise": float(np.sqrt(np.mean(noise**2))),
            "noise_per_frame": noise,
        }
    return found


def in_one_number(values: Float[np.ndarray, "*_ a"], scale: Float[np.ndarray, " a"]) -> float:
    """Return the root mean square in standard deviations; actions that never move are left out."""
    moves = scale > NO_MOTION
    if not moves.any():
        raise ValueError("No action moves in the dataset: changes of it cannot be compared.")
    return float(np.sqrt(np.square(values[..., moves] / scale[moves]).mean()))


def _ratio(change: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return a change in spreads; none is 0 even where there is no spread."""
    infinite = np.where(change > 0, np.inf, 0.0)
    return np.divide(change, spread, out=infinite, where=spread > 0)
