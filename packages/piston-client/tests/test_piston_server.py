"""The client and the example programs against `piston serve`, which another interpreter may run.

`PISTON_PYTHON` is that interpreter; without it, it is this one if Piston is installed here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from piston_client import (
    ActionChunkBroker,
    AsyncChunkBroker,
    Client,
    RealTimeBroker,
    Runtime,
    ServerError,
    TemporalEnsemble,
)

EXAMPLES = Path(__file__).parents[3] / "examples"
PISTON_PYTHON = os.environ.get(
    "PISTON_PYTHON", sys.executable if importlib.util.find_spec("piston") else ""
)
MY_ARM = """
name = "my_arm"
rate = 20
[cameras]
"observation.images.front" = "base_0_rgb"
"observation.images.wrist" = "left_wrist_0_rgb"
[state]
"observation.state" = 8
[actions]
"action" = 8
"""


@contextlib.contextmanager
def piston_serve(folder: Path, *options: object) -> Iterator[str]:
    """Start `piston serve` on any free port; yield its address as soon as it listens."""
    if not PISTON_PYTHON:
        pytest.skip("Piston is not installed here; name an interpreter that has it: PISTON_PYTHON")
    words = ["--random-weights", "--max-batch", "1", "--port", "0", *map(str, options)]
    log = folder / "server.log"
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            [PISTON_PYTHON, "-m", "piston.cli", "serve", *words], stdout=stream, stderr=stream
        )
    try:
        end = time.monotonic() + 120
        while True:
            shown = log.read_text("utf-8")
            found = re.search(r"Listening at (ws://[\w.:]+)", shown)
            if found:
                break
            assert process.poll() is None, shown
            assert time.monotonic() < end, shown
            time.sleep(0.05)
        yield found[1]
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aloha")
    with piston_serve(folder, "--preset", "pi0_aloha_sim") as address:
        yield address


class Aloha:
    """An arm that is where it was sent to."""

    def reset(self):
        self.joints = np.zeros(14, np.float32)

    def get_observation(self):
        image = np.zeros((48, 64, 3), np.uint8)
        return {"images": {"cam_high": image}, "state": self.joints.copy(), "prompt": "go"}

    def apply_action(self, action):
        assert action.shape == (14,)
        assert action.dtype == np.float32
        self.joints = action

    def is_done(self):
        return False


def test_metadata_and_replies(server):
    with Client(server) as client:
        assert client.metadata["piston"]["protocol"] == 1
        assert client.metadata["actions"]["shape"] == [50, 14]
        for seed in range(10):
            reply = client.infer(client.example_observation(seed=seed))
            assert reply["actions"].shape == (50, 14)
            assert np.isfinite(reply["actions"]).all()
            reply["actions"][0] = 1  # the caller's own
        assert reply["server_timing"]["infer_ms"] > 0
        assert "request_id" not in reply


def test_a_refused_request_leaves_the_connection_usable(server):
    with Client(server) as client:
        observation = client.example_observation()
        for _ in range(3):
            with pytest.raises(ServerError, match="state"):
                client.infer({key: observation[key] for key in observation if key != "state"})
            with pytest.raises(ServerError, match="NaN"):
                client.infer({**observation, "state": np.full(14, np.nan)})
            assert client.infer(observation)["actions"].shape == (50, 14)


@pytest.mark.parametrize(
    "make_broker", [ActionChunkBroker, TemporalEnsemble, AsyncChunkBroker, RealTimeBroker]
)
def test_every_broker_drives_a_robot(server, make_broker):
    with Client(server) as client:
        broker = make_broker(client)
        runtime = Runtime(Aloha(), broker, 50, num_episodes=2, max_steps=40, max_hold=10)
        summary = runtime.run()
    assert (summary.ended_by, summary.num_steps, summary.num_episodes) == ("max_steps", 80, 2)
    assert summary.last_error is None


def test_real_time_chunking_continues_what_is_executed(server):
    """The guided chunk begins with the committed actions; a plain one does not."""
    with Client(server) as client:
        assert "guided" in client.metadata["rtc"]["kinds"]
        observation = {**client.example_observation(), "seed": 0}
        previous = client.infer(observation)["actions"]
        np.testing.assert_array_equal(client.infer(observation)["actions"], previous)
        rtc = {"previous_chunk": previous[10:], "delay": 20, "execute_horizon": 10}
        other = {**observation, "seed": 1}
        plain = client.infer(other)["actions"]
        guided = client.infer({**other, "rtc": {**rtc, "kind": "guided"}})["actions"]
    committed = previous[10:30]
    assert np.abs(guided[:20] - committed).mean() < 0.1 * np.abs(plain[:20] - committed).mean()


def run_example(program, *arguments, folder, **environment):
    """Run an example in this interpreter and return what it prints."""
    command = [sys.executable, str(EXAMPLES / program), *map(str, arguments)]
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_robot_client(server, tmp_path):
    options = ("--prompt", "transfer the cube", "--hz", 20, "--seconds", 1.5, "--max-step", 0.01)
    shown = run_example("robot_client.py", server, *options, folder=tmp_path)
    assert "30 steps, episodes: 1" in shown
    assert "ended by: done" in shown
    # Random weights ask for larger steps.
    assert "clamped to the limits: 0 steps" not in shown


def test_aloha_real(server, tmp_path):
    log, ros = tmp_path / "commands.jsonl", Path(__file__).parent / "ros"
    path = os.pathsep.join([str(ros), os.environ.get("PYTHONPATH", "")])
    options = ("--prompt", "fold the towel", "--seconds", 0.5)
    environment = {"PYTHONPATH": path, "FAKE_ARM_LOG": str(log)}
    shown = run_example("aloha_real.py", server, *options, folder=tmp_path, **environment)
    assert "25 steps, episodes: 1" in shown
    assert "ended by: done" in shown
    commands = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    for name in ("puppet_left", "puppet_right"):
        own = [(kind, value) for arm, kind, value in commands if arm == name]
        assert [kind for kind, _ in own[:4]] == ["mode", "mode", "torque", "torque"]
        joints = np.array([value for kind, value in own if kind == "joints"])
        grippers = np.array([value for kind, value in own if kind == "gripper"])
        # Two seconds from where the arm was to the reset pose, 25 steps, then the safe action.
        assert len(joints) == len(grippers) == 100 + 25 + 1
        np.testing.assert_allclose(joints[0], np.zeros(6))
        np.testing.assert_allclose(joints[99], [0, -0.96, 1.16, 0, -0.3, 0])
        assert np.abs(np.diff(joints[:100], axis=0)).max() < 0.02
        assert grippers[99] == pytest.approx(1.4910)
        assert grippers.min() > -0.6214
        assert grippers.max() < 1.4911


def test_own_robot_drives(tmp_path):
    description = tmp_path / "my_arm.toml"
    description.write_text(MY_ARM, "utf-8")
    options = ("--task", "pick up the fork", "--steps", 20)
    with piston_serve(tmp_path, "--preset", "tiny_robot", "--robot", description) as address:
        shown = run_example("own_robot.py", "drive", address, *options, folder=tmp_path)
    assert "a policy for my_arm, 20 Hz" in shown
    assert "20 steps, episodes: 1" in shown
    assert "ended by: done" in shown
