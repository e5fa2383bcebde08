"""Attempts to break a server, or to hurt its other clients."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from websockets.sync.client import ClientConnection

from piston.progress import Progress
from piston.serving import ServerConfig
from piston_client import Client
from piston_client.codec import pack, unpack
from rows import Part, Row
from serve import resident_bytes, server_process
from servers import (
    Answers,
    Health,
    ask,
    ask_badly,
    ask_greedily,
    check_health,
    good_clients,
    half_handshake,
    in_threads,
    misbehave,
    mutated,
    observe,
    open_raw,
    serve,
    serve_nothing,
)

_MB = 2**20


def fuzz(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Send damaged messages on one connection; every one of them is answered."""
    random, valid = np.random.default_rng(seed), pack(observe(1.0))
    began, kinds, longest, early = time.monotonic(), {"internal": 0}, 0, 0.0
    count = answered = 0
    with (
        server_process(serve, 0.0, ServerConfig(port=0)) as (port, pid),
        open_raw(port) as websocket,
    ):
        while (passed := time.monotonic() - began) < seconds:
            messages = [mutated(valid, random) for _ in range(50)]
            messages += [random.bytes(int(random.integers(200))) for _ in range(50)]
            for reply in _exchange(websocket, messages):
                answered += 1
                if isinstance(reply, str):
                    kind = reply.partition(":")[0]
                    kinds[kind] = kinds.get(kind, 0) + 1
                    longest = max(longest, len(reply.encode()))
            count += len(messages)
            if not early and passed > seconds / 4:
                early = resident_bytes(pid)
            progress(round(passed), None, f"{count:,} messages")
        growth = (resident_bytes(pid) - early) / _MB
        websocket.send(pack({**observe(3.0), "request_id": 1}))
        is_right = unpack(websocket.recv(timeout=5))["actions"][0, 0] == 3.0
    refused, internal = sum(kinds.values()), kinds["internal"]
    answer = "right" if is_right else "wrong"
    told = f"{answered:,}, {refused:,} of them refusals"
    return [
        Row("damaged messages: a reply to each", count, told, "all", answered == count),
        Row("  internal errors", count, str(internal), "0", internal == 0),
        Row("  longest error reply", refused, f"{longest:,} B", "≤ 4,096 B", longest <= 4096),
        Row("  reply to a good request afterwards", 1, answer, "right", bool(is_right)),
        Row("  growth of memory", count, f"{growth:.0f} MB", "< 10 MB", growth < 10),
    ]


def _exchange(websocket: ClientConnection, messages: list[bytes]) -> Iterator[str | bytes]:
    """Send all messages, in a thread, and yield a reply to each."""

    def send() -> None:
        for message in messages:
            websocket.send(message)

    sending = threading.Thread(target=send)
    sending.start()
    for _ in messages:
        yield websocket.recv(timeout=20)
    sending.join()


def connections(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Silent connections, half-handshakes, and large messages of clients that leave."""
    del seed
    return [
        _silent(progress),
        *_half_handshakes(seconds / 2, progress),
        _large_messages(seconds / 2, progress, done=round(seconds / 2)),
    ]


def _silent(progress: Progress) -> Row:
    config = ServerConfig(port=0, idle_timeout=2.0)
    with server_process(serve, 0.0, config) as (port, _), contextlib.ExitStack() as stack:
        for _ in range(config.max_connections):
            stack.enter_context(open_raw(port))
        began = time.monotonic()
        with Client("127.0.0.1", port, timeout=30.0) as client:
            client.infer(observe(1.0))
        waited = time.monotonic() - began
    progress(round(waited), None, "silent connections")
    name = "silent connections: a robot gets in after"
    return Row(name, config.max_connections, f"{waited:.1f} s", "< 5 s (limit 2 s)", waited < 5)


def _half_handshakes(seconds: float, progress: Progress) -> list[Row]:
    began, count, kept = time.monotonic(), 0, []
    with (
        server_process(serve, 0.0, ServerConfig(port=0, max_connections=16), 256) as (port, _),
        server_process(serve_nothing) as (idle_port, _),
        _processes() as pool,
    ):
        checks = pool.submit(check_health, port, idle_port, seconds)
        while not checks.done():
            kept = [*kept[-400:], half_handshake(port)]
            count += 1
            time.sleep(0.002)
            progress(round(time.monotonic() - began), None, f"{count:,} half-handshakes")
        health = checks.result()
        for connection in kept:
            connection.close()
        with Client("127.0.0.1", port) as client:
            client.infer(observe(1.0))
    return _health_rows("half-handshakes, 256 descriptors", count, health)


def _health_rows(name: str, count: int, health: Health) -> list[Row]:
    total, failed = len(health.seconds), int(np.isinf(health.seconds).sum())
    p99, idle = (1e3 * float(np.percentile(found, 99)) for found in health)
    result = f"{p99:.1f} ms; idle {idle:.1f} ms"
    return [
        Row(f"{name}: failed health checks", count, f"{failed} of {total:,}", "0", failed == 0),
        Row("  /healthz, 99 %; of an idle server", total, result, "< 50 ms", p99 < 50),
    ]


def _large_messages(seconds: float, progress: Progress, done: int) -> Row:
    """Twenty clients at once send 20 MB each and leave, some before the reply."""
    began, count, memory = time.monotonic(), 0, []
    message = pack({"large": np.zeros(20_000_000, np.uint8)})

    def leave(early: bool) -> None:
        websocket = open_raw(port)
        websocket.send(message)
        if early:
            websocket.socket.shutdown(2)
        else:
            websocket.recv(timeout=30)
        websocket.close()

    with server_process(serve, 0.0, ServerConfig(port=0)) as (port, pid):
        before = resident_bytes(pid) / _MB
        while (passed := time.monotonic() - began) < seconds or not memory:
            in_threads([lambda early=early: leave(early) for early in [False, True] * 10])
            count += 20
            time.sleep(2.5)
            memory.append(resident_bytes(pid) / _MB)
            progress(done + round(passed), None, f"{count:,} large messages")
    found = f"{before:.0f} → {memory[-1]:.0f} MB"
    # glibc keeps up to twice the largest block at the end of each thread's memory.
    is_flat = max(memory) - before < 100
    return Row("20 MB messages, 20 at once: memory", count, found, "< 100 MB more", is_flat)


def bad_client(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Seven good clients, in turns without and with a bad one beside them."""
    del seed
    turn = min(2.0, seconds / 6)
    rates: dict[bool, list[float]] = {False: [], True: []}
    began, num_bad, total = time.monotonic(), 0, Answers()
    with server_process(serve, 0.02, ServerConfig(port=0)) as (port, _), _processes() as pool:
        pool.submit(ask_badly, port, 0.1).result()  # start the process
        while (passed := time.monotonic() - began) < seconds:
            for is_beside in (False, True):
                beside = pool.submit(ask_badly, port, turn) if is_beside else None
                answers = good_clients(port, turn, 7, 0.0)
                rates[is_beside].append(len(answers.seconds) / turn)
                num_bad += beside.result() if beside is not None else 0
                total += answers
            progress(round(passed), None, f"{num_bad:,} bad requests")
    alone, beside_bad = (float(np.median(rates[is_beside])) for is_beside in (False, True))
    ratio = beside_bad / alone
    wrong = total.num_busy + total.num_errors + total.num_swapped
    found = f"{ratio:.2f} ({alone:.0f} → {beside_bad:.0f} replies/s)"
    return [
        Row("seven good clients beside a bad one: speed", num_bad, found, "≥ 0.9", ratio >= 0.9),
        Row("  their errors", len(total.seconds), str(wrong), "0", wrong == 0),
    ]


def greedy_clients(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Six clients that ask as much as they can, and two that ask one thing at a time."""
    del seed
    batch = 0.02
    with server_process(serve, batch, ServerConfig(port=0)) as (port, _), _processes() as pool:
        greedy = [pool.submit(ask_greedily, port, seconds + 2) for _ in range(6)]
        time.sleep(1.0)
        progress(0, None, "six greedy clients")
        first, second = in_threads([lambda name=name: ask(port, seconds, name) for name in (1, 2)])
        swapped = sum(one.result() for one in greedy)
    polite = first + second
    swapped += polite.num_swapped
    refused = polite.num_busy + polite.num_errors
    median, count = float(np.median(polite.seconds)), len(polite.seconds)
    name = "two polite clients beside six greedy ones"
    latency, limit = f"{1e3 * median:.0f} ms", f"< {5e3 * batch:.0f} ms (5 batches)"
    return [
        Row(f"{name}: refused", count, str(refused), "0", refused == 0),
        Row("  their latency, median", count, latency, limit, median < 5 * batch),
        Row("  swapped replies, all clients", count, str(swapped), "0", swapped == 0),
    ]


def soak(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Good, greedy and misbehaving clients together; health checks and memory meanwhile."""
    began, memory = time.monotonic(), []
    with (
        server_process(serve, 0.01, ServerConfig(port=0)) as (port, pid),
        server_process(serve_nothing) as (idle_port, _),
        _processes() as pool,
    ):
        good = pool.submit(good_clients, port, seconds, 4, 0.005)
        checks = pool.submit(check_health, port, idle_port, seconds)
        greedy = pool.submit(ask_greedily, port, seconds)
        bad = pool.submit(misbehave, port, seconds, seed)
        tasks: list[concurrent.futures.Future[Any]] = [good, checks, greedy, bad]
        while not all(task.done() for task in tasks):
            memory.append(resident_bytes(pid) / _MB)
            progress(round(time.monotonic() - began), None, f"{memory[-1]:.0f} MB")
            time.sleep(seconds / 300)
        answers, swapped = good.result(), greedy.result()
    swapped += answers.num_swapped
    wrong = answers.num_busy + answers.num_errors
    # A fifth of five minutes is one minute; large messages come and go, so medians are compared.
    fifth = max(1, len(memory) // 5)
    early, late = float(np.median(memory[fifth : 2 * fifth])), float(np.median(memory[-fifth:]))
    growth, count = f"{early:.0f} → {late:.0f} MB", len(answers.seconds)
    return [
        Row(f"soak of {seconds:.0f} s: swapped replies", count, str(swapped), "0", swapped == 0),
        Row("  errors of good clients", count, str(wrong), "0", wrong == 0),
        Row("  memory", len(memory), growth, "< 20 MB more", late - early < 20),
        *_health_rows("  beside bad clients", bad.result(), checks.result()),
    ]


@contextlib.contextmanager
def _processes() -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Clients in processes of their own, so that they do not wait for each other's Python."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(6, mp_context=context) as pool:
        yield pool


PARTS = [
    Part("fuzz", fuzz, 30.0),
    Part("connections", connections, 40.0),
    Part("bad-client", bad_client, 40.0),
    Part("greedy-clients", greedy_clients, 20.0),
    Part("soak", soak, 300.0),
]
