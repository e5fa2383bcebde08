"""`piston serve` as a process, with the public client at the other end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from tests.training.two_robots import BRIGHT, DARK, observation

from piston.cli import main
from piston.data import open_dataset
from piston.robots.aloha import make_aloha_example


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _is_healthy(port):
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1).status == 200
    except OSError:
        return False


@contextmanager
def served(*options):
    port = _free_port()
    command = [sys.executable, "-m", "piston.cli", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 60
        while not _is_healthy(port):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.1)
        yield port, process
    finally:
        process.kill()
        process.wait()


def test_random_weights_are_served_recorded_and_stopped(tmp_path):
    folder = tmp_path / "recorded"
    options = ("--preset", "pi0_aloha", "--random-weights", "--record", str(folder))
    with served(*options) as (port, process):
        client = WebsocketClientPolicy("127.0.0.1", port)
        metadata = client.get_server_metadata()
        assert metadata["reset_pose"] == [0, -1.5, 1.5, 0, 0, 0]
        assert metadata["piston"]["name"] == "random weights for pi0_aloha"
        example = make_aloha_example()
        example["images"] = {"cam_high": np.zeros((3, 64, 64), np.uint8)}
        chunks = [client.infer({**example, "seed": seed})["actions"] for seed in (0, 0, 1)]
        assert chunks[0].shape == (50, 14)
        assert np.array_equal(chunks[0], chunks[1])
        assert not np.array_equal(chunks[0], chunks[2])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    np.testing.assert_allclose(open_dataset(folder)[2]["action"], chunks[2][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "piston serve --preset pi0_aloha_sim --random-weights"),
        (["--random-weights"], "takes a --preset"),
        (["--preset", "debug", "--random-weights"], "has no robot"),
        (["/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_served_says_what_to_do(options, message, capsys):
    assert main(["serve", *options]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_checkpoint_without_a_robot_asks_for_a_preset(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"format": "piston", "version": 1}))
    assert main(["serve", str(tmp_path)]) == 1
    assert "--preset" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_says_so(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    assert main(["serve", str(tmp_path)]) == 1
    assert "is a run that has no checkpoint yet" in capsys.readouterr().err


def test_a_robot_that_the_checkpoint_does_not_know(checkpoint_of_two_robots, capsys):
    checkpoint = str(checkpoint_of_two_robots)
    assert main(["serve", checkpoint, "--robot", "nonsense"]) == 1
    error = capsys.readouterr().err
    assert "There is no robot 'nonsense' here. There is arm, cart." in error
    assert main(["serve", checkpoint, "--robot", "nonsense.toml"]) == 1
    assert "There is no file nonsense.toml" in capsys.readouterr().err


def test_options_that_a_policy_of_several_robots_cannot_have(
    checkpoint_of_two_robots, tmp_path, capsys
):
    checkpoint = str(checkpoint_of_two_robots)
    assert main(["serve", checkpoint, "--record", str(tmp_path / "new")]) == 1
    assert "--record is for one robot" in capsys.readouterr().err
    assert main(["serve", checkpoint, "--subtask-interval", "soon"]) == 1
    assert "subtasks is 'soon'; expected a number of chunks" in capsys.readouterr().err


def test_one_of_several_robots_is_served_by_name(checkpoint_of_two_robots):
    options = ("--robot", "arm", "--subtask-interval", "2", "--num-steps", "1")
    with served(str(checkpoint_of_two_robots), *options) as (port, _):
        client = WebsocketClientPolicy("127.0.0.1", port)
        metadata = client.get_server_metadata()
        assert metadata["robot"] == "three-joint arm"
        assert list(metadata["robots"]) == ["arm", "cart"]
        found = [client.infer(observation("arm", 1, b)) for b in (DARK, BRIGHT, BRIGHT)]
        assert [one["subtask"] for one in found] == ["reach", "reach", "lift"]
        assert client.infer(observation("cart", robot="cart"))["actions"].shape == (4, 2)
