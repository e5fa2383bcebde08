"""The sections of the page say what the results hold, and are HTML that a browser can read."""

import html.parser
import re

import numpy as np
import pytest

from piston.inspection.frames import Frames, camera_names
from piston.inspection.inside import Inside, WrittenToken, inside
from piston.inspection.open_loop import open_loop
from piston.inspection.probe import Intervention, Probe
from piston.report.inspection_inside import inside_section, overlay
from piston.report.inspection_open_loop import open_loop_section

from . import untrained
from .untrained import BASE_SLOT, JOINTS

LONE = {"img", "meta", "link", "path"}


class Nesting(html.parser.HTMLParser):
    """Fails where tags are not closed in order, or a paragraph holds a block."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, name, _attributes):
        if "p" in self.open:
            assert name in {"b", "code", "span", "a"}, f"<{name}> ends the paragraph around it"
        if name not in LONE:
            self.open.append(name)

    def handle_startendtag(self, *_):
        pass

    def handle_endtag(self, name):
        assert self.open.pop() == name


def checked(markup):
    parser = Nesting()
    parser.feed(markup)
    assert not parser.open
    assert not re.search(r"\bnan\b", markup), "a number that is none was written out"
    return markup


@pytest.fixture(scope="module")
def probe():
    return Probe(untrained.policy("pi0"), range(2))


@pytest.fixture(scope="module")
def frames(probe, tmp_path_factory):
    folder = untrained.record(tmp_path_factory.mktemp("sections") / "data")
    return Frames.open(probe.policy, folder)


def test_open_loop_shows_every_dimension_and_the_worst_moments(probe, frames):
    results = [open_loop(probe, frames, episode) for episode in (0, 1)]
    shown = checked(open_loop_section(results, camera_names(probe.policy)))
    assert all(f"<span>{name}</span>" in shown for name in JOINTS)
    worst = max((one for result in results for one in result.worst), key=lambda one: one.error_std)
    first = shown.index("The worst moments")
    title = f"Episode {worst.episode}, frame {worst.frame}"
    assert re.search(r"Episode \d, frame \d", shown[first:]).group() == title
    assert f"{worst.error_std:.2g} std" in shown[first:]
    # The gripper never moves: its errors have no unit.
    row = shown[shown.index("<td>gripper") :].partition("</tr>")[0]
    assert row.count("<td>–</td>") == 4


def test_an_episode_shorter_than_a_chunk_in_which_nothing_moves_can_be_shown(probe, tmp_path):
    state = np.zeros((2, 3), np.float32)
    frames = Frames.open(probe.policy, untrained.write(tmp_path / "data", [("go", state, state)]))
    shown = checked(open_loop_section([open_loop(probe, frames, 0)], {}))
    assert "The worst moments" not in shown


def test_the_inside_shows_layers_words_and_what_it_is_not(probe, frames):
    result = inside(probe, frames[0, 3])
    shown = checked(inside_section(result, JOINTS, camera_names(probe.policy)))
    assert "not an answer to what matters" in re.sub(r"\s+", " ", shown)
    assert shown.count("layer 1</figcaption>") == len(result.attention.images) == 2
    for word in ("open", "the", "drawer"):
        assert f"<div>{word}<span" in shown


def test_the_patch_with_most_attention_is_orange():
    pixels = np.full((8, 8, 3), 100, np.uint8)
    found = overlay(pixels, np.array([[0.0, 0.4], [0.1, 0.0]]))
    red_minus_blue = found[..., 0].astype(int) - found[..., 2]
    assert (red_minus_blue[:4, 4:] > 100).all()
    assert (red_minus_blue[:4, :4] == 0).all()
    assert (found[:4, :4] == 100).all()
    assert 0 < red_minus_blue[4, 0] < red_minus_blue[0, 4]


def test_written_tokens_are_shown_as_text():
    token = WrittenToken("<eos>", 0.6, (("<eos>", 0.6), ("code 7", 0.25)))
    result = Inside(3, 5, {}, written=(token,) * 50)
    shown = checked(inside_section(result, JOINTS, {}))
    assert "&lt;eos&gt;" in shown
    assert "code 7&#39; 25 %" in shown
    assert "10 more tokens" in shown


def test_a_camera_that_is_off_is_not_shown(probe, frames):
    result = inside(probe, frames[0, 1], Intervention(off=(BASE_SLOT,)))
    assert inside_section(result, JOINTS, {}).count("layer 1</figcaption>") == 1
