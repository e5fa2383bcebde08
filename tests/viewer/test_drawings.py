"""The server draws what it answers: bars, plots and maps show the numbers beside them."""

import re

import numpy as np
import pytest

from piston.inspection.occlusion import OcclusionMap, overlay_map
from piston.inspection.probe import Box
from piston.viewer.drawings import draw_answer, draw_map, draw_moment

ABOUT = {
    "actions": [{"name": "left_waist", "std": 0.5}, {"name": "<gripper>", "std": 0.0}],
    "fps": 10.0,
    "seeds": 8,
}
MOMENT = {"recorded": [[0.0, 0.25], [1.0, 0.25]]}
FAN = {name: [[value, value]] * 3 for name, value in (("mean", 0.5), ("low", 0.0), ("high", 1.0))}
EFFECT = {"per_action": [0.125, 2.0], "strength": 0.3, "spread": [0.25, 0.0], "in_spreads": 1.5}


def test_a_change_has_a_sentence_bars_and_plots():
    drawn = draw_answer(ABOUT, MOMENT, {"base": FAN, "changed": FAN, "effect": EFFECT})
    assert "by 0.3 of their standard deviation, 1.5 times the spread over 8" in drawn["effect"]
    assert drawn["bars"] == [
        {"width": "25.0%", "text": "0.125 (0.5×)"},  # of a standard deviation; in spreads
        {"width": "0.0%", "text": "2"},  # an action that never moves has neither
    ]
    first, second = drawn["plots"]
    assert re.findall('class="((?:line|fan) [a-z]+)"', first) == [
        *("line ink", "fan second", "line second", "fan accent", "line accent")
    ]
    assert 'aria-label="left waist, ±0.125"' in first
    assert "&lt;gripper&gt;" in second


def test_before_the_answer_only_the_recording_is_drawn():
    for plot in draw_moment(ABOUT, MOMENT):
        assert re.findall('class="((?:line|fan) [a-z]+)"', plot) == ["line ink"]
    one = draw_answer({**ABOUT, "seeds": 1}, MOMENT, {"base": FAN, "changed": None, "effect": None})
    assert one["effect"].startswith("Nothing is changed")
    assert [bar["text"] for bar in one["bars"]] == ["", ""]


def test_maps_are_as_opaque_as_those_of_the_overview():
    values = np.array([0.0, 1.0, 4.0, 2.0])
    cells = [(0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5), (0, 0.5, 0.5, 1), (0.5, 0.5, 1, 1)]
    drawn = draw_map(cells, values.tolist())
    opacities = [float(text) for text in re.findall('opacity="([^"]*)"', drawn)]
    boxes = tuple(Box("top", *map(float, cell)) for cell in cells)
    found = OcclusionMap("top", (), (0, 1), boxes, values, values, 1)
    blue = overlay_map(np.full((8, 8, 3), 200, np.uint8), found)[..., 2] / 200
    size = len(blue) // 4
    for (left, top, *_), opacity in zip(cells, opacities):
        row, column = (int(place * len(blue)) + size for place in (top, left))
        assert 1 - blue[row, column] == pytest.approx(opacity, abs=0.01)
    assert "opacity" in draw_map(cells, [0.0] * 4)
