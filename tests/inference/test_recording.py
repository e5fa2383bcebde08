"""What a served robot saw and did becomes a data set that reads back."""

import numpy as np
import pytest
import torch

from piston.data import open_dataset
from piston.inference.loading import random_policy
from piston.inference.recording import RecordingPolicy, recorded_column
from piston.robots.aloha import make_aloha_example
from piston.robots.simple import DROID


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    return random_policy("pi0_aloha_sim")


def _observation(prompt, size=(64, 96)):
    example = make_aloha_example()
    image = np.random.default_rng(0).integers(256, size=(3, *size), dtype=np.uint8)
    return {**example, "images": {"cam_high": image}, "prompt": prompt}


def test_a_new_sentence_or_a_pause_begins_an_episode(policy, tmp_path):
    clock = Clock()
    recording = RecordingPolicy(policy, tmp_path / "set", fps=10.0, clock=clock)
    answers = []
    for seconds, prompt in [(0, "pick"), (1, "pick"), (2, "place"), (20, "place"), (21, "place")]:
        clock.now = seconds
        (answer,) = recording.infer_batch([_observation(prompt)])
        answers.append(answer["actions"])
    recording.close()

    dataset = open_dataset(tmp_path / "set")
    assert dataset.episode_bounds.tolist() == [[0, 2], [2, 3], [3, 5]]
    assert [dataset[i]["task"] for i in range(5)] == ["pick", "pick", "place", "place", "place"]
    np.testing.assert_allclose(dataset.column("action"), [chunk[0] for chunk in answers])
    np.testing.assert_allclose(dataset[4]["action_chunk"], answers[4])
    assert dataset[0]["observation.images.cam_high"].shape == (64, 96, 3)
    assert dataset.column("request_time").ravel().tolist() == [0, 1, 0, 0, 1]
    expected = _observation("pick")["state"]
    np.testing.assert_allclose(dataset[0]["observation.state"], expected)


def test_a_second_session_goes_on_with_the_same_set(policy, tmp_path):
    for _ in range(2):
        recording = RecordingPolicy(policy, tmp_path / "set", fps=10.0)
        recording.infer_batch([recording.prepare(_observation("pick"))])
        recording.close()
    assert len(open_dataset(tmp_path / "set")) == 2


def test_columns_are_named_by_the_robots_keys():
    names = {
        ("images/cam_high", True): "observation.images.cam_high",
        ("observation/wrist_image_left", True): "observation.images.wrist_image_left",
        ("observation.images.top", True): "observation.images.top",
        ("observation.state", False): "observation.state",
        ("joints", False): "observation.joints",
    }
    for (key, is_image), column in names.items():
        assert recorded_column(key, is_image=is_image) == column


def test_single_numbers_are_recorded_and_options_of_the_request_are_not(tmp_path):
    policy = random_policy("pi05_droid")
    recording = RecordingPolicy(policy, tmp_path / "set", fps=10.0)
    sent = {**DROID.example(), "prompt": "pick", "seed": 3}
    sent["observation/gripper_position"] = np.float32(0.25)
    recording.infer_batch([sent])
    # What a broker sends is recorded; what cannot be a number of steps is not.
    for executed in (0, 8, 10**6, "all"):
        recording.infer_batch([{**sent, "executed_steps": executed}])
    recording.close()
    dataset = open_dataset(tmp_path / "set", cameras=())
    assert dataset.column("executed_steps").ravel().tolist() == [-1, 0, 8, -1, -1]
    assert dataset[0]["observation.gripper_position"] == 0.25
    assert not any("seed" in key or "observation.executed" in key for key in dataset.keys)
