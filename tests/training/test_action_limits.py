"""The limits of actions on their way: from the training data to a robot behind a server."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import piston
from piston.data import open_dataset
from piston.robots import RobotInputs
from piston.serving import running_server
from piston.training.loop import train_loop
from piston_client import ActionChunkBroker, Client, Runtime

from .recording import record, recorded, spoil
from .running import tiny

OLD = Path(__file__).parents[1] / "reference/checkpoints_0.1.0/pi05_libero"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("data"), episodes=2, frames=8)


@pytest.fixture(scope="module")
def expected(data):
    """Computed in another way: LIBERO's actions are stored as the robot gets them."""
    actions = open_dataset(data["data"].repo_id).column("actions").astype(np.float64)
    low, high = actions.min(0), actions.max(0)
    episodes = actions.reshape(2, 8, 7)
    step = np.abs(np.diff(episodes, axis=1)).max((0, 1))
    margin = 0.1 * (high - low)
    return {"low": low - margin, "high": high + margin, "max_step": 1.5 * step}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6)


def test_a_checkpoint_carries_them(tmp_path, data, expected):
    own = {"reset_pose": [0.0, 1.0]}
    last = train_loop(tiny(tmp_path, **data, policy_metadata=own, num_train_steps=2))
    policy = piston.load_policy(last)
    assert_equal(policy.metadata.pop("action_limits"), expected)
    assert policy.metadata["reset_pose"] == own["reset_pose"]
    assert policy.metadata["control_hz"] == 10


def test_a_resumed_run_keeps_them(tmp_path, data, expected):
    train_loop(tiny(tmp_path, **data, num_train_steps=2))
    last = train_loop(tiny(tmp_path, **data, num_train_steps=4, resume=True))
    assert_equal(piston.load_policy(last).metadata["action_limits"], expected)


def test_those_of_the_preset_replace_them(tmp_path, data):
    own = {"action_limits": {"high": [1.0] * 7}}
    last = train_loop(tiny(tmp_path, **data, policy_metadata=own, num_train_steps=2))
    assert piston.load_policy(last).metadata["action_limits"] == own["action_limits"]


@pytest.mark.parametrize(
    ("stated", "message"),
    [({"low": [0.0] * 6}, "are for 6 dimensions.*actions have 7"), ("wide", "expected a dict")],
)
def test_wrong_ones_of_the_preset_are_an_error_before_training(tmp_path, data, stated, message):
    own = {"action_limits": stated}
    with pytest.raises(ValueError, match=message):
        train_loop(tiny(tmp_path, **data, policy_metadata=own, num_train_steps=2))
    assert not (tmp_path / "tiny/run/1").exists()


def test_a_preset_of_the_same_robot_keeps_those_of_the_checkpoint(tmp_path, data, expected):
    config = tiny(tmp_path, **data, policy_metadata={"reset_pose": [0.0]}, num_train_steps=2)
    last = train_loop(config)
    preset = dataclasses.replace(config, policy_metadata={"reset_pose": [1.0]})
    metadata = piston.load_policy(last, preset=preset).metadata
    assert_equal(metadata["action_limits"], expected)
    assert metadata["reset_pose"] == [1.0]
    own = {"action_limits": {"high": [1.0] * 7}}
    preset = dataclasses.replace(config, policy_metadata=own)
    assert piston.load_policy(last, preset=preset).metadata["action_limits"] == own["action_limits"]
    # The limits are in the units of a robot, so they do not fit another one.
    keys = {"cameras": {"image": "base_0_rgb"}, "state": {"state": 8}, "actions": {"actions": 7}}
    robot = RobotInputs(name="other", columns={}, **keys)
    metadata = piston.load_policy(last, preset=preset, robot=robot).metadata
    assert "action_limits" not in metadata


def test_random_samples_have_none(tmp_path):
    last = train_loop(tiny(tmp_path, num_train_steps=2))
    assert "action_limits" not in (last / "config.json").read_text()


class Jumps:
    """A policy of which the second chunk jumps; its metadata are those of the checkpoint."""

    def __init__(self, metadata):
        self.metadata, self.chunks = metadata, 0

    def infer_batch(self, observations):
        self.chunks += 1
        actions = np.full((2, 7), 100.0 if self.chunks > 1 else 0.0, np.float32)
        return [{"actions": actions} for _ in observations]


class Robot:
    def __init__(self):
        self.applied = []

    def reset(self):
        pass

    def get_observation(self):
        return {"state": np.zeros(8, np.float32)}

    def apply_action(self, action):
        self.applied.append(action.tolist())

    def is_done(self):
        return len(self.applied) == 4


def drive(metadata):
    robot = Robot()
    with running_server(Jumps(metadata)) as server, Client(server.url) as client:
        summary = Runtime(robot, ActionChunkBroker(client), None).run()
    return np.array(robot.applied), summary


def test_a_robot_behind_a_server_is_protected(tmp_path, data, expected, caplog):
    last = train_loop(tiny(tmp_path, **data, num_train_steps=2))
    applied, summary = drive(piston.load_policy(last).metadata)
    assert (applied[:2] == 0).all()
    first = np.minimum(expected["max_step"], expected["high"])
    np.testing.assert_allclose(applied[2], first, rtol=1e-5)
    assert (applied[3] <= expected["high"] + 1e-5).all()
    assert summary.num_clamped == 2
    assert "No limits" not in caplog.text


def test_an_old_checkpoint_has_none_and_the_robot_says_so(caplog):
    metadata = piston.load_policy(OLD).metadata
    assert "action_limits" not in metadata
    applied, summary = drive(metadata)
    assert applied.max() == 100
    assert summary.num_clamped == 0
    assert caplog.text.count("No limits of this policy's actions are known") == 1


def test_the_limits_of_several_sets_are_those_of_all(tmp_path, data):
    record(tmp_path / "more", episodes=1, frames=3)
    spoil(tmp_path / "more", "actions", 1, [50.0] * 7)
    several = dataclasses.replace(data["data"], extra_datasets=(str(tmp_path / "more"),))
    last = train_loop(tiny(tmp_path, **{**data, "data": several}, num_train_steps=2))
    found = piston.load_policy(last).metadata["action_limits"]
    assert (np.array(found["high"]) > 54).all()
    assert (np.array(found["max_step"]) > 60).all()
