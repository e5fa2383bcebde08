"""Progress: a bar on a terminal, lines in a log, nothing where it is quick."""

import logging
import re
import sys

import pytest

from piston import progress
from piston.progress import BYTES, ProgressBar


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.usefixtures("terminal")
def test_a_bar_on_a_terminal_once_it_takes_long(capsys) -> None:
    with ProgressBar("[model]", BYTES, after=1) as bar:
        bar.show(1, 10)
        assert capsys.readouterr().err == ""
        bar._begun -= 10
        bar.show(2_000_000, 8_000_000, "vision.weight")
    shown = capsys.readouterr().err
    assert "[model]" in shown
    assert "2.0/8.0 MB" in shown
    assert "vision.weight" in shown


@pytest.mark.usefixtures("terminal")
def test_slow_work_has_its_bar_from_the_beginning(capsys) -> None:
    with ProgressBar("eval", "episodes", 50, after=0) as bar:
        bar._bar.refresh()
        shown = capsys.readouterr().err
        assert " 0/50" in shown
        assert "/100" not in shown  # rich's own total
        bar.advance(2, "1 succeeded")
        bar._bar.refresh()
        shown = capsys.readouterr().err
    assert " 2/50" in shown
    assert "episodes" in shown
    assert "1 succeeded" in shown


def test_a_log_gets_a_line_now_and_then(caplog, capsys) -> None:
    caplog.set_level(logging.INFO)
    with ProgressBar("eval", "episodes", 50, done=10, after=0) as bar:
        bar.advance(10)
        assert caplog.messages == []  # not half a minute yet
        bar._begun -= 60
        bar._logged -= 60
        bar.advance(5, "24 succeeded")
        bar.advance(1, "25 succeeded")
    # 15 episodes in a minute: 25 more take 100 seconds.
    assert caplog.messages == ["eval: 25 of 50 episodes, 0:01:40 left, 24 succeeded"]
    assert capsys.readouterr().err == ""


def test_a_log_tells_bytes_and_what_has_no_end(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_INTERVAL", 0.0)
    with ProgressBar("model", BYTES) as bar:
        bar.show(2_000_000)
        bar.show(4_000_000, 4_000_000)
    assert caplog.messages == ["model: 2.0 MB", "model: 4.0 MB of 4.0 MB, 0:00:00 left"]


@pytest.mark.usefixtures("terminal")
def test_bytes_of_unknown_number_on_a_terminal(capsys) -> None:
    with ProgressBar("model", BYTES, after=0) as bar:
        bar.show(2_000_000)
        bar._bar.refresh()
    shown = capsys.readouterr().err
    assert "2.0/? MB" in shown
    assert "100" not in shown


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_numbers_are_there_on_any_terminal(capsys, monkeypatch, width) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with ProgressBar("aloha_transfer_cube", "episodes", 50, after=0) as bar:
        bar.advance(12, "11 succeeded")
        bar._bar.refresh()
    *_, shown = [line for line in _plain(capsys.readouterr().err).split("\r") if line.strip()]
    assert "12/50 episodes" in shown
    assert len(shown.rstrip()) <= width
    assert ("11 succeeded" in shown) == (width >= 80)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("line", ["the line went dead", f"/tmp/{'long/' * 30}first_batch.png"])
def test_log_lines_stay_above_the_bar_and_paths_whole(capsys, line) -> None:
    root, handler = logging.getLogger(), logging.StreamHandler(sys.stderr)
    root.addHandler(handler)
    before = handler.stream
    try:
        with ProgressBar("model", "files", 50, after=0) as bar:
            bar.advance(1)
            bar._bar.refresh()
            logging.getLogger("piston").warning(line)
            bar._bar.refresh()
        assert handler.stream is before
    finally:
        root.removeHandler(handler)
    lines = [one.rpartition("\r")[2] for one in _plain(capsys.readouterr().err).split("\n")]
    assert line in [one.strip() for one in lines]


def _plain(text: str) -> str:
    """Without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
