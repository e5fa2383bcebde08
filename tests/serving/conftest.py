"""A small real policy behind a real server, driven by the public openpi-client."""

import contextlib
import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from piston.serving import Server, ServerConfig, running_server
from piston.transforms import compose, require_mapping, require_numbers

HORIZON, DIM = 5, 4


class SmallPolicy:
    """Actions that depend on state, images and noise, after checks like those of a real policy.

    `delay` is how long a batch takes; `gate`, where set, holds a batch until the test opens it.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.metadata = {"reset_pose": [0.0, 0.5, -0.5, 1.0]}
        self.delay = delay
        self.gate: threading.Event | None = None
        self.batch_sizes: list[int] = []
        self.began = threading.Semaphore(0)
        self._inputs = compose([self.check])

    def infer_batch(self, observations: list[dict]) -> list[dict]:
        self.batch_sizes.append(len(observations))
        self.began.release()
        if self.gate is not None:
            assert self.gate.wait(20)
        time.sleep(self.delay)
        return [self._act(self._inputs(observation)) for observation in observations]

    def check(self, observation: dict) -> dict:
        require_numbers(observation, "state", "SmallPolicy", DIM)
        for name, image in require_mapping(observation, "images", "SmallPolicy").items():
            if not isinstance(image, np.ndarray) or image.ndim != 3:
                raise ValueError(f"SmallPolicy: image {name!r} has the wrong shape.")
        if observation.get("fail"):
            raise RuntimeError("the device is on fire")
        return observation

    def _act(self, observation: dict) -> dict:
        light = sum(float(image.mean()) for image in observation["images"].values())
        noise = observation.get("noise", np.zeros((HORIZON, DIM), np.float32))
        actions = np.asarray(observation["state"]) + light + noise
        return {"actions": actions, "policy_timing": {"infer_ms": 0.1}}


@pytest.fixture
def policy() -> SmallPolicy:
    return SmallPolicy()


@pytest.fixture
def observe() -> Callable[..., dict]:
    def observation(number: float = 0.0, size: int = 8, **more) -> dict:
        rng = np.random.default_rng(size)
        image = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
        return {"images": {"top": image}, "state": np.full(DIM, number), "prompt": "go", **more}

    return observation


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """`start(policy, max_batch=…)` runs a server until the test ends."""
    with contextlib.ExitStack() as servers:

        def started(policy, *, warm_up=None, **options) -> Server:
            config = ServerConfig(**{"port": 0, **options})
            return servers.enter_context(running_server(policy, config, warm_up=warm_up))

        yield started


@pytest.fixture
def connect() -> Iterator[Callable[..., WebsocketClientPolicy]]:
    """`connect(server)` is the public client; hung up after the test."""
    clients: list[WebsocketClientPolicy] = []

    def connected(server: Server, **options) -> WebsocketClientPolicy:
        clients.append(WebsocketClientPolicy(server.url, **options))
        return clients[-1]

    yield connected
    for client in clients:
        client._ws.close()


@pytest.fixture
def get() -> Callable[..., tuple[int, str]]:
    """Status and text of a plain HTTP request."""

    def fetched(port: int, path: str, headers: dict | None = None) -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return response.status, response.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    return fetched


@pytest.fixture
def resident_bytes() -> Callable[[], int]:
    """Memory that this process holds, the server in it included."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("needs /proc to see memory")
    return lambda: int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate for this machine, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    outputs = ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run([*command.split(), *names, *outputs], check=True, capture_output=True)
    return paths
