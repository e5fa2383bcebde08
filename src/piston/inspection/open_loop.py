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
from piston.inspection.results import NO_MOTION, NOT_IN_JSON, known_mean, seed_spread
from piston.progress import Progress, no_progress

# Asked frames of an episode at most, before those that seams need.
_MAX_ASKED = 40
_NUM_WORST = 8
# Below this share of the error, the spread over seeds does not explain it.
AGREED = 0.5


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
        return np.where(self.largest_step > NO_MOTION, ratios, np.nan)


class Together:
    """What the episodes of one dataset show together; errors are in standard deviations."""

    def __init__(self, results: Sequence[OpenLoop]) -> None:
        self.results = results
        first = results[0]
        self.names, self.execute_horizon = first.names, first.execute_horizon
        # Of each episode, step of the chunk and dimension.
        self.errors = np.stack([one.error_std for one in results])
        self.worst_dim, self.worst_error = self._largest(self.mean_of(self.errors))
        quarter = max(1, self.errors.shape[1] // 4)
        self.first = float(known_mean(self.errors[:, :quarter]))
        self.last = float(known_mean(self.errors[:, -quarter:]))
        self.error = float(known_mean(self.errors))
        self.standing_errors = np.stack([one.error_of_standing / one.std for one in results])
        self.standing = float(known_mean(self.standing_errors))
        jumps = np.concatenate([one.jump_ratios.reshape(-1, len(self.names)) for one in results])
        # Not a number for dimensions that never move.
        unknown = np.full(len(self.names), np.nan)
        self.jumps = np.median(jumps, axis=0) if len(jumps) else unknown
        self.jump_dim, self.jump = self._largest(self.jumps)

    @property
    def worst(self) -> str:
        """Where the worst dimension is worst, and whether the seeds agree there."""
        moments = [one for result in self.results for one in result.worst]
        moments = [one for one in moments if one.dimension == self.worst_dim]
        if not moments:
            return ""
        worst = max(moments, key=lambda one: one.error_std)
        text = f"; it is worst at episode {worst.episode}, frame {worst.frame}"
        text += f" ({worst.error_std:.2g})"
        if self.results[0].chunks.shape[1] > 1:
            agree = worst.seed_spread_std < AGREED * worst.error_std
            meaning = "they agree on a wrong motion" if agree else "it is not sure what to do"
            text += f", where noise seeds differ by {worst.seed_spread_std:.2g}: {meaning}"
        return text

    @staticmethod
    def mean_of(values: Float[np.ndarray, "e h a"]) -> Float[np.ndarray, " a"]:
        return known_mean(values.reshape(-1, values.shape[-1]), 0)

    def _largest(self, values: Float[np.ndarray, " a"]) -> tuple[str, float]:
        dim = int(np.nan_to_num(values).argmax())
        return self.names[dim], float(values[dim])


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
    result = compare_chunks(frames, moments, chunks, execute)
    worst = (
        dataclasses.replace(one, pictures=probe.pictures(frames[one.episode, one.frame]))
        for one in result.worst
    )
    return dataclasses.replace(result, worst=tuple(worst))


def compare_chunks(
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
    std = np.where(scale > NO_MOTION, scale, np.nan)
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
