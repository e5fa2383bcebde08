"""Several runs on one page: every run has its curve, and only what differs is listed."""

import dataclasses
import json
import shutil

import pytest

from piston.cli import main
from piston.report import comparison
from piston.report.page import write_comparison
from piston.report.training import read_run

from . import cases
from .test_page import Reader, _lines


@pytest.fixture(scope="module")
def runs(run, tmp_path_factory):
    """The run; a copy that learned faster, with other losses; and one that has only begun."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("slow", "fast", "begun"):
        shutil.copytree(run, folder / "preset" / name, ignore=shutil.ignore_patterns("[0-9]*"))
        path = folder / "preset" / name / "run.json"
        config = json.loads(path.read_text()) | {"exp_name": name}
        if name == "fast":
            config["lr_schedule"]["peak_lr"] = 0.125
        path.write_text(json.dumps(config))
    path = folder / "preset" / "fast" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "loss": 0.0123}) + "\n" for line in lines))
    (folder / "preset" / "begun" / "metrics.jsonl").unlink()
    cases.write_evaluation(folder / "preset" / "fast" / "eval")
    return [folder / "preset" / name for name in ("slow", "fast", "begun")]


def test_the_page(runs, capsys):
    assert main(["report", *map(str, runs)]) == 0
    page = runs[0].parent / "comparison.html"
    assert str(page) in capsys.readouterr().out
    reader = Reader(page.read_text())
    text = _lines(reader)
    parts = ["results", "curves", "validation-error-per-dimension", "different-settings"]
    assert reader.sections == parts
    assert "fast 4 0.0123" in text
    assert "2/3 = 67%" in text
    assert "begun – –" in text
    # Three curves of the two runs that have begun, and one per joint.
    drawn = [a["class"] for a in reader.all("path") if a["class"].startswith("line")]
    for look in ("run-0", "run-1"):
        assert drawn.count(f"line {look}") == 3 + len(cases.NAMES)
    assert "line run-2" not in drawn


def test_only_settings_that_differ_are_listed(runs):
    text = comparison.settings(comparison.named([read_run(path) for path in runs]))
    assert text.count("<tr>") == 2  # the header and one setting
    assert "lr_schedule.peak_lr" in text
    assert "0.125" in text
    one = comparison.settings(comparison.named([read_run(runs[0]), read_run(runs[2])]))
    assert "the same settings" in one


def test_names_are_as_short_as_they_can_be(runs, tmp_path):
    moved = tmp_path / "other" / "slow"
    shutil.copytree(runs[0], moved)
    assert list(comparison.named([read_run(path) for path in runs])) == ["slow", "fast", "begun"]
    names = list(comparison.named([read_run(runs[0]), read_run(moved)]))
    assert names[0].endswith("preset/slow")
    assert names[1].endswith("other/slow")


def test_more_runs_than_colours(runs, tmp_path):
    found = read_run(runs[0])
    many = [dataclasses.replace(found, folder=tmp_path / str(number)) for number in range(9)]
    with pytest.raises(ValueError, match="at most 8"):
        comparison.named(many)


def test_runs_without_any_measurement(runs, tmp_path):
    reader = Reader(write_comparison(runs[2:], tmp_path / "page.html").read_text())
    assert reader.sections == ["results", "different-settings"]
    assert "Curves left out: no run has logged a loss yet" in _lines(reader)
