"""The page: every part is there, what is missing is named, nothing is fetched, nothing injected."""

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from piston.cli import main
from piston.report.page import write_report
from piston.report.training import read_run
from piston.robots.simple import FakeDataConfig
from piston.training.loop import train_loop

from . import cases

PARTS = [
    "success-per-seed",
    "videos",
    "training",
    "validation",
    "data-set",
    "chunks-and-what-was-executed",
    "why-it-does-that",
    "action-chunk",
    "denoising",
    "transforms",
    "timings",
    "how-it-was-started",
]


class Reader(HTMLParser):
    """Tags with their attributes, ids of sections, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data + "\n"

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def sections(self):
        return [attributes["id"] for attributes in self.all("section")]


@pytest.fixture(scope="module")
def whole(page) -> Reader:
    return Reader(page.read_text())


def test_every_part_is_there(whole):
    assert whole.sections == PARTS
    assert "left out" not in whole.text


def test_what_it_refers_to_is_within_it(whole):
    places = [
        value
        for _, attributes in whole.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "poster", "action")
    ]
    assert places
    assert all(place.startswith(("data:", "#")) for place in places)
    assert not whole.all("script")


def test_the_style_sheet_fetches_nothing(page):
    style = re.search("<style>(.*?)</style>", page.read_text(), re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_headline_numbers(whole, run):
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    assert "67%" in whole.text
    assert "2 of 3 episodes" in whole.text
    assert f"{last['loss']:.3g}" in whole.text
    assert "1.50 GB" in whole.text


def test_a_cell_for_every_seed_tells_how_it_ended(whole):
    cells = [a for a in whole.all("span") if "title" in a]
    assert [cell["class"] for cell in cells] == ["cell held", "cell lost", "cell failed"]
    assert cells[1]["title"] == "seed 1: success that did not last; 11 steps; “wave <both> arms”"


def test_videos_can_be_played(whole):
    videos = whole.all("video")
    assert len(videos) == 2
    assert all({"controls", "muted", "loop"} <= video.keys() for video in videos)
    assert all(video["src"].startswith("data:video/mp4;base64,") for video in videos)
    # In the order of the seeds' fates, each with what happened.
    captions = [line for line in whole.text.splitlines() if line.startswith("seed ")]
    assert captions[0].startswith("seed 2: failure")


def test_every_joint_and_every_transform_is_named(whole):
    for name in cases.NAMES:
        assert name.replace("_", " ") in whole.text
    chain = ("PromptFromItem", "RepackTransform", "SubsampleActions", "AlohaInputs")
    for name in (*chain, "Normalize", "TokenizePrompt", "Unnormalize", "InterpolateActions"):
        assert f"\n{name} \n" in whole.text
    assert "held out of training" in whole.text


def test_timings(whole):
    assert "3.3 min" in whole.text  # of the stage that took 200 s
    assert "train went well" in whole.text
    assert "20 ms" in whole.text  # the median of the evaluation's requests


def test_text_from_outside_is_never_markup(page):
    assert "<both>" not in page.read_text()


def test_a_run_that_has_only_begun(run, tmp_path):
    shutil.copy(run / "run.json", tmp_path)
    reader = Reader(write_report(tmp_path).read_text())
    assert reader.sections == ["data-set"]
    assert "Training left out: metrics.jsonl has 0 line(s)" in _lines(reader)
    assert "Validation left out: no validation is logged yet" in _lines(reader)
    assert "How it was started left out: the run was started by a version" in _lines(reader)
    absent = "Why it does that, Action chunk, Denoising, Transforms"
    assert f"{absent} left out: the run has no whole checkpoint yet" in _lines(reader)


def test_without_its_data_set_the_rest_is_shown(root, run, tmp_path):
    moved = _copy(run, tmp_path / "run", str(root / "data"), str(tmp_path / "gone"))
    reader = Reader(write_report(moved, evaluations=[root / "eval"]).read_text())
    assert reader.sections == [
        *("success-per-seed", "videos", "training", "validation"),
        *("chunks-and-what-was-executed", "timings", "how-it-was-started"),
    ]
    assert str(tmp_path / "gone") in reader.text


def test_sets_of_another_format_are_not_shown(run, tmp_path, monkeypatch):
    # As if the run's sets were of a format of one's own.
    monkeypatch.setattr("piston.report.dataset.LeRobotDataset", type("Another", (), {}))
    page = write_report(run, tmp_path / "report.html").read_text("utf-8")
    assert "the run has no LeRobot data set with actions; other formats are not shown." in page


def test_without_the_policy(run, tmp_path):
    reader = Reader(write_report(run, tmp_path / "page.html", use_policy=False).read_text())
    shown = ["training", "validation", "data-set", "transforms", "timings", "how-it-was-started"]
    assert reader.sections == shown
    assert "Leave out --no-policy" in reader.text


def test_random_samples(tmp_path):
    config = cases.config(tmp_path, data=FakeDataConfig(), validation_episodes=0)
    train_loop(dataclasses.replace(config, num_train_steps=2))
    reader = Reader(write_report(config.checkpoint_dir).read_text())
    assert reader.sections == ["training", "timings", "how-it-was-started"]
    absent = "Data set, Why it does that, Action chunk, Denoising, Transforms"
    assert f"{absent} left out: the run trained on random samples" in _lines(reader)
    assert "no episodes were held out of training" in reader.text


def test_evaluations_below_the_run_are_found(run, tmp_path):
    shutil.copy(run / "run.json", tmp_path)
    cases.write_evaluation(tmp_path / "eval")
    cases.write_evaluation(tmp_path / "opposite", "do the opposite")
    reader = Reader(write_report(tmp_path).read_text())
    evaluated = ["success-per-seed", "videos", "data-set", "chunks-and-what-was-executed"]
    assert reader.sections == [*evaluated, "timings"]
    assert "success, opposite" in reader.text


def test_the_verb(root, run, tmp_path, capsys):
    out = tmp_path / "deep" / "page.html"
    words = ["report", str(run), "--eval", str(root / "eval"), "--out", str(out), "--no-policy"]
    assert main(words) == 0
    assert str(out) in capsys.readouterr().out
    assert Reader(out.read_text()).sections[0] == "success-per-seed"


def test_advice_fits_the_robot(root, run, tmp_path):
    """A simulator is recommended only for data that was recorded in one."""
    text = Reader(write_report(run, tmp_path / "real.html", use_policy=False).read_text()).text
    assert f"piston serve {run / '3'}" in text
    assert "piston eval" not in text
    shutil.copytree(root / "data", tmp_path / "data")
    header = {"task": "aloha_insertion", "seed": 0, "pixels": 32}
    (tmp_path / "data" / "meta" / "simulation.jsonl").write_text(json.dumps(header) + "\n")
    simulated = _copy(run, tmp_path / "run", str(root / "data"), str(tmp_path / "data"))
    text = Reader(write_report(simulated, use_policy=False).read_text()).text
    assert f"piston eval aloha_insertion --policy {simulated / '3'} --video" in text
    assert "piston serve" not in text


def test_how_the_run_was_started(whole, run):
    started = json.loads((run / "history.jsonl").read_text())
    assert started["first_step"] == 0
    for key in ("command", "folder", "piston", "torch", "python", "machine"):
        assert started[key] in whole.text
    assert started["date"].replace("T", " ").replace("+00:00", " UTC") in whole.text
    assert "0 times resumed" not in whole.text


def test_every_plot_has_a_caption(page):
    """The first element of the outermost figure around it is a sentence or more."""
    document = ElementTree.fromstring(re.sub("<!doctype html>|&nbsp;", "", _well_formed(page)))
    figures = {
        id(svg): figure
        for section in document.iter("section")
        for figure in reversed([*section.iter("figure")])
        for svg in figure.iter("svg")
    }
    drawings = [*document.iter("svg")]
    assert len(drawings) > 40
    for svg in drawings:
        caption = figures[id(svg)][0]
        assert caption.tag == "figcaption"
        assert len("".join(caption.itertext()).split()) > 8


def test_validation_per_dimension(run, whole):
    errors = read_run(run).error_per_dim
    assert list(errors) == cases.NAMES
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "validation/loss" in line]
    for name, (steps, values) in errors.items():
        assert list(steps) == [line["step"] for line in logged] == [2, 3]
        logged_values = [line["validation/action_error_per_dim"][name] for line in logged]
        assert list(values) == logged_values
        assert f"{values[-1]:.2g}" in whole.text


def test_runs_of_the_first_version_list_their_errors(run, tmp_path):
    shutil.copy(run / "run.json", tmp_path)
    line = {"step": 9, "validation/action_error_per_dim": [0.5, 0.25]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    errors = read_run(tmp_path).error_per_dim
    assert {name: tuple(map(list, curve)) for name, curve in errors.items()} == {
        "action[0]": ([9], [0.5]),
        "action[1]": ([9], [0.25]),
    }


def test_the_data_set(whole):
    text = _lines(whole)
    assert "3 1 120 12 s 10 aloha v3.0" in text  # episodes, held out, frames, time, rate …
    assert "1 task" in text
    assert "wave <both> arms 3" in text
    assert "Every episode lasts 4.0 s" in text
    thumbnails = [a["alt"] for a in whole.all("img") if a["alt"].startswith("top, episode")]
    assert thumbnails == ["top, episode 0", "top, episode 1", "top, episode 2"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "No run is given"),
        (["{run}", "{run}"], 1, "A run is given twice"),
        (["{run}", "{root}", "--eval", "{root}/eval"], 2, "for the page of one run"),
        (["{root}"], 1, "no run of `piston train`"),
        (["{run}/3"], 1, "It is a checkpoint: give its run"),
        (["{run}", "--eval", "{root}"], 1, "holds no results.json"),
        (["{run}", "--stages", "{run}/run.json", "--no-policy"], 1, "no list of stages"),
    ],
)
def test_what_cannot_be_shown_says_what_to_do(words, code, message, root, run, capsys):
    assert main(["report", *(word.format(root=root, run=run) for word in words)]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def _copy(run, folder, before, after):
    """Copy a run whose configuration differs in one value."""
    shutil.copytree(run, folder)
    path = folder / "run.json"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    return folder


def _well_formed(page):
    """Return the page as XML: attributes have values, and tags of HTML without an end have one."""
    text = re.sub(" (controls|muted|loop|autoplay|playsinline)(?=[ >])", "", page.read_text())
    return re.sub("<style>.*?</style>", "", text, flags=re.DOTALL)


def _lines(reader):
    return re.sub(r"\n+", " ", reader.text).replace("  ", " ")
