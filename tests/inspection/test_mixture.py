"""A policy of several robots, of which one writes its subtask, is inspected like any other."""

import json

import numpy as np
import pytest
from tests.training.two_robots import BRIGHT, observation

from piston.cli import main
from piston.inference import load_policy
from piston.inference.recording import RecordingPolicy
from piston.inspection import Frames, Intervention, Probe
from piston.inspection.inside import inside


@pytest.fixture(scope="module")
def arm(checkpoint_of_two_robots):
    return load_policy(checkpoint_of_two_robots, robot="arm", num_steps=3)


def test_a_probe_writes_the_text_that_the_policy_writes(arm):
    frames = Frames.open(arm, arm.data.repo_id)
    for place, subtask in (((0, 1), "reach"), ((1, 14), "lift")):
        frame, probe = frames[place], Probe(arm, [3, 4])
        # The policy writes it, though the data set has a label.
        assert "subtask" not in frame.observation
        found = probe.chunks(frame, [Intervention(), Intervention(prompt="take it")])
        expected = [arm.infer(frame.observation, noise=noise) for noise in probe.noise]
        assert {one["subtask"] for one in expected} == {subtask}
        for chunk, one in zip(found[0], expected, strict=True):
            np.testing.assert_allclose(chunk, one["actions"], atol=1e-5)
        assert subtask in inside(probe, frame).attention.words


def test_a_given_subtask_is_another_prefix(arm):
    probe = Probe(arm, [3])
    asked = [observation("arm", 1, subtask=one) for one in (None, "reach", "lift")]
    found = probe.ask([(one, Intervention()) for one in asked])
    assert probe.num_prefixes == 3
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert np.abs(found[0] - found[2]).max() > 1e-3


def test_a_recording_has_no_labels_and_is_opened(arm, tmp_path):
    recording = RecordingPolicy(arm, tmp_path / "live", fps=10.0)
    recording.infer_batch([observation("arm", number, BRIGHT) for number in range(3)])
    recording.close()
    frames = Frames.open(arm, tmp_path / "live")
    assert frames.is_recording
    assert arm.infer(frames[0, 1].observation)["subtask"] == "lift"


def test_the_verb_takes_the_robots_name(checkpoint_of_two_robots, tmp_path, capsys):
    words = ["inspect", str(checkpoint_of_two_robots), "--frames", "2", "--seeds", "2", "--maps"]
    words += ["0", "--json", str(tmp_path / "found.json")]
    assert main([*words, "--robot", "arm"]) == 0
    about = json.loads((tmp_path / "found.json").read_text())["about"]
    assert about["robot"] == "three-joint arm"
    capsys.readouterr()
    assert main(words) == 1
    assert "with several robots. Name one of arm, cart (--robot)" in capsys.readouterr().err
    assert main([*words, "--robot", "boat"]) == 1
    assert "There is no robot 'boat'" in capsys.readouterr().err
