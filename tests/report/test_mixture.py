"""The page of a run with several robots, of which one writes its subtask, and with questions."""

import dataclasses
import shutil

import pytest

from piston.report.evaluation import executed
from piston.report.page import write_report
from piston.report.training import read_run, training
from piston.sim.scores import read_evaluation

from . import cases
from .test_page import PARTS, Reader, _lines

SUBTASKS = ("reach", "reach <it>")


@pytest.fixture(scope="module")
def run(checkpoint_of_two_robots):
    return checkpoint_of_two_robots.parent


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    written = cases.write_evaluation(folder)
    trace = dataclasses.replace(written.trace, subtasks=SUBTASKS)
    dataclasses.replace(written, trace=trace).write(folder)
    return folder


@pytest.fixture(scope="module")
def page(run, evaluation, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    return Reader(write_report(run, out, evaluations=[evaluation]).read_text())


def test_every_part_is_there(page):
    assert page.sections == PARTS
    assert "left out" not in page.text


def test_every_loss_has_a_curve(run, page):
    for name in ("loss/velocity", "loss/tokens"):
        assert name in page.text
    found = read_run(run)
    assert found.losses == ["loss/velocity", "loss/tokens"]
    assert training(found).count('class="line run-') == 2
    alone = [{k: v for k, v in line.items() if "/" not in k} for line in found.metrics]
    assert 'class="line run-' not in training(dataclasses.replace(found, metrics=alone))


def test_all_data_sets_are_listed(run, page):
    text = _lines(page)
    folder = run.parents[2]
    assert f"arm: {folder / 'arm'} 2 1 32 3.2 s 10 – v3.0" in text
    assert f"cart: {folder / 'cart'} 2 1 32 1.6 s 20 – v3.0" in text
    assert f"questions: {folder / 'arm'} – – 32 pictures – – 34 questions –" in text
    assert "2 tasks" in text
    assert "2 subtasks subtask frames reach 16 lift 16" in text
    assert "also have 34 questions about their pictures" in text


def test_subtasks_follow_the_trace(page, evaluation):
    text = _lines(page)
    assert "seconds chunks subtask 0.0 – 0.1 s 1 reach 0.1 – 0.2 s 1 reach <it>" in text
    result = read_evaluation(evaluation)
    same = dataclasses.replace(result.trace, subtasks=("reach",) * 2)
    text = _lines(Reader(executed([dataclasses.replace(result, trace=same)])))
    assert "0.0 – 0.2 s 2 reach" in text
    none = dataclasses.replace(result.trace, subtasks=())
    assert "subtask" not in executed([dataclasses.replace(result, trace=none)])


def test_the_first_robot_is_shown(run, page):
    text = _lines(page)
    assert f"of {run.parents[2] / 'arm'} (robot arm)" in text
    assert "Robot: arm." in text
    assert "Its subtask is “reach”; recorded is “reach”." in text
    assert "PromptFromItem" in text


def test_advice_names_the_robot(run, tmp_path):
    folder = tmp_path / "all"
    shutil.copytree(run.parents[2], folder)
    copied = folder / run.relative_to(run.parents[2])
    for path in (copied / "run.json", folder / "arm" / "meta" / "simulation.jsonl"):
        text = path.read_text() if path.exists() else '{"task": "aloha_insertion", "seed": 0}\n'
        path.write_text(text.replace(str(run.parents[2]), str(folder)))
    text = Reader(write_report(copied, use_policy=False).read_text()).text
    assert f"piston eval aloha_insertion --policy {copied / '119'} --robot arm --video" in text
