"""Attempts to break a server, which runs in a process of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from websockets.sync.client import connect as open_websocket

from piston.client.codec import pack, unpack
from piston.progress import Progress
from piston.serving import ServerConfig, running_server
from rows import Part, Row
from serve import resident_bytes, server_process

_DIM = 14
_MB = 2**20


class SteadyPolicy:
    """Every batch takes the same time; the actions say which observation they answer."""

    metadata: Mapping[str, Any] = {}

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def prepare(self, observation: dict[str, Any]) -> dict[str, Any]:
        state = observation["state"]
        if not isinstance(state, np.ndarray) or state.shape != (_DIM,) or state.dtype.kind != "f":
            raise ValueError(f"The state is no float array of shape ({_DIM},).")
        return observation

    def infer_batch(self, observations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        time.sleep(self._seconds)
        return [{"actions": np.tile(one["state"], (50, 1))} for one in observations]


def serve(pipe: Connection, seconds: float, config: ServerConfig) -> None:
    """Called in the server's process."""
    with running_server(SteadyPolicy(seconds), config) as server:
        pipe.send(server.port)
        pipe.recv()


def observe(number: float, pixels: int = 64) -> dict[str, Any]:
    image = np.zeros((pixels, pixels, 3), np.uint8)
    return {
        "images": {"cam_high": image},
        "state": np.full(_DIM, number, np.float32),
        "prompt": "go",
    }


def mutated(message: bytes, random: np.random.Generator) -> bytes:
    """Return a message with a few bytes changed, removed or inserted."""
    data = bytearray(message)
    for _ in range(random.integers(1, 6)):
        # Most of a message is an image, where a change does nothing: prefer both ends.
        where = int(random.choice([random.integers(400), random.integers(len(data) + 1)]))
        where, length = min(where, len(data)), int(random.integers(1, 9))
        end = where + length * int(random.integers(2))
        data[where:end] = random.bytes(length * int(random.integers(2)))
    return bytes(data)


def fuzz(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Send damaged messages on one connection; every one of them is answered."""
    random, valid = np.random.default_rng(seed), pack(observe(1.0))
    began, count, kinds, longest = time.monotonic(), 0, {"internal": 0}, 0
    with (
        server_process(serve, 0.0, ServerConfig(port=0)) as (port, pid),
        open_websocket(f"ws://127.0.0.1:{port}", compression=None) as websocket,
    ):
        websocket.recv()
        early = 0.0
        while (passed := time.monotonic() - began) < seconds:
            messages = [mutated(valid, random) for _ in range(50)]
            messages += [random.bytes(int(random.integers(200))) for _ in range(50)]
            sending = threading.Thread(target=_send_all, args=(websocket, messages))
            sending.start()
            for _ in messages:
                reply = websocket.recv(timeout=20)
                if isinstance(reply, str):
                    kind = reply.partition(":")[0]
                    kinds[kind] = kinds.get(kind, 0) + 1
                    longest = max(longest, len(reply.encode()))
            sending.join()
            count += len(messages)
            if not early and passed > seconds / 4:
                early = resident_bytes(pid)
            progress(round(passed), None, f"{count:,} messages")
        growth = (resident_bytes(pid) - early) / _MB
        websocket.send(pack({**observe(3.0), "request_id": 1}))
        right = unpack(websocket.recv(timeout=5))["actions"][0, 0] == 3.0
    refused = sum(kinds.values())
    return [
        Row("damaged messages: a reply to each", count, f"{refused:,} refused", "all", True),
        Row("  internal errors", count, str(kinds["internal"]), "0", kinds["internal"] == 0),
        Row("  longest error reply", refused, f"{longest:,} B", "≤ 4,096 B", longest <= 4096),
        Row("  a good request afterwards", 1, str(right), "right reply", bool(right)),
        Row("  memory growth", count, f"{growth:.0f} MB", "< 10 MB", growth < 10),
    ]


def _send_all(websocket: Any, messages: list[bytes]) -> None:
    for message in messages:
        websocket.send(message)


PARTS = [Part("fuzz", fuzz, 60.0)]
