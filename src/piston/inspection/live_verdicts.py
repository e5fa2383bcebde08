"""Conclusions from training against live: tables of rules, the most specific first.

Of each camera and each dimension of the state there is one verdict, that of the first rule that
applies: an offset may also lead out of the range, and a turned image is also a strange one.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

from piston.inspection.live import Comparison
from piston.inspection.live_numbers import (
    ASTRAY,
    ASTRAY_TIMES,
    OFFSET_EPISODES,
    OFFSET_SPREADS,
    RATE,
    RECORDED_RATE,
    SHIFT_EPISODES,
    SHIFT_SPREADS,
    Dimension,
    Timing,
)
from piston.inspection.live_pictures import ASPECT, BRIGHTNESS, NOTHING, Camera
from piston.inspection.results import Verdict, judge
from piston.rules import Rule, Severity

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
# The same of the distributions of colours.
COLOUR = 0.5
# Images this many times as far from training as those of other episodes are of another scene.
STRANGE = 2.0
# A camera that stands still in more of the moments with motion than this is frozen. Measured on
# cameras that work: up to 0.2, because each shows only a part of the motion.
STILL = 0.5
# A camera is late by so many seconds, and undoing it leaves less than this share of the error in
# the state that its images show. On the ALOHA cube task it is 0.71 for 0.1 s; 0.84 if not late.
LATE_CAMERA, LATE_ERROR = 0.05, 0.75
# Of the requests.
LATE = 0.05


def _explained(kind: str) -> Callable[[Camera], float | None]:
    """Return the number of a rule about one cause: what is left of the distance without it."""

    def number(camera: Camera) -> float | None:
        applies = camera.cause.kind == kind and camera.times_usual(camera.cause) < NEAR
        return camera.left_of_distance if applies else None

    return number


def _camera(
    kind: str,
    limit: float | Callable[[Camera], float],
    message: str,
    number: Callable[[Camera], float | None],
    meaning: str,
    compare: Callable[[float, float], Any] = operator.gt,
    severity: Severity = "problem",
) -> Rule[Camera]:
    message = f"camera {{of.name}} {message}"
    return Rule(kind, severity, limit, message, number, "{of.name}", meaning, compare)


_EXPLAINED_MEANING = (
    f"distance of images to training if this is undone, as a share of what it is, below "
    f"{EXPLAINED:g}; and it is less than {NEAR:g} times that between episodes of training"
)
_CAUSES = ("cameras-swapped", "camera-turned", "camera-zoomed", "red-blue-swapped")
CAMERA_RULES = (
    _camera(
        "camera-missing",
        1.0,
        "is not in the live set; training has it.",
        lambda camera: 0.0 if camera.live_size is None else None,
        "the live set does not have it",
        operator.lt,
    ),
    _camera(
        "camera-aspect",
        1 + ASPECT,
        "sends {of.sizes}: the aspect differs, so that the model sees other borders or another "
        "part.",
        lambda camera: camera.aspect_factor,
        f"factor between width over height live and in training, up or down, above {1 + ASPECT:g}",
    ),
    *(
        _camera(
            kind,
            EXPLAINED,
            "{of.cause.text}: undoing this makes the distance of its images to those of training "
            "{number:.2f} of what it is.",
            _explained(kind),
            _EXPLAINED_MEANING,
            operator.lt,
        )
        for kind in _CAUSES
    ),
    _camera(
        "red-blue-swapped",
        COLOUR,
        "has red and blue swapped: with both exchanged, the distance of its colours to those of "
        "training is {number:.2f} of what it is.",
        lambda camera: camera.left_of_colours,
        "distance of the distribution of colours to that of training with red and blue exchanged, "
        f"as a share of what it is, below {COLOUR:g}",
        operator.lt,
    ),
    _camera(
        "camera-brightness",
        lambda camera: camera.brightness_limit,
        "has {of.brightness:.2f} times the brightness and {of.contrast:.2f} times "
        "the contrast of training.",
        lambda camera: camera.light,
        f"factor of brightness or contrast, up or down, above {BRIGHTNESS:g} (more if episodes of "
        "training differ much)",
    ),
    _camera(
        "camera-strange",
        STRANGE,
        "shows something else than in training: its images are {number:.1f} times "
        "as far from those of training as these are from one another.",
        lambda camera: camera.times_usual(NOTHING),
        f"distance of images to training, divided by that between episodes of training, above "
        f"{STRANGE:g}",
        severity="remark",
    ),
    _camera(
        "camera-frozen",
        STILL,
        "shows the same image in {number:.0%} of the moments between which the robot moved.",
        lambda camera: camera.still,
        f"share of the moments with motion in which the image stands still, above {STILL:g}",
    ),
    _camera(
        "camera-late",
        LATE_CAMERA,
        "is {number:.2f} s late: its images fit the state of that time before, "
        "with {of.delay_error:.2f} of the error that they have now.",
        lambda camera: camera.delay if (camera.delay_error or 1) < LATE_ERROR else None,
        f"seconds that it is late, at least {LATE_CAMERA:g}; and the share of the error that is "
        f"left if this is undone, below {LATE_ERROR:g}",
        operator.ge,
    ),
)
SIZE_RULE = _camera(
    "camera-size",
    1.0,
    "sends {of.sizes}.",
    lambda camera: camera.size_factor,
    "other number of pixels",
    operator.ne,
    "remark",
)

STATE_RULES: tuple[Rule[Dimension], ...] = (
    Rule(
        "state-offset",
        "problem",
        lambda state: state.offset_limit or math.inf,
        "{of.title} is {of.offset:+.3g} away from its targets, compared with training: its zero "
        "offset or calibration differs. Seen in the state less the target before it.",
        lambda state: abs(state.offset) if state.offset is not None else None,
        "{of.name}",
        f"state less its target before, compared with training, above {OFFSET_SPREADS:g} standard "
        f"deviations of it and {OFFSET_EPISODES:g} of episodes' medians",
    ),
    Rule(
        "state-not-following",
        "problem",
        lambda state: state.astray_limit or math.inf,
        "{of.title} does not follow its targets as in training: the difference varies by "
        "{number:.2g} standard deviations of the state. Its sign or its place in the state "
        "differs, it is late, or something blocks the robot.",
        lambda state: state.astray,
        "{of.name}",
        "standard deviation of state less target, divided by that of the state, above "
        f"{ASTRAY:g} and {ASTRAY_TIMES:g} times that of training",
    ),
    Rule(
        "state-outside-range",
        "problem",
        OUTSIDE,
        "{of.title} is outside the training range in {number:.0%} of the frames: it goes from "
        "{of.live_range[0]:.3g} to {of.live_range[1]:.3g}, in training from "
        "{of.training_range[0]:.3g} to {of.training_range[1]:.3g}.",
        lambda state: state.outside,
        "{of.name}",
        f"share of the frames outside the training range, above {OUTSIDE:g}",
    ),
    Rule(
        "gripper-range",
        "problem",
        UNREACHED,
        "{of.title} never goes beyond {of.nearest_end:.3g}; every episode of training comes "
        "further, by {number:.0%} of its range.",
        lambda state: max(state.unreached) if "gripper" in state.name else None,
        "{of.name}",
        "share of its range by which a gripper stays from where every training episode comes, "
        f"above {UNREACHED:g}",
    ),
    Rule(
        "state-shifted",
        "remark",
        lambda state: state.shift_limit,
        "{of.title} is on average {of.shift:+.2g} standard deviations away from training, inside "
        "its range: the robot works in other poses than in training.",
        lambda state: abs(state.shift),
        "{of.name}",
        f"difference of the means, above {SHIFT_SPREADS:g} standard deviation of the state and "
        f"{SHIFT_EPISODES:g} of episodes' means",
    ),
)

TIMING_RULES: tuple[Rule[Timing], ...] = (
    Rule(
        "rate",
        "problem",
        lambda timing: timing.rate_limit,
        "The robot makes {of.live_rate:.3g} control steps per second, in training "
        "{of.training_rate:.3g}: it moves at {of.speed:.2f} times the speed.",
        lambda timing: None if timing.speed is None else abs(timing.speed - 1),
        "control rate",
        f"relative difference of control steps per second, above {RATE:g}; in a recording, where "
        f"times are those of requests, {RECORDED_RATE:g}",
    ),
    Rule(
        "late-requests",
        "problem",
        LATE,
        "{number:.0%} of the requests came after the chunk before had ended: the robot waits, or "
        "repeats its last action.",
        lambda timing: timing.late_requests,
        "requests",
        f"share of the requests that came after the end of the chunk before, above {LATE:g}",
    ),
)
# Of a sentence and its share of the frames.
PROMPT_RULE: Rule[tuple[str, float]] = Rule(
    "new-prompt",
    "remark",
    0.0,
    "The sentence “{of[0]}” of {number:.0%} of the frames is not in the training data.",
    lambda prompt: prompt[1],
    "{of[0]}",
    "a sentence that training does not have",
)
LIVE_RULES = (*CAMERA_RULES, SIZE_RULE, *STATE_RULES, *TIMING_RULES, PROMPT_RULE)


def live_verdicts(comparison: Comparison) -> list[Verdict]:
    """Return cameras first: a policy that does not see well also moves the robot elsewhere."""
    found: list[Verdict] = []
    for camera in comparison.cameras:
        found += itertools.islice(judge(CAMERA_RULES, camera), 1)
        found += judge([SIZE_RULE], camera)
    found += judge(TIMING_RULES, comparison.timing)
    for state in comparison.dimensions:
        found += itertools.islice(judge(STATE_RULES, state), 1)
    for prompt in comparison.new_prompts.items():
        found += judge([PROMPT_RULE], prompt)
    return found
