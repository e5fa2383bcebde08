"""The client against Piston's own server: errors, busy, keys, TLS, restarts, ping."""

import copy
import functools
import operator
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rich.console import Console

from piston import presets
from piston.cli import main
from piston.cli.client import example_of
from piston.inference.loading import random_policy
from piston.serving import ServerConfig, running_server
from piston_client import ActionChunkBroker, Client, ConnectionLost, ServerBusy, ServerError
from piston_client.examples import leaves


class Doubles:
    """Chunks of twice the state; `gate` holds a batch until the test opens it."""

    def __init__(self):
        self.metadata = {"reset_pose": np.arange(3.0)}
        self.gate = None
        self.began = threading.Semaphore(0)

    def infer_batch(self, observations):
        self.began.release()
        if self.gate is not None:
            assert self.gate.wait(20)
        return [self._infer(observation) for observation in observations]

    def _infer(self, observation):
        if "state" not in observation:
            raise KeyError("No 'state' in the observation.")
        actions = np.tile(2 * np.asarray(observation["state"], np.float32), (4, 1))
        return {"actions": actions, "policy_timing": {"infer_ms": 0.1}}


def test_metadata_answers_and_timing():
    with running_server(Doubles()) as server, Client(server.url) as client:
        np.testing.assert_array_equal(client.metadata["reset_pose"], [0, 1, 2])
        assert client.metadata["piston"]["protocol"] == 1
        for n in range(50):
            reply = client.infer({"state": np.array([n, -n])})
            np.testing.assert_array_equal(reply["actions"], [[2 * n, -2 * n]] * 4)
        assert reply["server_timing"]["infer_ms"] >= 0
        assert "request_id" not in reply


def test_errors_end_one_request_only():
    with running_server(Doubles()) as server, Client(server.url) as client:
        for _ in range(3):
            with pytest.raises(ServerError, match="No 'state'"):
                client.infer({})
            with pytest.raises(ServerError, match="NaN"):
                client.infer({"state": np.array([np.nan])})
            assert client.infer({"state": np.ones(1)})["actions"][0] == 2


def test_a_message_that_is_too_large():
    config = ServerConfig(port=0, max_message_bytes=10_000)
    with running_server(Doubles(), config) as server, Client(server.url) as client:
        with pytest.raises(ServerError, match="limit of 10000 bytes.*smaller images"):
            client.infer({"state": np.ones(1), "image": np.zeros(20_000, np.uint8)})
        assert client.infer({"state": np.ones(1)})["actions"][0] == 2


def test_busy():
    policy = Doubles()
    policy.gate = threading.Event()
    config = ServerConfig(port=0, max_batch=1, max_queue=1)
    with running_server(policy, config) as server, ThreadPoolExecutor(3) as pool:
        clients = [Client(server.url, timeout=20) for _ in range(3)]
        for client in clients:
            client.connect()
        first = pool.submit(clients[0].infer, {"state": np.ones(1)})
        assert policy.began.acquire(timeout=5)  # in inference; the next one waits in the queue
        second = pool.submit(clients[1].infer, {"state": np.ones(1)})
        deadline = time.monotonic() + 10
        while len(server._batcher) < 1 and time.monotonic() < deadline:
            time.sleep(0.005)
        third = pool.submit(clients[2].infer, {"state": np.ones(1)})
        assert isinstance(third.exception(timeout=10), ServerBusy)
        assert not second.done()
        policy.gate.set()
        assert first.result(5)["actions"][0, 0] == 2
        assert clients[2].infer({"state": np.ones(1)})["actions"][0, 0] == 2
        for client in clients:
            client.close()


def test_late_replies_of_the_real_server():
    policy = Doubles()
    policy.gate = threading.Event()
    with running_server(policy) as server, Client(server.url, timeout=0.3) as client:
        with pytest.raises(ConnectionLost):
            client.infer({"state": np.array([1.0])})
        policy.gate.set()
        for n in range(2, 20):
            assert client.infer({"state": np.array([float(n)])})["actions"][0, 0] == 2 * n


def test_api_keys():
    config = ServerConfig(port=0, api_key="secret")
    with running_server(Doubles(), config) as server:
        with Client(server.url, api_key="secret") as client:
            assert client.infer({"state": np.ones(1)})["actions"][0, 0] == 2
        for key in (None, "wrong"):
            with pytest.raises(ConnectionLost, match="api_key"):
                Client(server.url, api_key=key, connect_timeout=10).connect()


def test_a_server_that_warms_up():
    warm = threading.Event()
    threading.Timer(0.5, warm.set).start()
    config = ServerConfig(port=0)
    with (
        running_server(Doubles(), config, warm_up=lambda: warm.wait(5)) as server,
        Client(server.url) as client,
    ):
        assert client.infer({"state": np.ones(1)})["actions"][0, 0] == 2


def test_a_restart_on_the_same_port():
    with running_server(Doubles()) as server:
        client = Client(server.url, timeout=10)
        broker = ActionChunkBroker(client, 1)
        assert broker.infer({"state": np.ones(1)})["actions"][0] == 2
        port = server.port
    with running_server(Doubles(), ServerConfig(port=port)):
        assert broker.infer({"state": 2 * np.ones(1)})["actions"][0] == 4
        client.close()


@pytest.fixture
def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        *("-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_tls(certificate):
    config = ServerConfig(
        port=0, tls_certificate=certificate / "cert.pem", tls_key=certificate / "key.pem"
    )
    with running_server(Doubles(), config) as server:
        with Client(server.url, ca_file=certificate / "cert.pem") as client:
            image = np.zeros((480, 640, 3), np.uint8)
            reply = client.infer({"state": np.ones(1), "image": image})
            assert reply["actions"][0, 0] == 2
        started = time.monotonic()
        with pytest.raises(ConnectionLost, match="not trusted"):
            Client(server.url, connect_timeout=10).connect()
        assert time.monotonic() - started < 5


class Accepts:
    metadata = {}  # noqa: RUF012

    def infer_batch(self, observations):
        actions = np.zeros((4, 2), np.float32)
        return [{"actions": actions, "policy_timing": {"infer_ms": 0.1}} for _ in observations]


@pytest.mark.parametrize("preset", ["pi0_aloha", "pi05_droid", "pi05_libero"])
def test_ping_prints_percentiles(capsys, preset):
    with running_server(Accepts()) as server:
        arguments = ["--port", str(server.port), "--preset", preset, "--count", "10"]
        assert main(["client", "ping", "127.0.0.1", *arguments]) == 0
    shown = capsys.readouterr().out
    for word in ("round trip", "inference", "everything else", "median", "99 %", preset, "Piston"):
        assert word in shown


def test_ping_says_what_is_wrong(capsys, free_port):
    arguments = ["--port", str(free_port), "--connect-timeout", "0.3"]
    assert main(["client", "ping", "127.0.0.1", *arguments]) == 1
    assert f"No server at ws://127.0.0.1:{free_port}" in capsys.readouterr().err
    assert main(["client", "ping", "--preset", "debug"]) == 1
    assert "no robot with an example observation" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:  # the help
        main(["client"])
    assert stop.value.code == 0
    assert "ping" in capsys.readouterr().out


def test_ping_shows_the_server_s_refusal(capsys):
    policy = Doubles()
    policy._infer = lambda _: {}.pop("state")
    with running_server(policy) as server:
        assert main(["client", "ping", server.url]) == 1
    error = capsys.readouterr().err
    assert "does not say which observation it expects" in error
    assert "Traceback" not in error


def test_ping_shows_what_the_policy_expects(capsys, monkeypatch):
    monkeypatch.setattr("piston.cli.client.console", lambda: Console(width=80))
    with running_server(random_policy("pi05_droid")) as server:
        assert main(["client", "ping", server.url, "--count", "1"]) == 0
    shown = capsys.readouterr().out
    for word in ("DROID", "observation/exterior_image_1_left", "uint8 (any, any, 3)", "joint_6"):
        assert word in shown
    assert "float32 (15, 8)" in shown
    assert max(map(len, shown.splitlines())) <= 80


# One preset for each registered robot; `tests/cli/test_init_robot.py` has those of files.
EACH_ROBOT = {
    type(preset.data).__name__: name
    for name in presets.names()
    if (preset := presets.get(name)).data.robot not in ("fake", "your robot (--robot)")
    and "" in preset.data.entries
}


@pytest.mark.parametrize("preset", EACH_ROBOT.values(), ids=EACH_ROBOT.keys())
def test_the_example_observation_of_every_robot_is_answered(preset):
    with running_server(random_policy(preset)) as server, Client(server.url) as client:
        example = client.example_observation()
        actions = client.infer(example)["actions"]
        assert list(actions.shape) == client.metadata["actions"]["shape"]
        assert len(client.metadata["actions"]["names"]) == actions.shape[-1]
        for path, entry in leaves(client.metadata["observation"]):
            smaller = copy.deepcopy(example)
            inner = functools.reduce(operator.getitem, path[:-1], smaller)
            del inner[path[-1]]
            if not entry["required"]:
                client.infer(smaller)
                continue
            with pytest.raises(ServerError, match=f"{path[-1]}.* is missing|prompt"):
                client.infer(smaller)


def test_every_preset_of_a_robot_has_an_example():
    for name in presets.names():
        preset = presets.get(name)
        for robot, factory in preset.data.entries.items():
            if factory.robot not in ("fake", "your robot (--robot)", "pictures with questions"):
                assert example_of(preset, robot)
