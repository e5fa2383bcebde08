"""Connections that say nothing, or only half of it, keep neither robots nor health checks out."""

import asyncio
import gc
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as open_websocket

from piston.serving import Server, ServerConfig, batching
from piston_client import Client, ServerError
from piston_client.codec import pack, unpack

# Takes the limit of open files (0: as it is) and options of the server as `name=value`.
SCRIPT = """
import logging, sys
import numpy as np
from pathlib import Path
from piston.serving import ServerConfig, run_server

class Policy:
    metadata = {}
    def prepare(self, observation):
        if "bad" in observation:
            raise ValueError("a bad observation")
        return observation
    def infer_batch(self, observations):
        if any("die" in observation for observation in observations):
            import ctypes, threading
            # Raised when the thread takes its next call.
            thread = ctypes.c_ulong(threading.get_ident())
            die = lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(
                thread, ctypes.py_object(SystemExit))
            threading.Timer(0.2, die).start()
        return [{"actions": np.zeros((2, 2))} for _ in observations]

if limit := int(sys.argv[1]):
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
options = dict(option.split("=") for option in sys.argv[2:])
options |= {name: int(value) for name, value in options.items() if value.isdigit()}
options |= {name: Path(value) for name, value in options.items() if name.startswith("tls")}
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
run_server(Policy(), ServerConfig(port=0, **options))
"""


@pytest.fixture
def launch():
    """`launch(limit, "option=value", …)` is a server process and its port."""
    processes = []

    def launched(limit: int = 0, *options: str) -> tuple[subprocess.Popen, int]:
        command = [sys.executable, "-c", SCRIPT, str(limit), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, **pipes)
        processes.append(process)
        port = 0
        for line in process.stdout:
            if "Listening at" in line:
                port = int(line.split(",")[0].rpartition(":")[2])
            if "Ready" in line:
                break
        return process, port

    yield launched
    for process in processes:
        process.kill()
        process.communicate()


def silent(server, count: int) -> list:
    websockets = [open_websocket(server.url).__enter__() for _ in range(count)]
    for websocket in websockets:
        websocket.recv()
    return websockets


def test_silent_connections_do_not_keep_a_robot_out(start, policy, observe):
    server = start(policy, max_connections=4, idle_timeout=0.3)
    websockets = silent(server, 4)
    with pytest.raises(InvalidStatus, match="503"):
        open_websocket(server.url)
    began = time.monotonic()
    with Client(server.url) as client:
        assert client.infer(observe())["actions"].shape == (5, 4)
        assert time.monotonic() - began < 3
        # The connection that has been silent for longest was closed, and no other.
        with pytest.raises(ConnectionClosed, match=r"1013.*idle for \d+ s, and another robot"):
            websockets[0].recv(timeout=5)
        assert len(server._sessions) == 4
        with pytest.raises(TimeoutError):
            websockets[1].recv(timeout=0.05)
    for websocket in websockets:
        websocket.close()


def test_a_robot_that_pauses_is_closed_last_and_comes_back(start, policy, observe):
    server = start(policy, max_connections=2, idle_timeout=0.2)
    with Client(server.url) as robot:
        robot.infer(observe())
        (websocket,) = silent(server, 1)
        time.sleep(0.3)
        with Client(server.url) as second:
            with pytest.raises(ConnectionClosed, match="idle for"):
                websocket.recv(timeout=5)
            second.infer(observe())
            time.sleep(0.3)
            with Client(server.url) as third:
                third.infer(observe())
                # Its connection was closed; it takes that of the second robot, which is idle.
                time.sleep(0.3)
                assert robot.infer(observe(3))["actions"].shape == (5, 4)
                assert len(server._sessions) == 2


def test_a_robot_that_waits_for_its_answer_is_not_idle(start, policy, observe):
    policy.gate = threading.Event()
    server = start(policy, max_connections=1, idle_timeout=0.1)
    answers = []
    with Client(server.url) as robot:
        asking = threading.Thread(target=lambda: answers.append(robot.infer(observe())))
        asking.start()
        policy.began.acquire()
        time.sleep(0.2)
        with pytest.raises(InvalidStatus, match="503"):
            open_websocket(server.url)
        policy.gate.set()
        asking.join(5)
    assert answers[0]["actions"].shape == (5, 4)


def test_a_robot_that_waits_for_the_warm_up_is_not_idle(policy, observe):
    warm = threading.Event()
    server = Server(
        policy, ServerConfig(port=0, max_connections=1, idle_timeout=0.1), warm_up=warm.wait
    )
    serving = threading.Thread(target=lambda: asyncio.run(server.run()))
    serving.start()
    while server.port == 0:
        time.sleep(0.01)
    with open_websocket(server.url) as robot:
        time.sleep(0.2)
        with pytest.raises(InvalidStatus, match="503"):
            open_websocket(server.url)
        warm.set()
        robot.recv(timeout=5)
        robot.send(pack(observe()))
        assert "actions" in unpack(robot.recv(timeout=5))
    server.stop()
    serving.join(10)


def slowest_health_check(port: int, scheme: str, count: int = 20) -> float:
    """Seconds of the slowest of some health checks, each on a connection of its own."""
    context = ssl._create_unverified_context() if scheme == "https" else None
    seconds = []
    for _ in range(count):
        began = time.monotonic()
        url = f"{scheme}://127.0.0.1:{port}/healthz"
        with urllib.request.urlopen(url, timeout=10, context=context) as response:
            assert response.status == 200
        seconds.append(time.monotonic() - began)
    return max(seconds)


@pytest.mark.parametrize(
    ("begin", "has_tls"),
    [
        (b"GET / HTTP/1.1\r\nHost:", False),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", False),  # and does not hang up
        (b"", False),
        (b"\x16\x03\x01\x02\x00", True),
    ],
)
def test_half_handshakes_do_not_keep_health_checks_out(launch, certificate, begin, has_tls):
    options = [f"tls_certificate={certificate[0]}", f"tls_key={certificate[1]}"]
    process, port = launch(160, "max_connections=8", *(options if has_tls else []))
    halves = []
    for _ in range(200):
        halves.append(socket.create_connection(("127.0.0.1", port)))
        halves[-1].sendall(begin)
    assert slowest_health_check(port, "https" if has_tls else "http") < 1.0
    scheme, ca_file = ("wss", certificate[0]) if has_tls else ("ws", None)
    with Client(f"{scheme}://127.0.0.1:{port}", ca_file=ca_file) as client:
        assert client.infer({})["actions"].shape == (2, 2)
    for half in halves:
        half.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_failed_tls_handshakes_are_counted_no_longer(start, policy, observe, certificate):
    server = start(policy, tls_certificate=certificate[0], tls_key=certificate[1])
    for begin in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(begin)
            time.sleep(0.05)
    # This client does not trust the certificate.
    with pytest.raises(ssl.SSLError):
        open_websocket(server.url)
    with Client(server.url, ca_file=certificate[0]) as client:
        assert client.infer(observe())["actions"].shape == (5, 4)
        assert len(server._sessions) == 1
    deadline = time.monotonic() + 5
    while server._sessions or len(server._handshakes):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_limit_of_open_files_that_is_too_small_is_an_error(launch):
    process, _ = launch(100, "max_connections=64")
    assert process.wait(5) != 0
    error = process.stderr.read()
    assert "may open 100 files; 64 connections (max_connections) need 1" in error
    assert "ulimit -n" in error


def test_a_thread_that_is_not_alive_ends_the_server(launch):
    process, port = launch()
    with Client("127.0.0.1", port) as client:
        client.infer({"die": 1})
        time.sleep(0.4)
        with pytest.raises(ServerError, match="inference thread has ended: .*not alive"):
            client.infer({})
    assert process.wait(10) != 0
    assert "PolicyThreadEnded: The inference thread has ended" in process.stderr.read()


def test_the_health_check_sees_that_the_thread_is_not_alive(start, policy, get, monkeypatch):
    monkeypatch.setattr(batching, "_SECONDS_BETWEEN_LOOKS", 60.0)
    server = start(policy)
    assert get(server.port, "/healthz")[0] == 200
    # What a thread is told when its `Worker` is not needed any more.
    server._batcher._worker._calls.put(None)
    server._batcher._worker._thread.join(5)
    status, text = get(server.port, "/healthz")
    assert (status, text) == (503, "The inference thread has ended.\n")


LARGE = 6_000_000


def answered(websocket, **more) -> None:
    websocket.send(pack({"large": np.zeros(LARGE, np.uint8), **more}))
    websocket.recv(timeout=20)


def unanswered(websocket) -> None:
    websocket.send(pack({"large": np.zeros(LARGE, np.uint8)}))
    websocket.socket.shutdown(socket.SHUT_RDWR)


def half_sent(websocket) -> None:
    header = b"\x82\xff" + (2 * LARGE).to_bytes(8) + bytes(4)
    websocket.socket.sendall(header + bytes(LARGE))
    websocket.socket.shutdown(socket.SHUT_RDWR)


ENDS = {
    "answered": answered,
    "refused by the policy": lambda websocket: answered(websocket, bad=1),
    "not a request": lambda websocket: (websocket.send(bytes(LARGE)), websocket.recv(timeout=20)),
    "unanswered": unanswered,
    "half sent": half_sent,
    "silent": lambda _: None,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_closed_connection_leaves_nothing_to_the_garbage_collector(start, end, monkeypatch):
    class Policy:
        def __init__(self):
            self.metadata = {}

        def prepare(self, observation):
            if "bad" in observation:
                raise ValueError("a bad observation")
            return observation

        def infer_batch(self, observations):
            return [{} for _ in observations]

    server = start(Policy())
    monkeypatch.setattr(gc, "garbage", [])
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with open_websocket(server.url) as websocket:
                websocket.recv()
                end(websocket)
        deadline = time.monotonic() + 5
        while server._sessions or len(server._handshakes):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        modules = [type(found).__module__ for found in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    ours = ("piston.", "websockets.server", "websockets.asyncio", "websockets.frames")
    assert [module for module in modules if module.startswith(ours)] == []


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see memory")
def test_the_memory_of_closed_connections_is_returned(launch):
    process, port = launch()

    def resident() -> float:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def connect(end) -> None:
        with open_websocket(f"ws://127.0.0.1:{port}", compression=None) as websocket:
            websocket.recv()
            end(websocket)

    def crowd() -> float:
        """Return the largest memory while many connections come and go at the same time."""
        ends = list(ENDS.values()) * 8
        threads = [threading.Thread(target=connect, args=(end,)) for end in ends]
        for thread in threads:
            thread.start()
        peak = 0.0
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, resident())
            time.sleep(0.002)
        return peak

    before = resident()
    for _ in range(2):
        assert crowd() > before + 40
        deadline = time.monotonic() + 5
        # Two threads decode messages, and glibc keeps up to 32 MB for each.
        while (after := resident()) > before + 65:
            assert time.monotonic() < deadline, f"{before:.0f} MB before, {after:.0f} MB after"
            time.sleep(0.1)
