"""Predicted chunks against the recording along an episode: errors, spread over seeds, and seams.

Open loop: the policy is asked at recorded frames and its answers are not executed. A robot would
execute the first `execute_horizon` steps of a chunk and then ask again; where the next chunk takes
over is a seam.

    frames      0 ········ 60 ········ 120 ······           asked every `stride` frames
    executed    ──────────┐╌╌╌╌╌╌╌╌╌╌╌                      ┐ seam: the first step of the next chunk
                          └───────────┐╌╌╌╌╌╌╌╌╌╌╌            minus the last executed one

Dims: q asked frames, n noise seeds, h steps of a chunk, a action dim, t frames of the episode,
s seams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8

from piston.inspection.frames import Frame, Frames
from piston.inspection.probe import Intervention, Probe
from piston.inspection.results import NOT_IN_JSON, Verdict, known_mean, seed_spread
from piston.progress import Progress, no_progress

# Asked frames of an episode at most, before those that seams need.
_MAX_ASKED = 40
_NUM_WORST = 8
# Verdicts. The limits of the error were chosen by these trials, the others by what they mean: the
# demo's policy as it is, and with random numbers of three sizes added to its weights once.
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
# A dimension that varies less has no unit to measure its errors in.
_NO_MOTION = 1e-6


@dataclasses.dataclass(frozen=True)
class WorstMoment:
    """A frame at which a chunk is wrong, and the dimension that is most wrong there.

    Errors are means over the executed steps and the seeds.
    """

    episode: int
    frame: int
    dimension: str
    # In the robot's units, and in standard deviations of the dimension.
    error: float
    error_std: float
    # Standard deviation over the seeds, in the same standard deviations.
    seed_spread_std: float
    # As the model sees them, by slot.
    pictures: Mapping[str, UInt8[np.ndarray, "_ _ 3"]] = dataclasses.field(
        default_factory=dict, metadata=NOT_IN_JSON
    )


@dataclasses.dataclass(frozen=True)
class OpenLoop:
    """One episode; all in the robot's units unless a name ends in `_std`."""

    episode: int
    fps: float
    names: tuple[str, ...]
    execute_horizon: int
    # The frames at which the policy was asked, and its answers.
    asked: tuple[int, ...]
    chunks: Float[np.ndarray, "q n h a"] = dataclasses.field(metadata=NOT_IN_JSON)
    recorded: Float[np.ndarray, "t a"]
    # Of the recorded actions of the whole data set; not a number for one that never moves.
    std: Float[np.ndarray, " a"]
    # Mean distance from the recording for each step of the chunk, and what it would be if the first
    # recorded action of the chunk were kept: a robot that stands still, if actions are positions.
    error: Float[np.ndarray, "h a"]
    error_of_standing: Float[np.ndarray, "h a"]
    # Mean over the asked frames of the standard deviation over seeds.
    seed_spread: Float[np.ndarray, "h a"]
    # The frames where a new chunk takes over, and by how much the robot's command changes there in
    # one step. Chunks of a seam start from different noise, as on a robot.
    seams: tuple[int, ...]
    jumps: Float[np.ndarray, "s n a"]
    # The largest change from one frame to the next that was recorded in the data set.
    largest_step: Float[np.ndarray, " a"]
    # The worst first, one per frame.
    worst: tuple[WorstMoment, ...]

    @property
    def error_std(self) -> Float[np.ndarray, "h a"]:
        return self.error / self.std

    @property
    def jump_ratios(self) -> Float[np.ndarray, "s n a"]:
        """Return jumps as multiples of the largest recorded step."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.abs(self.jumps) / self.largest_step
        return np.where(self.largest_step > _NO_MOTION, ratios, np.nan)


def open_loop(
    probe: Probe,
    frames: Frames,
    episode: int,
    *,
    execute_horizon: int | None = None,
    stride: int | None = None,
    progress: Progress = no_progress,
) -> OpenLoop:
    """Ask the policy every `stride` frames of an episode, and where it would take over.

    By default half of a chunk is executed, and a quarter of that is the stride; in long episodes it
    is longer.
    """
    recorded = frames.actions_of(episode)
    horizon = probe.policy.data.steps_read(probe.policy.model.config.action_horizon)
    execute = max(1, horizon // 2) if execute_horizon is None else execute_horizon
    if not 1 <= execute <= horizon:
        raise ValueError(f"execute_horizon is {execute}; a chunk has 1 to {horizon} steps.")
    stride = max(1, execute // 4, -(-len(recorded) // _MAX_ASKED)) if stride is None else stride
    if stride < 1:
        raise ValueError(f"stride is {stride}; it must be at least 1.")
    # From every frame that is asked, or from every stride if that is longer, the next chunk too.
    offsets = {*range(0, execute, stride), execute}
    blocks = range(0, len(recorded), max(execute, stride))
    asked = sorted({at + offset for at in blocks for offset in offsets})
    moments = [frames[episode, at] for at in asked if at < len(recorded)]
    chunks = probe.ask([(moment, Intervention()) for moment in moments], progress)
    result = compare(frames, moments, chunks, execute)
    worst = (
        dataclasses.replace(one, pictures=probe.pictures(frames[one.episode, one.frame]))
        for one in result.worst
    )
    return dataclasses.replace(result, worst=tuple(worst))


def compare(
    frames: Frames,
    moments: Sequence[Frame],
    chunks: Float[np.ndarray, "q n h a"],
    execute_horizon: int,
) -> OpenLoop:
    """Compare chunks with what was recorded at moments of one episode, which are in order."""
    errors = np.stack([moment.error(one) for moment, one in zip(moments, chunks, strict=True)])
    horizon, asked = chunks.shape[2], tuple(moment.frame for moment in moments)
    still = np.stack([moment.error(moment.recorded[:1].repeat(horizon, 0)) for moment in moments])
    spread = np.where(np.isnan(errors[:, 0]), np.nan, seed_spread(chunks))
    scale = frames.action_scale()
    std = np.where(scale > _NO_MOTION, scale, np.nan)
    seams = tuple(at for at in asked if at - execute_horizon in asked)
    executed = errors[:, :, :execute_horizon], spread[:, :execute_horizon]
    return OpenLoop(
        episode=moments[0].episode,
        fps=float(frames.fps),
        names=frames.action_names,
        execute_horizon=execute_horizon,
        asked=asked,
        chunks=chunks,
        recorded=frames.actions_of(moments[0].episode),
        std=std,
        error=known_mean(np.abs(errors), (0, 1)),
        error_of_standing=known_mean(np.abs(still), 0),
        seed_spread=known_mean(spread, 0),
        seams=seams,
        jumps=_jumps(chunks, asked, seams, execute_horizon),
        largest_step=_largest_step(frames),
        worst=_worst(frames.action_names, moments, *executed, std),
    )


def _jumps(
    chunks: Float[np.ndarray, "q n h a"], asked: Sequence[int], seams: Sequence[int], execute: int
) -> Float[np.ndarray, "s n a"]:
    places = {at: place for place, at in enumerate(asked)}
    before = chunks[[places[at - execute] for at in seams], :, execute - 1]
    after = chunks[[places[at] for at in seams], :, 0]
    # The next request draws other noise.
    return np.roll(after, 1, axis=1) - before


def _largest_step(frames: Frames) -> Float[np.ndarray, " a"]:
    steps = (np.abs(np.diff(frames.actions_of(one), axis=0)) for one in frames.episodes)
    return np.max([one.max(0, initial=0.0) for one in steps], axis=0)


def _worst(
    names: Sequence[str],
    moments: Sequence[Frame],
    errors: Float[np.ndarray, "q n e a"],
    spread: Float[np.ndarray, "q e a"],
    std: Float[np.ndarray, " a"],
) -> tuple[WorstMoment, ...]:
    """Return one moment per frame, the largest errors first."""
    error, spread = known_mean(np.abs(errors), (1, 2)), known_mean(spread, 1)
    relative = np.nan_to_num(error / std, nan=-1.0)
    found = [
        WorstMoment(
            moment.episode,
            moment.frame,
            names[dim],
            float(error[place, dim]),
            float(relative[place, dim]),
            float(spread[place, dim] / std[dim]),
        )
        for place, (moment, dim) in enumerate(zip(moments, relative.argmax(1).tolist()))
        if relative[place, dim] >= 0  # else no dimension moves in the data set
    ]
    return tuple(sorted(found, key=lambda one: -one.error_std)[:_NUM_WORST])


def open_loop_verdicts(results: Sequence[OpenLoop]) -> list[Verdict]:
    """Return what the episodes of one data set show together."""
    found = (_error_verdict(results), _standing_verdict(results), _growth_verdict(results))
    return [one for one in (*found, _seam_verdict(results)) if one is not None]


def _error_verdict(results: Sequence[OpenLoop]) -> Verdict | None:
    error = known_mean(np.concatenate([one.error_std for one in results]), 0)
    dim = int(np.nan_to_num(error).argmax())
    name, number = results[0].names[dim], float(error[dim])
    if not number > NOTABLE_ERROR:
        return None
    is_large, has_seeds = number > LARGE_ERROR, results[0].chunks.shape[1] > 1
    moments = [one for result in results for one in result.worst if one.dimension == name]
    sentence = f"The error of {name} is {number:.2g} standard deviations, the largest of all"
    if moments:
        worst = max(moments, key=lambda one: one.error_std)
        sentence += (
            f"; it is worst at episode {worst.episode}, frame {worst.frame} ({worst.error_std:.2g})"
        )
        if has_seeds:
            agree = worst.seed_spread_std < AGREED * worst.error_std
            meaning = "they agree on a wrong motion" if agree else "it is not sure what to do"
            sentence += f", where noise seeds differ by {worst.seed_spread_std:.2g}: {meaning}"
    return Verdict(
        "open-loop-error",
        name,
        "problem" if is_large else "remark",
        f"{sentence}.",
        number,
        LARGE_ERROR if is_large else NOTABLE_ERROR,
    )


def _standing_verdict(results: Sequence[OpenLoop]) -> Verdict | None:
    error = known_mean(np.concatenate([one.error_std for one in results]), None)
    still = known_mean(np.concatenate([one.error_of_standing / one.std for one in results]), None)
    number = float(error / still) if still > 0 else 0.0  # nothing moves
    if not number > SHARE_OF_STANDING:
        return None
    sentence = (
        f"The predicted chunks are {number:.2g} times as far from the recording as a command that "
        f"stays as it is ({error:.2g} against {still:.2g} standard deviations)."
    )
    return Verdict(
        "no-better-than-standing", "actions", "problem", sentence, number, SHARE_OF_STANDING
    )


def _growth_verdict(results: Sequence[OpenLoop]) -> Verdict | None:
    quarter = max(1, len(results[0].error) // 4)
    first = known_mean(np.concatenate([one.error_std[:quarter] for one in results]), None)
    last = known_mean(np.concatenate([one.error_std[-quarter:] for one in results]), None)
    number = float(last / max(first, PRECISE))
    if not (number > GROWTH and last > LARGE_ERROR):
        return None
    sentence = (
        f"The error grows along the chunk: {first:.2g} standard deviations in its first quarter, "
        f"{last:.2g} in its last, {number:.2g} times as much. Executing fewer steps of a chunk "
        "before asking again avoids the late ones."
    )
    return Verdict("error-grows", "horizon", "remark", sentence, number, GROWTH)


def _seam_verdict(results: Sequence[OpenLoop]) -> Verdict | None:
    ratios = np.concatenate([one.jump_ratios.reshape(-1, len(one.names)) for one in results])
    if not len(ratios):
        return None
    typical = np.median(ratios, axis=0)  # not a number for dimensions that never move
    dim = int(np.nan_to_num(typical).argmax())
    name, number = results[0].names[dim], float(typical[dim])
    if not number > LARGE_JUMP:
        return None
    sentence = (
        f"Where a new chunk takes over, every {results[0].execute_horizon} steps, {name} jumps: "
        f"half of the jumps are more than {number:.2g} times the largest step that was recorded."
    )
    return Verdict("seam-jump", name, "problem", sentence, number, LARGE_JUMP)
