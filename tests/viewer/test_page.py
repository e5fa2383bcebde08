"""The interactive page in a real browser."""

import fnmatch
import time
import tomllib
from pathlib import Path

import pytest
from tests.report.browser import CHROMIUM, Browser, wait_until

import piston

from .page_cases import NUM_FRAMES, TASKS, TOP, WRIST, act, fetch, make_frames, make_policy, serving

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium"
)
SOURCE = Path(piston.__file__).parent
# Adds up how far things move without being asked to.
WATCH = """
window.jumps = 0;
new PerformanceObserver(list => list.getEntries().forEach(one => window.jumps += one.value))
    .observe({type: "layout-shift", buffered: true});
"""
OVERVIEW = "<!doctype html><title>overview</title><h1>What was found</h1>" + "<p>text</p> " * 99
OVERVIEW += "<style>@media (max-width: 600px) { p { line-height: 9 } }</style>"


def test_every_file_of_the_page_is_in_the_package():
    pyproject = SOURCE.parent.parent / "pyproject.toml"
    patterns = tomllib.loads(pyproject.read_text())["tool"]["setuptools"]["package-data"]["piston"]
    files = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.*") if path.is_file()]
    # tsconfig.json is for those who change the page.
    data = {name for name in files if not name.endswith((".py", ".pyc", "tsconfig.json"))}
    assert {"viewer/templates/inspector.html", "viewer/static/main.js"} <= data
    packed = {name for name in data if any(fnmatch.fnmatch(name, one) for one in patterns)}
    assert packed == data


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    policy = make_policy()
    frames = make_frames(policy, tmp_path_factory.mktemp("page") / "data")
    with serving(policy, frames, OVERVIEW) as port:
        yield port


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture
def page(browser, port):
    """The page as it is opened, with nothing changed."""
    browser.resize(1200, 900)
    return opened(browser, port)


def opened(page, port, link=""):
    # Browsers slow down the timers of pages in the background.
    page.call("Page.bringToFront")
    page.open("about:blank")
    page.open(f"http://127.0.0.1:{port}/{link}")
    # The recorded curves and the predicted ones.
    drawn = "document.querySelector('.ink[d*=L]') && document.querySelector('.second[d*=L]') && 1"
    wait_until(lambda: page.evaluate(drawn))
    page.evaluate(WATCH)
    return page


def text(page, element):
    return page.evaluate(f"document.getElementById({element!r}).textContent")


def click(page, selector):
    page.evaluate(f"document.querySelector({selector!r}).click()")


def effect(page):
    """The numbers of the sentence, once there is an effect: in deviations and in spreads."""

    # The text is read once: when the effect is computed again, it changes at any moment.
    def words_of_effect():
        # Read once per try: while the effect is computed again, the page shows another text.
        shown = text(page, "effect")
        return shown.split() if "moves the actions" in shown else None

    words = wait_until(words_of_effect)
    return [float(words[words.index(word) + 1]) for word in ("by", "deviation,")]


def expected(port, change, **place):
    """What a script gets for the same change."""
    found = act(port, change, "script", **{"frame": 0} | place)[2]["effect"]
    return pytest.approx([found["strength"], found["in_spreads"]], rel=1e-2)


def link(page):
    time.sleep(0.4)  # it follows after a moment
    return page.evaluate("location.hash")


@needs_browser
def test_it_shows_cameras_sentence_state_and_chunk(page):
    loaded = "[...document.images].every(image => image.naturalWidth == 32)"
    wait_until(lambda: page.evaluate(loaded))
    assert page.evaluate("document.images.length") == 2
    assert page.evaluate("document.getElementById('prompt').value") == TASKS[0]
    assert page.evaluate("document.querySelectorAll('#states input').length") == 14
    # Recorded and predicted.
    assert page.evaluate("document.querySelectorAll('#plots path.line').length") == 28
    assert text(page, "effect").startswith("Nothing is changed")
    assert text(page, "title") == "a tiny policy"
    assert page.evaluate("jumps") < 0.05


@needs_browser
def test_scrubbing_with_keys_and_slider(page):
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown"):
        page.press(key)
    assert text(page, "moment") == f"frame 1 of {NUM_FRAMES - 1}, 0.10 s"
    wait_until(lambda: page.evaluate("document.getElementById('prompt').value") == TASKS[1])
    page.evaluate("frame = document.getElementById('frame')")
    page.evaluate("frame.value = 20; frame.dispatchEvent(new Event('input'))")
    shown = "[...document.images].every(one => one.complete && one.src.includes('/1/20/{}'))"
    wait_until(lambda: page.evaluate(shown.format("")))
    # Of the last frames, only what was recorded is drawn.
    page.press("End")
    dots = "[...document.querySelectorAll('path.ink')].every(one => one.getTotalLength() == 0)"
    wait_until(lambda: page.evaluate(dots))
    page.press("Home")
    page.press(" ", " ")
    wait_until(lambda: int(text(page, "moment").split()[1]) >= 3)
    assert text(page, "play") == "Pause"
    page.press(" ", " ")
    assert text(page, "play") == "Play"
    assert page.evaluate("jumps") < 0.05


@needs_browser
def test_another_sentence(page, port):
    page.evaluate("document.getElementById('prompt').select()")
    page.call("Input.insertText", text="stop now")
    assert effect(page) == expected(port, {"prompt": "stop now"})
    # Arrows belong to the text while one writes.
    page.press("ArrowLeft")
    assert text(page, "moment").startswith("frame 0 ")
    click(page, "#reset-prompt")
    wait_until(lambda: text(page, "effect").startswith("Nothing is changed"))
    assert page.evaluate("document.getElementById('prompt').value") == TASKS[0]


@needs_browser
def test_covering_by_mouse_and_keys(page, port):
    page.drag(".screen", (0.25, 0.25), (0.75, 0.5))
    box = {"type": "inspection_box", "camera": TOP, "left": 0.25, "top": 0.25}
    covered = {**box, "right": 0.75, "bottom": 0.5}
    found = effect(page)
    assert found == expected(port, {"covered": [covered]})
    page.evaluate("document.querySelector('.box').focus()")
    page.press("ArrowDown")
    wait_until(lambda: effect(page) != found)
    moved = {**covered, "top": 0.3, "bottom": 0.55}
    assert effect(page) == expected(port, {"covered": [moved]})
    assert "covered=base_0_rgb%2C0.25%2C0.3%2C0.75%2C0.55" in link(page)
    page.drag(".box", (0.5, 0.5), (0.5, 0.5))
    assert page.evaluate("document.querySelectorAll('.box').length") == 0
    click(page, "button[aria-label='cam_left_wrist: cover a region of']")
    assert page.evaluate("document.activeElement.className") == "box"
    page.press("Escape")
    assert page.evaluate("document.querySelectorAll('.box').length") == 0


@needs_browser
def test_a_camera_that_is_off_or_black(page, port):
    click(page, "button[aria-label='cam_left_wrist: off']")
    found = effect(page)
    assert found == expected(port, {"off": [WRIST]})
    click(page, "button[aria-label='cam_left_wrist: off']")
    click(page, "button[aria-label='cam_left_wrist: black']")
    black = expected(port, {"black": [WRIST]})
    wait_until(lambda: "moves" in text(page, "effect") and effect(page) == black)


@needs_browser
def test_a_map_belongs_to_its_moment(page):
    cells = "document.querySelectorAll('.map rect').length"
    click(page, "button[aria-label='cam_high: map of what matters']")
    wait_until(lambda: page.evaluate(cells) >= 64)
    page.press("ArrowRight")
    assert page.evaluate(cells) == 0
    assert page.evaluate("document.querySelectorAll('.map-button[aria-pressed=true]').length") == 0


@needs_browser
def test_a_link_holds_the_view(page, port):
    page.press("ArrowRight")
    page.drag(".screen", (0.1, 0.1), (0.4, 0.6))
    click(page, "button[aria-label='cam_left_wrist: off']")
    page.evaluate("document.getElementById('prompt').select()")
    page.call("Input.insertText", text="a, b & c = #1")
    page.evaluate("slider = document.getElementById('state-3')")
    page.evaluate("slider.value = 20; slider.dispatchEvent(new Event('input'))")
    click(page, "#bars button:nth-of-type(2)")
    address = link(page)
    state = fetch(port, "/api/about")[2]["states"][3]
    box = {"type": "inspection_box", "camera": TOP, "left": 0.1, "top": 0.1}
    change = {
        "prompt": "a, b & c = #1",
        "off": [WRIST],
        "covered": [{**box, "right": 0.4, "bottom": 0.6}],
        "state": {state["name"]: round(state["std"], 4)},  # the slider has 20 steps in one
    }
    wanted = expected(port, change, frame=1)
    wait_until(lambda: effect(page) == wanted)
    # Another page, and the same one opened anew.
    for other in (page.another(), page):
        opened(other, port, address)
        wait_until(lambda other=other: effect(other) == wanted)
        assert text(other, "moment").startswith("frame 1 ")
        assert other.evaluate("document.getElementById('prompt').value") == "a, b & c = #1"
        assert other.evaluate("document.querySelectorAll('.box').length") == 1
        shown = "document.querySelectorAll('#plots figure:not([hidden])').length"
        assert other.evaluate(shown) == 1
        assert other.evaluate("document.getElementById('state-3').value") == "20"
        assert link(other) == address
    # What does not fit is left out.
    opened(page, port, "#episode=9&frame=15&off=rear&covered=base_0_rgb,1,0,0,1&state=knee,1")
    assert text(page, "moment").startswith("frame 15 ")
    wait_until(lambda: text(page, "effect").startswith("Nothing is changed"))


@needs_browser
def test_the_overview_is_in_the_page(page):
    click(page, "#tab-overview")
    height = "document.querySelector('iframe')?.getBoundingClientRect().height"
    wait_until(lambda: (page.evaluate(height) or 0) > 2000)
    inner = "document.querySelector('iframe').contentDocument.querySelector('h1').textContent"
    assert page.evaluate(inner) == "What was found"
    # It is as high as its content at any width.
    wide = page.evaluate(height)
    page.resize(400, 900)
    wait_until(lambda: page.evaluate(height) > 2 * wide)
    page.resize(1200, 900)
    wait_until(lambda: page.evaluate(height) == wide)
    assert link(page).startswith("#tab=overview")


@needs_browser
def test_three_pages_at_once(page, port):
    pages = [page, page.another(), page.another()]
    for number, one in enumerate(pages):
        opened(one, port, f"#frame={number}")
    changes = ({"off": [TOP]}, {"black": [WRIST]}, {"off": [WRIST]})
    for _ in range(3):
        click(pages[0], "button[aria-label='cam_high: off']")
        click(pages[1], "button[aria-label='cam_left_wrist: black']")
        click(pages[2], "button[aria-label='cam_left_wrist: off']")
    for number, (one, change) in enumerate(zip(pages, changes)):
        assert effect(one) == expected(port, change, frame=number)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_colour_schemes(page, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.call("Emulation.setEmulatedMedia", features=[feature])
    page.resize(400, 800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour[4:-1].split(","))) < 150) == (scheme == "dark")


@needs_browser
def test_nothing_went_wrong_and_nothing_was_fetched_from_elsewhere(browser, port):
    """After all of the above."""
    names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert browser.told(*names) == []
    requests = [one["request"]["url"] for one in browser.told("Network.requestWillBeSent")]
    own = (f"http://127.0.0.1:{port}/", "data:", "about:")
    assert requests
    assert all(url.startswith(own) for url in requests)


@needs_browser
def test_errors_of_the_server_are_shown(page):
    assert page.evaluate("document.getElementById('error').hidden")
    page.evaluate("field = document.getElementById('prompt'); field.value = 'x'.repeat(300000)")
    page.evaluate("field.dispatchEvent(new Event('input'))")
    wait_until(lambda: "longer than 262144 bytes" in text(page, "error"))
    page.evaluate("field.value = 'go'; field.dispatchEvent(new Event('input'))")
    wait_until(lambda: page.evaluate("document.getElementById('error').hidden"))
