"""The page in a real browser: it renders, videos play, it fits, and nothing goes wrong."""

import shutil

import pytest

from piston.report.page import write_comparison

from .browser import CHROMIUM, Browser, wait_until

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium"
)
VIDEOS = "[...document.querySelectorAll('video')]"


@pytest.fixture(scope="module")
def browser(page):
    with Browser() as opened:
        opened.resize(1200, 900)
        opened.open(page)
        yield opened


def test_videos_play(browser):
    count = browser.evaluate(f"{VIDEOS}.length")
    assert count == 2
    wait_until(lambda: browser.evaluate(f"{VIDEOS}.every(video => video.readyState >= 2)"))
    browser.evaluate(f"{VIDEOS}.forEach(video => void video.play())")
    wait_until(lambda: browser.evaluate(f"{VIDEOS}.every(video => video.currentTime > 0.2)"))
    assert (
        browser.evaluate(f"{VIDEOS}.map(video => [video.videoWidth, video.videoHeight])")
        == [[64, 48]] * count
    )
    assert browser.evaluate(f"{VIDEOS}.map(video => video.error)") == [None] * count


def test_all_pictures_and_curves_are_drawn(browser):
    script = "[...document.images].filter(image => !(image.naturalWidth > 0)).length"
    # Those that are folded away load when they are unfolded.
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.evaluate("document.querySelectorAll('img').forEach(one => one.loading = 'eager')")
    wait_until(lambda: browser.evaluate(script) == 0)
    assert browser.evaluate("document.images.length") > 15
    lengths = browser.evaluate(
        "[...document.querySelectorAll('path.line')].map(path => path.getTotalLength())"
    )
    assert len(lengths) > 30
    assert min(lengths) > 20


@pytest.mark.parametrize("width", [1200, 420])
def test_nothing_sticks_out(browser, width):
    browser.resize(width, 900)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1200, 420])
def test_nothing_sticks_out_of_a_comparison(browser, page, run, tmp_path, width):
    other = tmp_path / "a-run-with-a-name-that-is-longer-than-others"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("[0-9]*"))
    browser.open(write_comparison([run, other], tmp_path / "page.html"))
    browser.resize(width, 900)
    assert browser.evaluate("document.querySelectorAll('path.line').length") > 30
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.open(page)


def test_numbers_on_axes_lie_within_their_plots(browser):
    browser.resize(1200, 900)
    outside = browser.evaluate("""
        [...document.querySelectorAll('svg text')].filter(text => {
            const inner = text.getBoundingClientRect();
            const outer = text.ownerSVGElement.getBoundingClientRect();
            return inner.left < outer.left - 1 || inner.right > outer.right + 1
                || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
        }).map(text => text.textContent)
    """)
    assert outside == []


def test_dark_as_the_reader_likes(browser):
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", features=[dark])
    colours = browser.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    background, ink = (sum(map(int, colour[4:-1].split(","))) for colour in colours)
    assert background < 150 < 500 < ink


def test_nothing_went_wrong_and_nothing_was_fetched(browser):
    """After all of the above."""
    spoken = browser.told("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert spoken == []
    requests = [one["request"]["url"] for one in browser.told("Network.requestWillBeSent")]
    assert requests
    assert all(url.startswith(("file:", "data:")) for url in requests)
