"""SIGTERM to a server process: what is in flight is finished, then it exits with 0."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

SCRIPT = """
import logging, sys, time
import numpy as np
from piston.serving import ServerConfig, run_server

class Slow:
    metadata = {}
    def infer_batch(self, observations):
        print("began", flush=True)
        time.sleep(float(sys.argv[1]))
        return [{"actions": np.full((2, 2), observation["n"])} for observation in observations]

def warm_up():
    time.sleep(float(sys.argv[2]))

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
run_server(Slow(), ServerConfig(port=0, shutdown_timeout_s=5), warm_up=warm_up)
print("returned", flush=True)
"""


@pytest.fixture
def launch():
    processes = []

    def launched(inference: float, warm_up: float = 0.0) -> tuple[subprocess.Popen, int]:
        command = [sys.executable, "-c", SCRIPT, str(inference), str(warm_up)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process, int(wait_for(process, "Listening at").split(",")[0].rpartition(":")[2])

    yield launched
    for process in processes:
        process.kill()
        process.wait()


def wait_for(process: subprocess.Popen, text: str) -> str:
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the process ended without saying {text!r}")


def accepts_connections(port: int) -> bool:
    try:
        connect(f"ws://127.0.0.1:{port}", open_timeout=5).close()
    except (OSError, WebSocketException):
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_in_flight_is_finished(launch, number):
    process, port = launch(inference=0.5)
    wait_for(process, "Ready")
    replies = []
    client = WebsocketClientPolicy("127.0.0.1", port)
    idle = WebsocketClientPolicy("127.0.0.1", port)
    asking = threading.Thread(target=lambda: replies.append(client.infer({"n": 7})))
    asking.start()
    wait_for(process, "began")
    process.send_signal(number)
    wait_for(process, "finishing pending requests")
    deadline = time.monotonic() + 5
    while accepts_connections(port):  # the server stops a moment after it says so
        assert time.monotonic() < deadline
    asking.join(5)
    assert replies[0]["actions"].tolist() == [[7, 7], [7, 7]]
    assert process.wait(5) == 0
    assert "returned" in process.stdout.read()
    with pytest.raises(Exception, match="shutting down"):
        idle.infer({"n": 8})


def test_stopped_while_warming_up(launch):
    process, _ = launch(inference=0.0, warm_up=1.0)
    process.terminate()
    assert process.wait(10) == 0


def test_a_second_signal_does_not_wait(launch):
    process, port = launch(inference=60.0)
    wait_for(process, "Ready")
    client = WebsocketClientPolicy("127.0.0.1", port)
    client._ws.send(b"\x81\xa1n\x00")
    wait_for(process, "began")
    began = time.monotonic()
    process.terminate()
    wait_for(process, "finishing pending requests")
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM
    assert time.monotonic() - began < 5
