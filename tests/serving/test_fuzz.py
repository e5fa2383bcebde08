"""Ten thousand bad messages: the server lives, replies stay small, memory does not grow."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import hypothesis
import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st
from websockets.sync.client import connect as open_websocket

from piston.serving.protocol import BadRequest, decode_request
from piston_client.codec import pack, unpack

NUM_MESSAGES = 10_500


def mutated(message: bytes, rng: np.random.Generator) -> bytes:
    """A valid message with a few bytes changed, removed, inserted or repeated."""
    data = bytearray(message)
    for _ in range(rng.integers(1, 6)):
        where = int(rng.integers(0, len(data) + 1))
        length = int(rng.integers(1, 9))
        match rng.integers(0, 5):
            case 0:
                data[where : where + length] = rng.bytes(length)
            case 1:
                del data[where : where + length]
            case 2:
                data[where:where] = rng.bytes(length)
            case 3:
                data[where:where] = data[max(0, where - length) : where]
            case 4 if where > 0:
                del data[where:]
    return bytes(data)


def bad_messages(observation: dict) -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    valid = pack(observation)
    # The structure, without the bulk of an image, is where most of what can go wrong is.
    small = pack({"state": np.zeros(4), "prompt": "go", "list": [1, 2.5, None, {"a": b"b"}]})
    for number in range(NUM_MESSAGES):
        match number % 4:
            case 0:
                yield rng.bytes(int(rng.integers(0, 200)))
            case 1:
                yield mutated(valid, rng)
            case _:
                yield mutated(small, rng)


def is_refused(message: bytes) -> bool:
    """A message is taken or refused in a few words; any other exception fails the test."""
    try:
        decode_request(message)
    except BadRequest as error:
        if len(str(error)) > 2000:
            raise
        return True
    return False


def test_the_decoder_takes_or_refuses_and_nothing_else(observe, resident_bytes):
    num_refused = 0
    for number, message in enumerate(bad_messages(observe())):
        if number == NUM_MESSAGES // 4:
            before = resident_bytes()
        num_refused += is_refused(message)
    assert num_refused >= 10_000
    assert resident_bytes() - before < 10 * 2**20


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([b"__ndarray__", b"__npgeneric__", "<f4", "|O", [2**31, 2**31], -1]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.binary(max_size=3), inner, max_size=4)
        | st.fixed_dictionaries(
            {b"__ndarray__": inner, b"data": inner, b"dtype": inner, b"shape": inner}
        )
        | st.fixed_dictionaries({b"__npgeneric__": inner, b"data": inner, b"dtype": inner})
    ),
    max_leaves=20,
)


@hypothesis.given(values)
@hypothesis.settings(max_examples=150)
def test_any_msgpack_value_is_taken_or_refused(value):
    is_refused(msgpack.packb(value))


def test_the_server_outlives_them_all(start, policy, observe, resident_bytes):
    server = start(policy)
    messages = list(bad_messages(observe()))
    with open_websocket(server.url, compression=None) as websocket:
        websocket.recv()

        def send() -> None:
            for message in messages:
                websocket.send(message)

        sending = threading.Thread(target=send)
        sending.start()
        for number in range(NUM_MESSAGES):
            if number == NUM_MESSAGES // 4:
                before = resident_bytes()
            reply = websocket.recv(timeout=10)
            assert len(reply.encode() if isinstance(reply, str) else reply) <= 4096
        sending.join()
        growth = resident_bytes() - before
        websocket.send(pack(observe(3)))
        assert unpack(websocket.recv(timeout=5))["actions"].shape == (5, 4)
    assert growth < 10 * 2**20


@pytest.mark.parametrize("seed", range(3))
def test_raw_bytes_on_the_socket(start, connect, policy, observe, seed):
    """Before and after the handshake; most of it is no websocket at all."""
    server = start(policy)
    rng = np.random.default_rng(seed)
    for size in (1, 10, 1000, 100_000):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(rng.bytes(size))
        with open_websocket(server.url) as websocket:
            websocket.recv()
            # The server may have hung up already.
            with contextlib.suppress(OSError):
                websocket.socket.sendall(rng.bytes(size))
                websocket.socket.shutdown(socket.SHUT_WR)
    assert connect(server).infer(observe())["actions"].shape == (5, 4)
