"""A server in a process of its own, and clients of several characters that may run in others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket

from piston.serving import Server, ServerConfig
from piston_client import Client, ServerBusy, ServerError
from piston_client.codec import pack, unpack

DIM = 14


class SteadyPolicy:
    """Every batch takes the same time; the actions say which observation they answer."""

    metadata: Mapping[str, Any] = {}

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def prepare(self, observation: dict[str, Any]) -> dict[str, Any]:
        state = observation["state"]
        if not isinstance(state, np.ndarray) or state.shape != (DIM,) or state.dtype.kind != "f":
            raise ValueError(f"The state is no float array of shape ({DIM},).")
        return observation

    def infer_batch(self, observations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        time.sleep(self._seconds)
        return [{"actions": np.tile(one["state"], (50, 1))} for one in observations]


def serve(pipe: Connection, seconds: float, config: ServerConfig, max_files: int = 0) -> None:
    """Serve in the main thread, as `piston serve` does, until the pipe says something."""
    if max_files:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    # Clients that are refused are what is tried here.
    logging.getLogger("piston").setLevel(logging.ERROR)
    server = Server(SteadyPolicy(seconds), config)

    def control() -> None:
        server.ready.wait()
        pipe.send(server.port)
        with contextlib.suppress(EOFError):
            pipe.recv()
        server.stop()

    threading.Thread(target=control, daemon=True).start()
    asyncio.run(server.run())


def observe(number: float, pixels: int = 64) -> dict[str, Any]:
    image = np.zeros((pixels, pixels, 3), np.uint8)
    state = np.full(DIM, number, np.float64)
    return {"images": {"cam_high": image}, "state": state, "prompt": "go"}


def open_raw(port: int) -> ClientConnection:
    """Connect without a client, to send what a client would not."""
    websocket = open_websocket(f"ws://127.0.0.1:{port}", compression=None).__enter__()
    websocket.recv(timeout=20)
    return websocket


@dataclasses.dataclass
class Answers:
    """What a client was told."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    num_busy: int = 0
    num_errors: int = 0
    num_swapped: int = 0

    def __add__(self, other: Answers) -> Answers:
        return Answers(
            self.seconds + other.seconds,
            self.num_busy + other.num_busy,
            self.num_errors + other.num_errors,
            self.num_swapped + other.num_swapped,
        )


def ask(port: int, seconds: float, name: int, pause: float = 0.0) -> Answers:
    """A good client: asks, looks whether the reply is its own, asks again."""
    answers, deadline = Answers(), time.monotonic() + seconds
    with Client("127.0.0.1", port, timeout=30.0) as client:
        # No two requests of any client have the same number.
        for number in itertools.count(name * 1e9):
            if time.monotonic() > deadline:
                return answers
            began = time.perf_counter()
            try:
                actions = client.infer(observe(number))["actions"]
            except ServerBusy:
                answers.num_busy += 1
            except (ServerError, OSError):
                answers.num_errors += 1
            else:
                answers.seconds.append(time.perf_counter() - began)
                answers.num_swapped += not (actions == number).all()
            time.sleep(pause)
    raise AssertionError


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that are made at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        results[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def good_clients(port: int, seconds: float, count: int, pause: float) -> Answers:
    """Several good clients, for a process of its own."""
    calls = [lambda name=name: ask(port, seconds, name, pause) for name in range(count)]
    return sum(in_threads(calls), Answers())


def ask_badly(port: int, seconds: float) -> int:
    """A robot whose observations are wrong, and which asks again at once; return how often."""
    deadline, count = time.monotonic() + seconds, 0
    wrong = {**observe(0.0), "state": np.zeros(3)}
    with Client("127.0.0.1", port, timeout=30.0) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(ServerError):
                client.infer(wrong)
            count += 1
    return count


def ask_greedily(port: int, seconds: float) -> int:
    """A client that always has eight requests under way; return the number of swapped replies."""
    deadline, sent, swapped = time.monotonic() + seconds, itertools.count(), 0
    with open_raw(port) as websocket:
        for _ in range(8):
            _send_numbered(websocket, next(sent))
        while time.monotonic() < deadline:
            reply = unpack(websocket.recv(timeout=20))
            if "error" not in reply:
                swapped += not (reply["actions"] == -reply["request_id"]).all()
            else:
                time.sleep(0.001)
            _send_numbered(websocket, next(sent))
    return swapped


def _send_numbered(websocket: ClientConnection, number: int) -> None:
    websocket.send(pack({**observe(-number), "request_id": number}))


def serve_nothing(pipe: Connection) -> None:
    """Answer every HTTP request at once: what a health check takes on this machine at best."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nOK\n")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


class Health(NamedTuple):
    """How long health checks took, infinite if one failed; and those of the idle server."""

    seconds: list[float]
    idle: list[float]


def check_health(port: int, idle_port: int, seconds: float, pause: float = 0.02) -> Health:
    """Check a server and the idle one in turns."""
    deadline, health = time.monotonic() + seconds, Health([], [])
    while time.monotonic() < deadline:
        for found, asked in ((health.seconds, port), (health.idle, idle_port)):
            began = time.perf_counter()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{asked}/healthz", timeout=10) as one:
                    one.read()
                found.append(time.perf_counter() - began)
            except OSError:
                found.append(float("inf"))
            time.sleep(pause / 2)
    return health


def mutated(message: bytes, random: np.random.Generator) -> bytes:
    """Return a message with a few bytes changed, removed or inserted."""
    data = bytearray(message)
    for _ in range(random.integers(1, 6)):
        # Most of a message is an image, where a change does nothing: prefer the beginning.
        where = int(random.choice([random.integers(400), random.integers(len(data) + 1)]))
        where, length = min(where, len(data)), int(random.integers(1, 9))
        end = where + length * int(random.integers(2))
        data[where:end] = random.bytes(length * int(random.integers(2)))
    return bytes(data)


def half_handshake(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: robot\r\n")
    return connection


def misbehave(port: int, seconds: float, seed: int) -> int:
    """Clients that come and go and do everything wrong, one after the other; return how many."""
    random, deadline, count = np.random.default_rng(seed), time.monotonic() + seconds, 0
    kept: list[socket.socket] = []
    valid = pack(observe(1.0))
    while time.monotonic() < deadline:
        count += 1
        with contextlib.suppress(OSError, ConnectionClosed, WebSocketException, EOFError):
            match random.integers(5):
                case 0:
                    kept = [*kept[-50:], half_handshake(port)]
                    continue
                case 1:
                    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
                        raw.sendall(random.bytes(1000))
                    continue
            with open_raw(port) as websocket:
                match random.integers(4):
                    case 0:
                        for _ in range(50):
                            websocket.send(mutated(valid, random))
                            websocket.recv(timeout=20)
                    case 1:
                        websocket.send(pack({"large": np.zeros(8_000_000, np.uint8)}))
                    case 2:
                        websocket.send(valid)
                        websocket.socket.shutdown(socket.SHUT_RDWR)
                    case 3:
                        websocket.socket.sendall(b"\xff" * 100)
        time.sleep(0.01)
    return count
