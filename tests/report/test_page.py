"""The page: every part is there, what is missing is named, nothing is fetched, nothing injected."""

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from piston.cli import main
from piston.report.page import write_report
from piston.robots.simple import FakeDataConfig
from piston.training.loop import train_loop

from . import cases

PARTS = [
    "success-per-seed",
    "videos",
    "training",
    "chunks-and-what-was-executed",
    "action-chunk",
    "denoising",
    "transforms",
    "timings",
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
    assert cells[1]["title"] == "seed 1: fulfilled, then lost; 11 steps; “wave <both> arms”"


def test_videos_can_be_played(whole):
    videos = whole.all("video")
    assert len(videos) == 2
    assert all({"controls", "muted", "loop"} <= video.keys() for video in videos)
    assert all(video["src"].startswith("data:video/mp4;base64,") for video in videos)
    # In the order of the seeds' fates, each with what happened.
    captions = [line for line in whole.text.splitlines() if line.startswith("seed ")]
    assert captions[0].startswith("seed 2: failed")


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
    assert reader.sections == []
    assert "Training left out: metrics.jsonl has 0 line(s)" in _lines(reader)
    assert "piston eval TASK --policy" in reader.text
    assert reader.text.count("the run has no whole checkpoint yet") == 3


def test_without_its_data_set_the_rest_is_shown(root, run, tmp_path):
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    path = moved / "run.json"
    path.write_text(path.read_text().replace(str(root / "data"), str(tmp_path / "gone")))
    reader = Reader(write_report(moved, evaluations=[root / "eval"]).read_text())
    evaluated = ["success-per-seed", "videos", "training", "chunks-and-what-was-executed"]
    assert reader.sections == [*evaluated, "timings"]
    assert str(tmp_path / "gone") in reader.text


def test_without_the_policy(run, tmp_path):
    reader = Reader(write_report(run, tmp_path / "page.html", use_policy=False).read_text())
    assert reader.sections == ["training", "transforms", "timings"]
    assert "Leave out --no-policy" in reader.text


def test_random_samples(tmp_path):
    config = cases.config(tmp_path, data=FakeDataConfig(), validation_episodes=0)
    train_loop(dataclasses.replace(config, num_train_steps=2))
    reader = Reader(write_report(config.checkpoint_dir).read_text())
    assert reader.sections == ["training", "timings"]
    assert "Transforms left out: the run trained on random samples" in _lines(reader)


def test_evaluations_below_the_run_are_found(run, tmp_path):
    shutil.copy(run / "run.json", tmp_path)
    cases.write_evaluation(tmp_path / "eval")
    cases.write_evaluation(tmp_path / "opposite", "do the opposite")
    reader = Reader(write_report(tmp_path).read_text())
    evaluated = ["success-per-seed", "videos", "chunks-and-what-was-executed"]
    assert reader.sections == [*evaluated, "timings"]
    assert "success, opposite" in reader.text


def test_the_verb(root, run, tmp_path, capsys):
    out = tmp_path / "deep" / "page.html"
    words = ["report", str(run), "--eval", str(root / "eval"), "--out", str(out), "--no-policy"]
    assert main(words) == 0
    assert str(out) in capsys.readouterr().out
    assert Reader(out.read_text()).sections[0] == "success-per-seed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{root}"], "no run of `piston train`"),
        (["{run}/3"], "It is a checkpoint: give its run"),
        (["{run}", "--eval", "{root}"], "holds no results.json"),
        (["{run}", "--stages", "{run}/run.json", "--no-policy"], "no list of stages"),
    ],
)
def test_what_cannot_be_shown_says_what_to_do(words, message, root, run, capsys):
    assert main(["report", *(word.format(root=root, run=run) for word in words)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def _lines(reader):
    return re.sub(r"\n+", " ", reader.text).replace("  ", " ")
