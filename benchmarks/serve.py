"""What a server adds to the time of its policy, and how it performs under load.

    overhead   one client, a policy that does nothing, three images: the round trip; beside it, in
               turns, that of the least server there can be, which says what the machine is up to;
               then the replies per second that several clients get from each, in turns as well
    load       many clients, a tiny model: replies per second without and with batching; every
               reply is compared with the one that the same observation got when it was alone

Servers run in processes of their own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import importlib
import importlib.util
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import websockets.asyncio.server
from rich.table import Table
from websockets.exceptions import ConnectionClosed

from common import main
from piston import presets
from piston.cli.client import example_of
from piston.cli.console import console
from piston.serving import ServerConfig, running_server
from piston_client import Client, ServerError
from piston_client.codec import pack, unpack

_ACTIONS = np.zeros((50, 14), np.float32)
_CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
_WARM_UP = 20
# Each client asks with a few observations of its own, in turns.
_NUM_OBSERVATIONS = 4
# One by one and batched, the sums of a network are added in another order.
_TOLERANCE = 1e-4

Infer = Callable[[dict[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a policy server adds to its policy, and how it holds up under load."""

    # Whose robot and transforms the tiny model of the load test has.
    preset: str = "pi0_aloha_sim"
    clients: int = 16
    # Of load, once without and once with batching; 0 leaves the load test out.
    seconds: float = 60.0
    max_batch: int = 16
    # Round trips of the overhead; 0 leaves it out.
    round_trips: int = 1000
    # Clients that ask both servers at once, in turns of 0.3 s.
    crowds: tuple[int, ...] = (8, 16)
    # Turns of each crowd and server.
    turns: int = 20
    # Of the model; the clients need cores as well.
    threads: int = 1


def run(options: Arguments) -> int:
    if options.round_trips:
        with (
            server_process(_serve_idle) as (port, _),
            server_process(_serve_least) as (least_port, _),
        ):
            ports = {"this server": port, "least server": least_port}
            console().print(_overhead(ports, options.round_trips))
            console().print(_rates(ports, options.crowds, options.turns))
    if not options.seconds:
        return 0
    loads = [_load(options, max_batch) for max_batch in (1, options.max_batch)]
    console().print(_load_table(options, loads))
    return 0 if all(load.num_errors == load.num_wrong == 0 for load in loads) else 1


class Idle:
    """A policy that does nothing: all that remains is the server."""

    metadata: Mapping[str, Any] = {}

    def infer_batch(self, observations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"actions": _ACTIONS} for _ in observations]


def _three_images() -> dict[str, Any]:
    random = np.random.default_rng(0)
    images = {name: random.integers(256, size=(224, 224, 3), dtype=np.uint8) for name in _CAMERAS}
    return {"images": images, "state": np.zeros(14, np.float32), "prompt": "do something"}


def _overhead(ports: Mapping[str, int], num_round_trips: int) -> Table:
    observation = _three_images()
    times: dict[str, list[float]] = {which: [] for which in ports}
    clients = {which: _public_client(port) for which, port in ports.items()}
    for number in range(-_WARM_UP, num_round_trips):
        for which, (_, infer) in clients.items():
            began = time.perf_counter()
            reply = infer(observation)
            milliseconds = 1e3 * (time.perf_counter() - began)
            if number >= 0:
                times[which].append(milliseconds - reply["server_timing"]["infer_ms"])
    name = clients["this server"][0]
    title = f"Overhead, ms: {num_round_trips} round trips with three images through {name}"
    table = Table("", "median", "90 %", "99 %", "worst", title=title, title_justify="left")
    for which, found in times.items():
        table.add_row(which, *(f"{value:.2f}" for value in np.percentile(found, [50, 90, 99, 100])))
    return table


def _rates(ports: Mapping[str, int], crowds: tuple[int, ...], num_turns: int) -> Table:
    """Replies per second of several clients, which are threads of this process."""
    observation = _three_images()
    title = "Replies per second with an idle policy and three images, medians"
    table = Table("clients", *ports, "ratio", title=title, title_justify="left")

    def ask(infer: Infer, deadline: float) -> int:
        count = 0
        while time.monotonic() < deadline:
            infer(observation)
            count += 1
        return count

    for size in crowds:
        rates: dict[str, list[float]] = {which: [] for which in ports}
        clients = {
            which: [_public_client(port)[1] for _ in range(size)] for which, port in ports.items()
        }
        with concurrent.futures.ThreadPoolExecutor(size) as threads:
            for turn in range(num_turns):
                for which in list(ports)[:: 1 if turn % 2 else -1]:
                    began = time.monotonic()
                    deadlines = [began + 0.3] * size
                    total = sum(threads.map(ask, clients[which], deadlines))
                    rates[which].append(total / (time.monotonic() - began))
        ratio = float(np.median(np.divide(*rates.values())))
        medians = [f"{np.median(found):.0f}" for found in rates.values()]
        table.add_row(str(size), *medians, f"{ratio:.2f}")
    return table


def _public_client(port: int) -> tuple[str, Infer]:
    """openpi-client where it is installed, because that is what robots out there use."""
    if importlib.util.find_spec("openpi_client") is None:
        return "piston_client", Client("127.0.0.1", port).infer
    public = importlib.import_module("openpi_client.websocket_client_policy")
    return "openpi-client", public.WebsocketClientPolicy("127.0.0.1", port).infer


def _serve_idle(pipe: Connection) -> None:
    with running_server(Idle()) as server:
        pipe.send(server.port)
        pipe.recv()


def _serve_least(pipe: Connection) -> None:
    """Decode, encode, send: no thread, no queue, no checks beyond the codec's."""

    async def answer(connection: websockets.asyncio.server.ServerConnection) -> None:
        await connection.send(pack({}))
        with contextlib.suppress(ConnectionClosed):
            async for message in connection:
                assert isinstance(message, bytes)
                unpack(message)
                reply = {"actions": _ACTIONS, "server_timing": {"infer_ms": 0.0}}
                await connection.send(pack(reply))

    async def serve() -> None:
        server = await websockets.asyncio.server.serve(
            answer, "127.0.0.1", 0, compression=None, max_size=None
        )
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


@dataclasses.dataclass
class _Load:
    """What happened under load; clients write to it from their threads."""

    max_batch: int
    seconds: float
    latencies: list[float] = dataclasses.field(default_factory=list)
    batch_sizes: list[int] = dataclasses.field(default_factory=list)
    # The largest difference of each reply to what its observation got when it was alone.
    differences: list[float] = dataclasses.field(default_factory=list)
    errors: list[Exception] = dataclasses.field(default_factory=list)
    # Bytes that the server held, from beginning to end; NaN where that cannot be known.
    memory: list[float] = dataclasses.field(default_factory=list)

    @property
    def bytes_grown(self) -> float:
        """From the second quarter of the time to the last: what a batch needs comes and goes."""
        quarter = len(self.memory) // 4
        early, late = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
        return float(np.median(late) - np.median(early))

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    @property
    def num_wrong(self) -> int:
        return sum(difference > _TOLERANCE for difference in self.differences)


def _load(options: Arguments, max_batch: int) -> _Load:
    config = ServerConfig(port=0, max_batch=max_batch, max_queue=4 * options.clients)
    load = _Load(max_batch, options.seconds)
    with server_process(_serve_tiny, options.preset, config, options.threads) as (port, pid):
        observations = _observations(options)
        with Client("127.0.0.1", port, timeout=60.0) as alone:
            expected = [[alone.infer(one)["actions"] for one in own] for own in observations]
        deadline = time.monotonic() + options.seconds
        clients = [
            threading.Thread(target=_drive, args=(port, own, wanted, deadline, load))
            for own, wanted in zip(observations, expected, strict=True)
        ]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            load.memory.append(resident_bytes(pid))
            time.sleep(options.seconds / 200)
    return load


def _observations(options: Arguments) -> list[list[dict[str, Any]]]:
    """For each client some that nobody else sends."""
    example = example_of(presets.get(options.preset))
    seeds = np.arange(options.clients * _NUM_OBSERVATIONS).reshape(options.clients, -1)
    return [[{**example, "seed": seed} for seed in own] for own in seeds.tolist()]


def _drive(
    port: int,
    observations: list[dict[str, Any]],
    expected: list[np.ndarray],
    deadline: float,
    load: _Load,
) -> None:
    """One client: ask, compare, ask again."""
    with Client("127.0.0.1", port, timeout=60.0) as client:
        number = 0
        while time.monotonic() < deadline:
            place = number % len(observations)
            number += 1
            began = time.perf_counter()
            try:
                reply = client.infer(observations[place])
            except (ServerError, OSError) as error:
                load.errors.append(error)
                continue
            load.latencies.append(time.perf_counter() - began)
            load.batch_sizes.append(reply["server_timing"]["batch_size"])
            load.differences.append(float(np.abs(reply["actions"] - expected[place]).max()))


def _serve_tiny(pipe: Connection, preset: str, config: ServerConfig, threads: int) -> None:
    # Here, because the other processes start sooner without.
    import torch

    from piston.inference.loading import random_policy

    torch.set_num_threads(threads)
    policy = random_policy(preset)
    example = example_of(presets.get(preset))

    def warm_up() -> None:
        # Every size that a batch may have: memory counts from when all of them have been seen.
        for size in range(config.max_batch, 0, -1):
            policy.infer_batch([example] * size)

    with running_server(policy, config, warm_up=warm_up) as server:
        pipe.send(server.port)
        pipe.recv()


def _load_table(options: Arguments, loads: list[_Load]) -> Table:
    title = (
        f"Load: {options.clients} clients, {options.seconds:g} s each, tiny model of "
        f"{options.preset}, threads: {options.threads}"
    )
    names = [
        "one by one" if load.max_batch == 1 else f"batches ≤ {load.max_batch}" for load in loads
    ]
    table = Table("", *names, title=title, title_justify="left")
    rows: dict[str, Callable[[_Load], str]] = {
        "replies per second": lambda load: f"{len(load.latencies) / load.seconds:.1f}",
        "requests per batch, mean": lambda load: f"{np.mean(load.batch_sizes):.1f}",
        "latency, median ms": lambda load: f"{1e3 * np.percentile(load.latencies, 50):.1f}",
        "latency, 99 % ms": lambda load: f"{1e3 * np.percentile(load.latencies, 99):.1f}",
        "errors": lambda load: f"{load.num_errors} {load.errors[:1] or ''}",
        "wrong or swapped replies": lambda load: str(load.num_wrong),
        "largest difference to one by one": lambda load: f"{max(load.differences):.1e}",
        "server's memory, mean MB": lambda load: f"{np.mean(load.memory) / 2**20:.0f}",
        "server's memory growth, MB": lambda load: f"{load.bytes_grown / 2**20:.0f}",
    }
    for name, show in rows.items():
        table.add_row(name, *(show(load) for load in loads))
    return table


def resident_bytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/statm")
    if not status.exists():
        return float("nan")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def server_process(serve: Callable[..., None], *args: Any) -> Iterator[tuple[int, int]]:
    """A server in a process of its own: its port and process id. It ends when told to."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *args), daemon=True)
    process.start()
    assert process.pid is not None
    # Closed here, so that a server that does not come up ends the wait for its port.
    theirs.close()
    try:
        try:
            port = ours.recv()
        except EOFError:
            raise OSError("A server did not come up; its process says why, above.") from None
        yield port, process.pid
        ours.send(None)
        process.join(10)
    finally:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main(run, Arguments)
