"""Small real servers to talk to, and policies that say which chunk and step an action is from."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from piston_client.codec import pack, unpack

# Examples are small; a busy machine must not fail a property.
hypothesis.settings.register_profile(
    "piston", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("piston")

# A shell that runs the tests in the background makes all processes ignore Ctrl-C; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).parents[3]

METADATA = {
    "piston": {"piston": {"version": "test", "protocol": 1}, "reset_pose": [0.0, 1.0]},
    "openpi": {"reset_pose": [0.0, 1.0]},
}


class SmallServer:
    """Sends metadata, then hands every request to `answer(websocket, request)`."""

    def __init__(self, answer: Callable, *, metadata: dict, port: int = 0, **options) -> None:
        self.answer = answer
        self.metadata = metadata
        self.requests: list[dict] = []
        self.num_connections = 0
        self.headers: list[Headers] = []
        self._open: list[ServerConnection] = []
        self._server = serve(self._handle, "127.0.0.1", port, compression=None, **options)
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _handle(self, websocket: ServerConnection) -> None:
        self.num_connections += 1
        self.headers.append(websocket.request.headers)
        self._open.append(websocket)
        with contextlib.suppress(ConnectionClosed):
            websocket.send(pack(self.metadata))
            for message in websocket:
                request = unpack(message)
                self.requests.append(request)
                self.answer(websocket, request)

    def stop(self) -> None:
        self._server.shutdown()
        for websocket in self._open:
            with contextlib.suppress(OSError):
                websocket.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)


def echo(websocket: ServerConnection, request: dict) -> None:
    """Actions that say which observation they answer; Piston's number where one came."""
    reply = {"actions": np.full((4, 2), request["n"], np.float32)}
    if "request_id" in request:
        reply["request_id"] = request["request_id"]
    websocket.send(pack(reply))


@pytest.fixture
def start_server() -> Iterator[Callable[..., SmallServer]]:
    """`start_server(answer=echo, kind="piston", port=0)`; stopped after the test."""
    started: list[SmallServer] = []

    def start(answer: Callable = echo, *, kind: str = "piston", **options) -> SmallServer:
        started.append(SmallServer(answer, metadata=METADATA[kind], **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def small_reference() -> Path:
    """The numerical cases that travel with the repository."""
    return REPOSITORY / "tests" / "reference"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class ScriptedPolicy:
    """Chunk number c, step i is the action [100 c + i]; remembers what it was asked.

    `gate`, where set, makes a call wait until the test releases it.
    """

    def __init__(self, horizon: int = 8) -> None:
        self.horizon = horizon
        self.observations: list[dict] = []
        self.gate: threading.Semaphore | None = None
        self.error: Exception | None = None
        self.bias = 0.0
        self.num_resets = 0

    def infer(self, observation: dict) -> dict:
        self.observations.append(observation)
        number = len(self.observations) - 1
        if self.gate is not None:
            assert self.gate.acquire(timeout=5)
        if self.error is not None:
            raise self.error
        steps = np.arange(self.horizon, dtype=np.float32)
        return {"actions": (self.bias + 100 * number + steps)[:, np.newaxis], "number": number}

    def reset(self) -> None:
        self.num_resets += 1


@pytest.fixture
def make_policy() -> type[ScriptedPolicy]:
    return ScriptedPolicy
