"""The overview of a policy: every question that can be asked without anyone choosing, at once.

Dims: n noise seeds, h steps of a chunk, a action dim.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from piston.inference.policy import Policy
from piston.inspection.frames import Frame, Frames, camera_names, state_dims
from piston.inspection.influence import Influence, influence
from piston.inspection.inside import Inside, inside
from piston.inspection.live import Comparison, compare
from piston.inspection.live_verdicts import live_verdicts
from piston.inspection.occlusion import Occlusion, OcclusionMap
from piston.inspection.open_loop import OpenLoop, open_loop
from piston.inspection.probe import Intervention, Probe
from piston.inspection.results import NOT_IN_JSON, Verdict, seed_spread
from piston.inspection.verdicts import influence_verdicts, open_loop_verdicts, problems_first
from piston.progress import Progress, no_progress

logger = logging.getLogger(__name__)

# An estimate of the time is logged above this many seconds.
_LONG = 60.0
# About how often a policy is asked along an episode.
_ALONG_EPISODE = 24
# A map compares versions that start from the same noise: a few are enough.
_MAP_SEEDS = 2
# Reading the pictures of both sets takes about as long as so many questions.
_COMPARING = 30


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is asked."""

    # Frames in which every input is changed.
    frames: int = 10
    # Noise that each question is asked with.
    seeds: int = 8
    # Frames with a map of where the policy looks, for each camera, and questions for each map.
    maps: int = 3
    map_budget: int = 120
    # Episodes along which chunks are compared with the recording.
    episodes: int = 1
    # Whether one inference is looked into.
    inside: bool = True


DEFAULT_PLAN = Plan()


@dataclasses.dataclass(frozen=True)
class Moment:
    """A frame that was asked about: what the model sees, and what it does, in the robot's units."""

    episode: int
    frame: int
    prompt: str
    # As the model sees them, by slot.
    pictures: Mapping[str, UInt8[np.ndarray, "_ _ 3"]] = dataclasses.field(metadata=NOT_IN_JSON)
    # The mean over the seeds, and the standard deviation; that is 0 without noise.
    predicted: Float[np.ndarray, "h a"]
    spread: Float[np.ndarray, "h a"]
    # What was recorded; NaN past the episode's end.
    recorded: Float[np.ndarray, "h a"]
    # Where the policy looks, in each camera; only of the first frames.
    maps: tuple[OcclusionMap, ...] = ()


@dataclasses.dataclass(frozen=True)
class Overview:
    # What was inspected, by the names in `_about`.
    about: Mapping[str, Any]
    # Problems first.
    verdicts: tuple[Verdict, ...]
    moments: tuple[Moment, ...]
    influence: Influence
    open_loop: tuple[OpenLoop, ...]
    # Of the first moment.
    inside: Inside | None
    live: Comparison | None


def compute(
    policy: Policy,
    frames: Frames,
    *,
    live: Frames | None = None,
    name: str = "",
    plan: Plan = DEFAULT_PLAN,
    places: Sequence[tuple[int, int]] | None = None,
    progress: Progress = no_progress,
) -> Overview:
    """Ask everything, and compare the data set with a live one.

    `places` are the frames to ask about, else `plan.frames` are spread out. A recording of a
    server is not followed along its episodes: its frames are requests, not control steps.

    Raises ValueError if the data set has no frames, or does not fit the policy.
    """
    if not frames.episodes:
        raise ValueError(
            f"{frames.pipeline.repo_id} has no episodes, so that nothing can be asked."
        )
    probe = Probe(policy, range(plan.seeds))
    chosen = frames.spread_out(plan.frames) if places is None else list(places)
    shown = [frames[place] for place in chosen]
    num_episodes = 0 if frames.is_recording else plan.episodes
    along = list(dict.fromkeys(episode for episode, _ in chosen))[:num_episodes]
    # π0-FAST also sees the slots that the robot has no camera for.
    known = camera_names(policy)
    cameras = [slot for slot in probe.pictures(shown[0]) if slot in known or not known]
    num_mapped = min(plan.maps, len(shown))
    num_maps = num_mapped * len(cameras)
    num_questions = 3 * len(cameras) + len(shown[0].prompt.split()) + 5  # about, in a frame
    num_questions += len(state_dims(policy, shown[0].observation))
    planned = {
        "influence": len(shown) * num_questions,
        "maps": num_maps * plan.map_budget,
        **{f"episode {one}": _ALONG_EPISODE for one in along},
        **({} if live is None else {"live": _COMPARING}),
    }
    show = _in_one_count(planned, progress)
    _say_how_long(probe, shown[0], sum(planned.values()))
    influenced = influence(probe, frames, chosen, show["influence"])
    maps: list[list[OcclusionMap]] = [[] for _ in shown]
    if num_maps:
        occlusion = Occlusion(Probe(policy, range(_MAP_SEEDS)), frames, budget=plan.map_budget)
        asked = itertools.product(range(num_mapped), cameras)
        for done, (number, camera) in enumerate(asked, start=1):
            maps[number].append(occlusion.map(shown[number], camera))
            show["maps"](done, num_maps)
    moments = map(functools.partial(_moment, probe), shown, influenced.unchanged, maps)
    followed = [open_loop(probe, frames, one, progress=show[f"episode {one}"]) for one in along]
    compared = None if live is None else compare(policy, frames, live, show["live"])
    verdicts = influence_verdicts(influenced)
    verdicts += live_verdicts(compared) if compared else []
    verdicts += open_loop_verdicts(followed) if followed else []
    return Overview(
        about=_about(probe, frames, shown[0], name),
        verdicts=tuple(problems_first(verdicts)),
        moments=tuple(moments),
        influence=influenced,
        open_loop=tuple(followed),
        inside=inside(probe, shown[0]) if plan.inside else None,
        live=compared,
    )


def _in_one_count(planned: Mapping[str, int], progress: Progress) -> dict[str, Progress]:
    """Return what each part reports to. It is as long as planned, whatever it counts itself."""
    all_parts = sum(planned.values())

    def part_of(part: str, before: int) -> Progress:
        def show(done: int, total: int | None = None, note: str = "") -> None:
            share = done / total if total else 0.0
            progress(before + round(share * planned[part]), all_parts, note or part)

        return show

    begins = itertools.accumulate(planned.values(), initial=0)
    return {part: part_of(part, begin) for part, begin in zip(planned, begins)}


def _say_how_long(probe: Probe, frame: Frame, num_questions: int) -> None:
    """Ask once, and log an estimate of the time if it is long."""
    probe.policy.warm_up()
    began = time.perf_counter()
    probe.chunks(frame, [Intervention()])
    seconds = time.perf_counter() - began
    if (estimate := num_questions * seconds) > _LONG:
        logger.info(
            "about %d questions of %.2g s on %s: up to %s. Fewer frames, maps or seeds take less.",
            *(num_questions, seconds, probe.policy.device),
            datetime.timedelta(seconds=round(estimate)),
        )


def _about(probe: Probe, frames: Frames, frame: Frame, name: str) -> dict[str, Any]:
    policy = probe.policy
    config = policy.model.config
    return {
        "policy": name,
        "family": config.family,
        "num_parameters": policy.num_parameters,
        "device": str(policy.device),
        # Denoising steps; None for a model that writes tokens.
        "num_steps": policy.num_steps if config.denoises else None,
        "robot": str(policy.metadata.get("robot", "")),
        "data": str(frames.pipeline.repo_id),
        "num_episodes": len(frames.episodes),
        "num_frames": sum(frames.episodes.values()),
        "fps": frames.fps,
        # Of a chunk.
        "num_actions": len(frame.recorded),
        "num_seeds": probe.num_seeds,
        # The robot's name of the camera in each slot of the model.
        "cameras": camera_names(policy),
        "action_names": frames.action_names,
        "state_names": tuple(dim.name for dim in state_dims(policy, frame.observation)),
    }


def _moment(
    probe: Probe, frame: Frame, chunks: Float[np.ndarray, "n h a"], maps: Sequence[OcclusionMap]
) -> Moment:
    frame.error(chunks)  # Raises ValueError if they cannot be compared.
    return Moment(
        episode=frame.episode,
        frame=frame.frame,
        prompt=frame.prompt,
        pictures=probe.pictures(frame),
        predicted=chunks.mean(0),
        spread=seed_spread(chunks),
        recorded=np.where(frame.is_real[:, None], frame.recorded, np.nan),
        maps=tuple(maps),
    )
