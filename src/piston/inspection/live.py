"""Training against live: what a robot sends now, held against what the policy was trained on.

    training = Frames.open(policy, "data/my_set")
    live = Frames.open(policy, "recording", needs_cameras=False)
    comparison = compare(policy, training, live)
    for verdict in verdicts(comparison): print(verdict.sentence)

The live set is a recording of the server or another data set of the robot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from piston.inference.policy import Policy
from piston.inspection.frames import Frames, camera_names
from piston.inspection.live_motion import StateFromPictures, still_share
from piston.inspection.live_numbers import Dimension, Numbers, Timing, compare_states
from piston.inspection.live_pictures import AS_IT_IS, BRIGHTNESS, Camera, Sample, compare_cameras
from piston.inspection.results import Verdict
from piston.progress import Progress, no_progress

# Pictures that are read of each set.
TRAINING_PICTURES, LIVE_PICTURES = 256, 96

# More of the frames than this beyond the (widened) training range; one episode of 20 may be odd.
OUTSIDE = 0.05
# A gripper that stays this share of its range from where every training episode comes.
UNREACHED = 0.1
# Undoing the true cause divides the distance to training by 2 to 8 on the ALOHA cube task; undoing
# another one, or one that is not there, leaves it as it is or makes it larger.
EXPLAINED = 0.7
# Then they are not further from those of training than so many times the distance between episodes
# of training. A camera that was pushed is up to 2.4 times as far with a zoom that is not there.
NEAR = 2.0
# The same of the distributions of colours, which have to differ by so many levels of 256.
COLOUR, COLOUR_LEVELS = 0.5, 0.1
# Pictures this many times as far from training as those of other episodes are of another scene.
STRANGE = 2.0
# A camera that stands still in more of the moments with motion than this is frozen. Measured on
# cameras that work: up to 0.2, because each shows only a part of the motion.
STILL = 0.5
# A camera is late by so many seconds, and undoing it leaves less than this share of the error in
# the state that its pictures show. On the ALOHA cube task it is 0.71 for 0.1 s; 0.84 if not late.
LATE_CAMERA, LATE_ERROR = 0.05, 0.75
# Pictures of training that are equal, as those of a covered camera, count as so many levels apart.
LEAST_DISTANCE = 1.0
# Sizes that are rounded differently are equal; a stretched image is not.
ASPECT = 0.02
# Of the requests.
LATE = 0.05


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


class Measured:
    """What is compared of one set: all its numbers, and some pictures."""

    def __init__(
        self, policy: Policy, frames: Frames, num_pictures: int, progress: Progress = no_progress
    ) -> None:
        self.frames = frames
        self.cameras = camera_names(policy)
        self.numbers = Numbers(policy, frames)
        self.sample = Sample(policy, frames, num_pictures, progress)


def compare(
    policy: Policy, training: Frames, live: Frames, progress: Progress = no_progress
) -> Comparison:
    """Compare all numbers, and some pictures of each set."""
    total = TRAINING_PICTURES + LIVE_PICTURES

    ours = Measured(policy, training, TRAINING_PICTURES, lambda n, *_: progress(n, total))
    before = len(ours.sample.rows)
    theirs = Measured(policy, live, LIVE_PICTURES, lambda n, *_: progress(before + n, total))
    return compare_measured(ours, theirs)


def compare_measured(training: Measured, live: Measured) -> Comparison:
    ours, theirs = training.numbers, live.numbers
    if ours.names != theirs.names:
        raise ValueError(
            f"The state of {live.frames.source.metadata.root} is {', '.join(theirs.names)}; "
            f"expected {', '.join(ours.names)}, as in training."
        )
    new = {}
    if training.frames.pipeline.prompt_from_task:
        known = ours.prompts()
        new = {text: share for text, share in theirs.prompts().items() if text not in known}
    timing = theirs.timing(ours)
    cameras = compare_cameras(training.cameras, training.sample, live.sample)
    cameras = [_with_motion(camera, training, live) for camera in cameras]
    return Comparison(
        num_training_frames=len(ours.states),
        num_live_frames=len(theirs.states),
        dimensions=compare_states(ours, theirs, timing),
        cameras=cameras,
        timing=timing,
        new_prompts=new,
        undecided=list(_undecided(cameras, timing)),
    )


def _with_motion(camera: Camera, training: Measured, live: Measured) -> Camera:
    if camera.live_picture is None:
        return camera
    ours, theirs = (training.numbers, training.sample), (live.numbers, live.sample)
    delay = StateFromPictures(camera.slot, *ours).delay(*theirs)
    return dataclasses.replace(
        camera,
        still=still_share(camera.slot, ours, theirs),
        delay=delay and delay[0],
        delay_error=delay and delay[1],
    )


def _undecided(cameras: Sequence[Camera], timing: Timing) -> Iterator[str]:
    if timing.live_rate is None:
        yield "The recording does not show how fast the robot executes its chunks."
    for one in cameras:
        if one.live_picture is None:
            continue
        if abs(one.colour_distance - one.swapped_colour_distance) < COLOUR_LEVELS:
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


def verdicts(comparison: Comparison) -> list[Verdict]:
    """Return cameras first: a policy that does not see well also moves the robot elsewhere."""
    found: list[Verdict] = []
    for camera in comparison.cameras:
        found += _of_camera(camera)
    found += _of_timing(comparison.timing)
    for number, dimension in enumerate(comparison.dimensions):
        found += _of_dimension(number, dimension)
    return [*found, *_of_prompts(comparison)]


def _of_dimension(number: int, one: Dimension) -> Iterator[Verdict]:
    """Yield the most specific verdict: an offset may also lead out of the range."""
    name = f"state dimension {number} ({one.name})"
    if one.offset is not None and one.offset_limit and abs(one.offset) > one.offset_limit:
        yield Verdict(
            *("state-offset", one.name, "problem"),
            f"{name} is {one.offset:+.3g} away from its targets, compared with training: its zero "
            "or its calibration is another one. Seen in the state less the target before it.",
            *(abs(one.offset), one.offset_limit),
        )
    elif one.astray is not None and one.astray_limit and one.astray > one.astray_limit:
        yield Verdict(
            *("state-not-following", one.name, "problem"),
            f"{name} does not follow its targets as in training: the difference varies by "
            f"{one.astray:.2g} standard deviations of the state. Its sign or its place in the "
            "state is another one, it is late, or something blocks the robot.",
            *(one.astray, one.astray_limit),
        )
    elif one.outside > OUTSIDE:
        yield Verdict(
            *("state-outside-range", one.name, "problem"),
            f"{name} is outside the training range in {one.outside:.0%} of the frames: it goes "
            f"from {one.live_range[0]:.3g} to {one.live_range[1]:.3g}, in training from "
            f"{one.training_range[0]:.3g} to {one.training_range[1]:.3g}.",
            *(one.outside, OUTSIDE),
        )
    elif "gripper" in one.name and max(one.unreached) > UNREACHED:
        end, reached = max(zip(one.unreached, one.live_range))[1], max(one.unreached)
        yield Verdict(
            *("gripper-range", one.name, "problem"),
            f"{name} never goes beyond {end:.3g}; every episode of training comes further, by "
            f"{reached:.0%} of its range.",
            *(reached, UNREACHED),
        )
    elif abs(one.shift) > one.shift_limit:
        yield Verdict(
            *("state-shifted", one.name, "remark"),
            f"{name} is on average {one.shift:+.2g} standard deviations away from training, inside "
            "its range: the robot works in other poses than in training.",
            *(abs(one.shift), one.shift_limit),
        )


def _of_camera(one: Camera) -> Iterator[Verdict]:
    name = f"camera {one.name}"
    if one.live_size is None:
        yield Verdict(
            *("camera-missing", one.name, "problem"),
            f"{name} is not in the live set; training has it.",
            *(0.0, 1.0),
        )
        return
    ours, theirs = (width / height for height, width in (one.training_size, one.live_size))
    if max(theirs / ours, ours / theirs) > 1 + ASPECT:
        yield Verdict(
            *("camera-aspect", one.name, "problem"),
            f"{name} sends {_size(one.live_size)} pixels, in training {_size(one.training_size)}: "
            "the aspect is another one, so that the model sees other borders or another part.",
            *(max(theirs / ours, ours / theirs), 1 + ASPECT),
        )
        return
    as_it_is, best = one.distances[AS_IT_IS], one.distances[one.explanation]
    colour, swapped = one.colour_distance, one.swapped_colour_distance
    if one.explanation != BRIGHTNESS and _explains(one):
        yield Verdict(
            *(_kind(one.explanation), one.name, "problem"),
            f"{name} {_sentence(one)}: undoing this makes the distance of its pictures to those of "
            f"training {best / as_it_is:.2f} of what it is.",
            *(best / as_it_is, EXPLAINED),
        )
    elif swapped < COLOUR * colour and colour - swapped > COLOUR_LEVELS:
        yield Verdict(
            *("red-blue-swapped", one.name, "problem"),
            f"{name} has red and blue swapped: with both exchanged, the distance of its colours to "
            f"those of training is {swapped / colour:.2f} of what it is.",
            *(swapped / colour, COLOUR),
        )
    elif one.light > one.brightness_limit:
        yield Verdict(
            *("camera-brightness", one.name, "problem"),
            f"{name} {_brightness(one)}.",
            *(one.light, one.brightness_limit),
        )
    elif (ratio := _times_usual(one, as_it_is)) > STRANGE:
        yield Verdict(
            *("camera-strange", one.name, "remark"),
            f"{name} shows something else than in training: its pictures are {ratio:.1f} times as "
            "far from those of training as these are from one another.",
            *(ratio, STRANGE),
        )
    else:
        yield from _of_motion(one)
    if one.live_size != one.training_size:
        yield Verdict(
            *("camera-size", one.name, "remark"),
            f"{name} sends {_size(one.live_size)} pixels, in training {_size(one.training_size)}.",
            *(one.live_size[0] / one.training_size[0], 1.0),
        )


def _of_motion(one: Camera) -> Iterator[Verdict]:
    """Yield what only pictures that are as in training can tell."""
    if one.still is not None and one.still > STILL:
        yield Verdict(
            *("camera-frozen", one.name, "problem"),
            f"camera {one.name} shows the same picture in {one.still:.0%} of the moments between "
            "which the robot moved.",
            *(one.still, STILL),
        )
    elif (one.delay or 0) >= LATE_CAMERA and (one.delay_error or 1) < LATE_ERROR:
        yield Verdict(
            *("camera-late", one.name, "problem"),
            f"camera {one.name} is {one.delay:.2f} s late: its pictures fit the state of that time "
            f"before, with {one.delay_error:.2f} of the error that they have now.",
            *(one.delay or 0.0, LATE_CAMERA),
        )


def _explains(one: Camera) -> bool:
    """Whether undoing the explanation brings the pictures to those of training."""
    best = one.distances[one.explanation]
    return best < EXPLAINED * one.distances[AS_IT_IS] and _times_usual(one, best) < NEAR


def _times_usual(one: Camera, distance: float) -> float:
    """Return how many times the distance between episodes of training; 0 if that is not known."""
    return 0.0 if one.own_distance is None else distance / max(one.own_distance, LEAST_DISTANCE)


def _kind(explanation: str) -> str:
    if explanation.startswith("camera "):
        return "cameras-swapped"
    if explanation.startswith("zoomed"):
        return "camera-zoomed"
    return "red-blue-swapped" if explanation.startswith("red") else "camera-turned"


def _sentence(one: Camera) -> str:
    if one.explanation.startswith("camera "):
        return f"shows what {one.explanation} showed in training"
    if one.explanation.startswith("red"):
        return "has red and blue swapped"
    return f"is {one.explanation}"


def _brightness(one: Camera) -> str:
    return (
        f"has {one.brightness:.2f} times the brightness and {one.contrast:.2f} times the contrast "
        "of training"
    )


def _size(size: tuple[int, int]) -> str:
    return f"{size[1]} × {size[0]}"


def _of_timing(timing: Timing) -> Iterator[Verdict]:
    if timing.live_rate and abs(timing.live_rate / timing.training_rate - 1) > timing.rate_limit:
        ratio = timing.live_rate / timing.training_rate
        yield Verdict(
            *("rate", "control rate", "problem"),
            f"The robot makes {timing.live_rate:.3g} control steps per second, in training "
            f"{timing.training_rate:.3g}: it moves at {ratio:.2f} times the speed.",
            *(abs(ratio - 1), timing.rate_limit),
        )
    if timing.late_requests is not None and timing.late_requests > LATE:
        yield Verdict(
            *("late-requests", "requests", "problem"),
            f"{timing.late_requests:.0%} of the requests came after the chunk before had ended: "
            "the robot waits, or repeats its last action.",
            *(timing.late_requests, LATE),
        )


def _of_prompts(comparison: Comparison) -> Iterator[Verdict]:
    for prompt, share in comparison.new_prompts.items():
        yield Verdict(
            *("new-prompt", prompt, "remark"),
            f"The sentence “{prompt}” of {share:.0%} of the frames is not in the training data.",
            *(share, 0.0),
        )
