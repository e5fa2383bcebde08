"""Markup escapes, axes have round numbers, and no curve has holes it should not have."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piston.report.document import Card, page_text, plot, render
from piston.report.figures import (
    Line,
    duration,
    heat_map,
    is_wide,
    log_ticks,
    png,
    short,
    ticks,
)


@given(st.text(), st.text())
def test_text_and_attributes_come_back_as_they_were(text, attribute):
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            seen.append((tag, dict(attributes)))

        def handle_data(self, data):
            seen.append(data)

    reader = Reader(convert_charrefs=True)
    reader.feed(render("results.html", header=["loss"], rows=[(attribute, text, [])]))
    reader.close()
    begin = seen.index(("i", {"class": attribute})) + 1
    found = [part for part in seen[begin:] if isinstance(part, str)]
    assert "".join(found).startswith(text)


def test_markup_is_not_escaped_twice():
    section = render("verdicts.html", verdicts=[])
    page = page_text("a & b", "c < d", [Card("e", "<f>", "g")], {"Why": section})
    assert "<h1>a &amp; b</h1>" in page
    assert "<b>&lt;f&gt;</b>" in page
    assert section in page
    assert "&amp;amp;" not in page
    table = render("results.html", header=["<h>"], rows=[("x", "run", [1])])
    assert "<th>&lt;h&gt;</th>" in table
    assert "<td>1</td>" in table


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-6, 1e6),
    st.integers(2, 8),
)
def test_ticks_are_few_round_and_inside(low, span, count):
    found = ticks(low, low + span, count)
    assert len(found) <= 2.5 * count + 2
    # Numbers next to a large one are not closer together than this.
    slack = 1e-6 * span + np.spacing(abs(low))
    assert all(low - slack <= tick <= low + span + slack for tick in found)
    assert found == sorted(set(found))


def test_ticks_people_would_choose():
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(-0.3, 0.3, 3) == [-0.2, 0, 0.2]
    assert log_ticks(0.1, 2) == [0.1, 0.2, 0.5, 1, 2]
    assert log_ticks(1e-4, 10) == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1, 10])


def test_a_curve_is_lifted_where_a_number_is_missing():
    drawn = plot([Line(np.arange(4), np.array([1, 2, np.nan, 3]))])
    path = re.findall('d="([^"]*)" class="line', drawn)[0]
    assert re.sub(r"[\d. ]", "", path) == "MhLMh"
    assert "nan" not in drawn.lower()


def test_a_logarithmic_axis_leaves_out_what_has_no_logarithm():
    drawn = plot([Line(np.arange(3), np.array([0.0, 1.0, 100.0]))], log=True)
    assert "nan" not in drawn.lower()
    assert "inf" not in drawn.lower()


@pytest.mark.parametrize("value", [0.0, 5.0, -3e7])
@pytest.mark.parametrize("log", [False, True])
def test_a_constant_curve_and_a_single_point_can_be_drawn(value, log):
    for count in (1, 3):
        drawn = plot([Line(np.arange(count), np.full(count, value))], log=log, markers=True)
        assert "nan" not in drawn.lower()
        assert ("<svg" in drawn) == (value > 0 or not log)


def test_nothing_finite_is_said_and_not_drawn():
    drawn = plot([Line(np.arange(2), np.full(2, np.nan))])
    assert "<svg" not in drawn
    assert "No finite number" in drawn


def test_stillness_looks_still():
    """Small noise in a frame with a least span stays near the middle."""
    noise = np.array([1e-6, -1e-6, 1e-6])
    drawn = plot([Line(np.arange(3), noise)], height=150, min_span=1.0)
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawn.split("line accent")[0])]
    assert len({heights[-1], heights[-2], heights[-3]}) == 1


def test_a_single_point_is_a_dot_between_round_numbers():
    drawn = plot([Line(np.array([119.0]), np.array([0.5]))])
    assert re.search(r'd="M[\d.]+ [\d.]+h0" class="line accent"', drawn)
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert {"118", "119", "120"} <= set(labels)


def test_a_legend_only_where_there_is_a_choice():
    x = np.arange(2)
    assert "legend" not in plot([Line(x, x, name="one")])
    assert "legend" in plot([Line(x, x, name="one"), Line(x, x, "second", "two")])


def test_logarithmic_where_it_shows_more():
    assert is_wide(np.array([1.0, 0.01]))
    assert not is_wide(np.array([1.0, 0.5]))
    assert not is_wide(np.array([1.0, 0.0]))
    assert not is_wide(np.array([np.nan]))


def test_heat_maps_end_at_their_limit():
    pixels = heat_map(np.array([[-9.0, -2.0, 0.0, 2.0, 9.0]]), limit=2.0)
    assert pixels.shape == (1, 5, 3)
    assert (pixels[0, 0] == pixels[0, 1]).all()
    assert (pixels[0, 3] == pixels[0, 4]).all()
    assert pixels[0, 0, 2] > pixels[0, 0, 0]  # blue
    assert pixels[0, 4, 0] > pixels[0, 4, 2]  # orange
    assert png(pixels).startswith("data:image/png;base64,")


def test_amounts():
    assert [duration(s) for s in (0.44, 42, 119, 200, 9000)] == [
        "0.4 s", "42 s", "119 s", "3.3 min", "2.5 h",
    ]  # fmt: skip
    assert [short(n) for n in (12, 4_200, 1_291_374, 3.3e9)] == ["12", "4.2 k", "1.29 M", "3.3 B"]
