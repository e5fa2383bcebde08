"""Training against live: what a robot sends now, held against what the policy was trained on.

    training = Frames.open(policy, "data/my_set")
    live = Frames.open(policy, "recording", needs_cameras=False)
    comparison = compare(policy, training, live)
    for verdict in live_verdicts(comparison): print(verdict.sentence)

The live set is a recording of the server or another data set of the robot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from piston.inference.policy import Policy
from piston.inspection.frames import Frames
from piston.inspection.live_motion import camera_delay, still_share
from piston.inspection.live_numbers import Dimension, Timing, compare_states
from piston.inspection.live_pictures import Camera, ComparedSet, compare_camera
from piston.progress import Progress, no_progress

# Images that are read of each set.
TRAINING_IMAGES, LIVE_IMAGES = 256, 96


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was found in a live set beside the training set."""

    num_training_frames: int
    num_live_frames: int
    dimensions: list[Dimension]
    cameras: list[Camera]
    timing: Timing
    # Sentences that training never had, with the share of the live frames.
    new_prompts: dict[str, float]
    # What could not be decided, in sentences.
    undecided: list[str]


def compare(
    policy: Policy, training: Frames, live: Frames, progress: Progress = no_progress
) -> Comparison:
    """Compare all numbers, and some images of each set."""
    total = TRAINING_IMAGES + LIVE_IMAGES
    ours = ComparedSet(policy, training, TRAINING_IMAGES, lambda n, *_: progress(n, total))
    before = len(ours.rows)
    theirs = ComparedSet(policy, live, LIVE_IMAGES, lambda n, *_: progress(before + n, total))
    return compare_sets(ours, theirs)


def compare_sets(training: ComparedSet, live: ComparedSet) -> Comparison:
    if training.names != live.names:
        raise ValueError(
            f"The state of {live.frames.source.metadata.root} is {', '.join(live.names)}; "
            f"expected {', '.join(training.names)}, as in training."
        )
    new = {}
    if training.frames.pipeline.prompt_from_task:
        known = training.prompts()
        new = {text: share for text, share in live.prompts().items() if text not in known}
    timing = live.timing(training)
    cameras = [_compare_camera(slot, training, live) for slot in training.pictures]
    return Comparison(
        num_training_frames=len(training.states),
        num_live_frames=len(live.states),
        dimensions=compare_states(training, live, timing),
        cameras=cameras,
        timing=timing,
        new_prompts=new,
        undecided=list(_undecided(cameras, timing)),
    )


def _compare_camera(slot: str, training: ComparedSet, live: ComparedSet) -> Camera:
    camera = compare_camera(slot, training, live)
    if camera.live_picture is None:
        return camera
    delay, error = camera_delay(slot, training, live) or (None, None)
    still = still_share(slot, training, live)
    return dataclasses.replace(camera, still=still, delay=delay, delay_error=error)


def _undecided(cameras: Sequence[Camera], timing: Timing) -> Iterator[str]:
    if timing.live_rate is None:
        yield "The recording does not show how fast the robot executes its chunks."
    for one in cameras:
        if one.live_picture is None:
            continue
        if not one.shows_colour:
            yield f"The camera {one.name} shows too little colour to tell red from blue."
        if one.own_distance is None:
            yield (
                f"Whether the camera {one.name} shows something else than in training, where it "
                "has one episode only."
            )
        if one.still is None:
            yield (
                f"Whether the camera {one.name} stands still: the live set has too little motion, "
                "or the camera does not show it in training."
            )
        if one.delay is None:
            yield (
                f"Whether the camera {one.name} is late: it does not show the state in training, "
                "or the live set has too few frames, or too far apart."
            )
