"""`piston inspect` from a checkpoint and its data set to a page and numbers."""

import json
import socket

import numpy as np
import pytest

from piston.cli import main
from piston.data.record import Recorder

from . import cases


@pytest.fixture(scope="module")
def checkpoint(run):
    return max(run.glob("[0-9]*"), key=lambda path: int(path.name))


@pytest.fixture(scope="module")
def inspected(root, checkpoint):
    """The folder with a page and the numbers of two runs."""
    out = root / "inspected"
    options = ["--frames", "2", "--seeds", "2", "--maps", "1"]
    page, first, second = out / "page.html", out / "first.json", out / "second.json"
    words = ["inspect", str(checkpoint), *options]
    assert main([*words, "--html", str(page), "--json", str(first)]) == 0
    assert main([*words, "--data", str(root / "data"), "--json", str(second)]) == 0
    return out


def test_two_runs_give_equal_numbers(inspected, root):
    first, second = (json.loads((inspected / f"{n}.json").read_text()) for n in ("first", "second"))
    assert first == second
    assert first["about"]["data"] == str(root / "data")
    assert first["about"]["state_names"][0] == "left_waist"
    questions = {(one["input"], one["change"]) for one in first["influence"]["questions"]}
    assert {("camera", "off"), ("camera", "black"), ("word", "left out")} <= questions
    assert len(first["moments"]) == 2
    assert "pictures" not in first["moments"][0]
    assert [len(one["maps"]) for one in first["moments"]] == [1, 0]
    for verdict in first["verdicts"]:
        assert verdict["sentence"]
        assert verdict["number"] is not None


def test_the_page_stands_alone_and_names_every_input(inspected):
    page = (inspected / "page.html").read_text()
    for text in ("cam_high: black picture", "left shoulder", "no sentence", "&lt;both&gt;"):
        assert text in page
    assert "<both>" not in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--frames", "0"], "--frames is 0; expected at least 1."),
        (["--seeds", "1"], "--seeds is 1; expected at least 2"),
        (["--data", "no/such/set/here"], "There is no data set no/such/set/here"),
        (["--episodes", "7"], "7"),
    ],
)
def test_errors_are_one_sentence(checkpoint, tmp_path, capsys, words, message):
    json_file = tmp_path / "numbers.json"
    assert main(["inspect", str(checkpoint), "--json", str(json_file), *words]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not json_file.exists()


def test_a_live_set_is_compared_with_training(root, checkpoint, tmp_path):
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    words = ["inspect", str(checkpoint), "--frames", "1", "--seeds", "2", "--html", str(page)]
    words += ["--maps", "0"]
    assert main([*words, "--live", str(root / "data"), "--json", str(numbers)]) == 0
    assert "Training against live" in page.read_text()
    live = json.loads(numbers.read_text())["live"]
    assert live["num_live_frames"] == live["num_training_frames"]
    assert [one["outside"] for one in live["dimensions"]] == [0] * len(live["dimensions"])
    assert "picture" not in "".join(live["cameras"][0])


def test_files_and_a_served_page_exclude_each_other(checkpoint, tmp_path, capsys):
    words = ["inspect", str(checkpoint), "--json", str(tmp_path / "a.json"), "--port", "8055"]
    assert main(words) == 1
    assert "leave out --host, --port and --no-browser" in capsys.readouterr().err


def test_a_data_set_of_another_robot(checkpoint, tmp_path, capsys):
    """One that has the keys, and other numbers of states and actions."""
    image = {"dtype": "image", "shape": (cases.PIXELS, cases.PIXELS, 3)}
    six = {"dtype": "float32", "shape": (6,)}
    features = {"observation.images.top": image, "observation.state": six, "action": six}
    with Recorder(tmp_path / "six", cases.FPS, features) as recorder:
        numbers = dict.fromkeys(("observation.state", "action"), np.zeros(6, np.float32))
        picture = np.zeros(image["shape"], np.uint8)
        recorder.add_frame({**numbers, "observation.images.top": picture}, "wave")
        recorder.save_episode()
    words = ["inspect", str(checkpoint), "--data", str(tmp_path / "six")]
    assert main([*words, "--json", str(tmp_path / "a.json")]) == 1
    shown = capsys.readouterr().err
    assert "'state' has shape (6,)" in shown
    assert "The policy is for ALOHA" in shown


def test_a_run_is_not_a_checkpoint(run, checkpoint, tmp_path, capsys):
    assert main(["inspect", str(run), "--json", str(tmp_path / "numbers.json")]) == 1
    assert f"Its newest is {checkpoint}" in capsys.readouterr().err


def test_a_taken_port_is_told_before_anything_is_computed(checkpoint, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["inspect", str(checkpoint), "--port", str(port)]) == 1
    shown = capsys.readouterr()
    assert f"Nothing is served at 127.0.0.1:{port}" in shown.err
    assert "what was found" not in shown.out
    assert "Nothing was found" not in shown.out
