"""The documented limits of all conclusions are those of the code, and no kind is left out."""

import importlib
import re
from pathlib import Path

import pytest

from piston.inspection import live, live_numbers, live_pictures, verdicts

open_loop = importlib.import_module("piston.inspection.open_loop")  # a function has its name
ROOT = Path(__file__).parents[2]
IGNORED = (verdicts.IGNORED_IN_SPREADS, verdicts.IGNORED_IN_DEVIATIONS)
LIMITS = {
    "camera-ignored": IGNORED,
    "state-ignored": IGNORED,
    "state-error-carried": (verdicts.CARRIED,),
    "undecided": (verdicts.UNDECIDED,),
    "open-loop-error": (open_loop.NOTABLE_ERROR, open_loop.LARGE_ERROR),
    "no-better-than-standing": (open_loop.SHARE_OF_STANDING,),
    "error-grows": (open_loop.GROWTH,),
    "seam-jump": (open_loop.LARGE_JUMP,),
    "cameras-swapped": (live.EXPLAINED, live.NEAR),
    "red-blue-swapped": (live.COLOUR,),
    "camera-brightness": (live_pictures._BRIGHTNESS,),
    "camera-strange": (live.STRANGE,),
    "camera-frozen": (live.STILL,),
    "camera-late": (live.LATE_CAMERA, live.LATE_ERROR),
    "camera-aspect": (live.ASPECT,),
    "camera-size": (),
    "state-offset": (live_numbers._OFFSET_SPREADS, live_numbers._OFFSET_EPISODES),
    "state-not-following": (live_numbers._ASTRAY, live_numbers._ASTRAY_TIMES),
    "state-outside-range": (live.OUTSIDE,),
    "gripper-range": (live.UNREACHED,),
    "state-shifted": (live_numbers._SHIFT_SPREADS, live_numbers._SHIFT_EPISODES),
    "rate": (live_numbers.Timing.rate_limit, live_numbers._RATE),
    "late-requests": (live.LATE,),
}


def documented() -> list[tuple[list[str], tuple[float, ...]]]:
    """The kinds and limits of each row of the table."""
    text = (ROOT / "docs/inspect.md").read_text()
    table = text.split("| kind | severity |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split("|") for line in table.splitlines()[2:]]
    return [
        (re.findall("`(.+?)`", row[0]), tuple(map(float, re.findall(r"[\d.]+", "".join(row[3:])))))
        for row in rows
    ]


def test_limits_are_documented_as_they_are():
    assert {kinds[0]: limits for kinds, limits in documented()} == {
        kind: pytest.approx(limits) for kind, limits in LIMITS.items()
    }


def test_every_kind_is_documented():
    sources = [Path(module.__file__).read_text() for module in (verdicts, open_loop, live)]
    kinds = {kind for text in sources for kind in re.findall(r'"([a-z]+(?:-[a-z]+)+)"', text)}
    assert kinds | {"rate", "undecided"} == {kind for row, _ in documented() for kind in row}
