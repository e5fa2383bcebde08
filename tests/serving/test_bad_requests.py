"""Whatever is wrong with a request is that request's error, and nobody else's."""

import contextlib
import logging
import pickle
import re
import struct
import threading
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.sync.client import connect as open_websocket

from piston.serving.protocol import BadRequest, decode_request, encode_error
from piston_client.codec import pack, unpack


class Exploding:
    """What a pickle would run on loading."""

    def __reduce__(self):
        return (Path.touch, (Path("unpickled"),))


def nested(depth: int) -> bytes:
    return b"\x81\xa1a" * depth + b"\xc0"


def array(**changes) -> bytes:
    parts = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f8", b"shape": [1]}
    return msgpack.packb({"state": {**parts, **{key.encode(): v for key, v in changes.items()}}})


BAD_MESSAGES = {
    "empty": (b"", "cut off"),
    "no msgpack": (b"\xc1\xff\x00", "cannot be read"),
    "cut off": (pack({"state": np.zeros(4)})[:-3], "cut off"),
    "more than one value": (pack({}) + pack({}), "bytes after its end"),
    "text frame": ('{"state": [0, 0, 0, 0]}', "text frame"),
    "no map": (pack([1, 2, 3]), "found a list"),
    "endless nesting": (nested(100_000), "nested deeper"),
    "huge list": (b"\xdd\xff\xff\xff\xff", "more than 5000 values"),
    "too many values": (pack({"state": [0] * 10_000}), "more than 5000 values"),
    "too many values in small lists": (pack({"s": [[0] * 90] * 90}), "more than 5000 values"),
    "extension type": (msgpack.packb({"state": msgpack.ExtType(5, b"x")}), "max_ext_len"),
    "object array": (array(dtype="|O"), "dtype"),
    "void array": (array(dtype="|V8"), "dtype"),
    "structured array": (array(dtype="[('f0', '<f8')]"), "dtype"),
    "shape and data differ": (array(shape=[1000]), "8000 bytes; found 8"),
    "negative shape": (array(shape=[-1]), "shape"),
    "missing key": (pack({"state": np.zeros(4)}), "'images' is missing"),
    "wrong shape": (pack({"state": np.zeros(5), "images": {}}), r"shape \(5,\)"),
    "wrong dtype": (pack({"state": np.array(["a"] * 4), "images": {}}), "dtype"),
    "NaN in an array": (pack({"state": np.full(4, np.nan), "images": {}}), "'state' holds NaN"),
    "infinity in a list": (pack({"state": [0, 0, [float("inf")]]}), r"'state\[2\]\[0\]' holds"),
    "request id that is no number": (pack({"request_id": "one"}), "whole number"),
}


@pytest.fixture
def websocket(start, policy):
    with open_websocket(start(policy).url, max_size=None, compression=None) as connection:
        connection.recv()
        yield connection


@pytest.mark.parametrize(("message", "says"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_an_error_for_this_request_and_a_reply_to_the_next(websocket, observe, message, says):
    websocket.send(message)
    error = websocket.recv(timeout=5)
    assert isinstance(error, str)
    assert error.startswith("bad_request: ")
    assert len(error.encode()) < 4096
    assert "Traceback" not in error
    assert re.search(says, error), error
    websocket.send(pack(observe(7)))
    assert unpack(websocket.recv(timeout=5))["actions"].shape == (5, 4)


def test_good_and_bad_mixed_on_one_connection(websocket, observe):
    for number, (message, _) in enumerate(list(BAD_MESSAGES.values()) * 3):
        websocket.send(message)
        websocket.send(pack(observe(number)))
    for _ in range(3 * len(BAD_MESSAGES)):
        assert isinstance(websocket.recv(timeout=5), str)
        assert isinstance(websocket.recv(timeout=5), bytes)


def test_nothing_is_unpickled(websocket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    payload = pickle.dumps(Exploding())
    legacy = {b"nd": True, b"type": "O", b"kind": b"O", b"shape": [1], b"data": payload}
    for message in (payload, pack({"state": payload}), msgpack.packb({"state": legacy})):
        websocket.send(message)
        assert isinstance(websocket.recv(timeout=5), str)
    assert not Path("unpickled").exists()


def test_an_error_with_an_id_is_a_map(websocket, observe):
    websocket.send(pack({"state": np.zeros(4), "request_id": 41}))
    reply = unpack(websocket.recv(timeout=5))
    assert reply["request_id"] == 41
    assert reply["error"]["type"] == "bad_request"
    # The note says which transform refused.
    assert "in transform check (1 of 1)" in reply["error"]["message"]
    websocket.send(pack(observe(request_id=2**63)))
    assert unpack(websocket.recv(timeout=5))["request_id"] == 2**63


def test_a_policy_that_fails_says_so_without_a_traceback(websocket, observe, caplog):
    with caplog.at_level(logging.ERROR):
        websocket.send(pack(observe(fail=True)))
        error = websocket.recv(timeout=5)
    assert error.startswith("internal: RuntimeError: the device is on fire")
    assert "Traceback" not in error
    assert "Traceback" in caplog.text


def test_debug_sends_the_traceback(start, policy, observe):
    with open_websocket(start(policy, debug=True).url) as websocket:
        websocket.recv()
        websocket.send(pack(observe(fail=True)))
        error = websocket.recv(timeout=5)
    assert "Traceback" in error
    assert len(error.encode()) < 4096


def test_a_result_that_cannot_be_sent(start, policy, observe):
    policy.infer_batch = lambda observations: [{"actions": object()} for _ in observations]
    with open_websocket(start(policy).url) as websocket:
        websocket.recv()
        websocket.send(pack(observe()))
        assert "result cannot be sent" in websocket.recv(timeout=5)


def test_a_bad_request_in_a_batch_fails_alone(start, connect, policy, observe):
    policy.gate = threading.Event()
    server = start(policy)
    clients = [connect(server) for _ in range(4)]
    observations = [observe(0), observe(1), {"state": np.zeros(4)}, observe(3)]
    replies: dict = {}

    def ask(number: int) -> None:
        try:
            replies[number] = clients[number].infer(observations[number])["actions"]
        except RuntimeError as error:
            replies[number] = str(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    threads[0].start()
    policy.began.acquire()
    for thread in threads[1:]:
        thread.start()
    while len(server._batcher) < 3:
        time.sleep(0.001)
    policy.gate.set()
    for thread in threads:
        thread.join(5)
    assert policy.batch_sizes[:2] == [1, 3]
    assert "'images' is missing" in replies[2]
    for number in (0, 1, 3):
        expected = policy._act(observations[number])["actions"]
        np.testing.assert_array_equal(replies[number], expected)


def frame(num_bytes: int, *, opcode: int = 0x2, final: bool = True) -> bytes:
    """The header of a frame; masked with zeros, which leave the payload as it is."""
    return struct.pack("!BBQ", opcode | (0x80 if final else 0), 0x80 | 127, num_bytes) + b"\0" * 4


def closed_for_size(websocket, *frames: bytes) -> str:
    """Send a message of these frames, if any; return the reason why the server closes.

    The server may do so before the last of them is sent.
    """
    with contextlib.suppress(ConnectionClosed):
        websocket.send(frames)
    with pytest.raises(ConnectionClosed) as caught:
        websocket.recv(timeout=20)
    assert caught.value.rcvd.code == CloseCode.MESSAGE_TOO_BIG
    return caught.value.rcvd.reason


def test_a_frame_of_two_gigabytes(start, connect, policy, observe, resident_bytes):
    """The size in its header is enough to refuse it; none of its bytes is held in memory."""
    server = start(policy)
    with open_websocket(server.url) as websocket:
        websocket.recv()
        before = resident_bytes()
        websocket.socket.sendall(frame(2**31) + bytes(2**20))
        reason = closed_for_size(websocket)
        assert f"{2**31} bytes" in reason
        assert f"{32 * 2**20} bytes" in reason
        assert resident_bytes() - before < 50 * 2**20
    assert connect(server).infer(observe())["actions"].shape == (5, 4)


def test_a_message_of_many_frames_has_the_same_limit(start, policy, observe):
    server = start(policy, max_message_bytes=100_000)
    good = pack(observe(1, 64))
    with open_websocket(server.url) as websocket:
        websocket.recv()
        websocket.send([good[:5000], good[5000:5001], b"", good[5001:]])
        assert isinstance(websocket.recv(timeout=5), bytes)
        assert "100000 bytes" in closed_for_size(websocket, *[bytes(40_000)] * 5)
    # One of its frames alone is too large.
    with open_websocket(server.url) as websocket:
        websocket.recv()
        reason = closed_for_size(websocket, bytes(100), bytes(150_000), bytes(100))
        assert "150000 bytes" in reason


def test_a_connection_that_ends_within_a_frame_disturbs_nobody(start, connect, policy, observe):
    server = start(policy)
    for size in (2**31, 2**20):
        with open_websocket(server.url) as websocket:
            websocket.recv()
            # The server may have hung up already.
            with contextlib.suppress(OSError):
                websocket.socket.sendall(frame(size) + bytes(1000))
                websocket.socket.shutdown(2)
    assert connect(server).infer(observe())["actions"].shape == (5, 4)


def test_broken_framing_ends_only_its_own_connection(start, connect, policy, observe):
    server = start(policy)
    with open_websocket(server.url) as websocket:
        websocket.recv()
        websocket.socket.sendall(b"\xff" * 100)
        with pytest.raises(ConnectionClosed):
            websocket.recv(timeout=5)
    assert connect(server).infer(observe())["actions"].shape == (5, 4)


def test_error_replies_stay_small_whatever_they_quote():
    for text in ("x" * 100_000, "€" * 100_000, "\ud800" * 10_000):
        for request_id in (None, 7):
            kind, reply = encode_error(BadRequest(text), request_id)
            assert kind == "bad_request"
            assert len(reply.encode() if isinstance(reply, str) else reply) <= 4096


def test_a_long_key_is_not_quoted_in_full():
    with pytest.raises(BadRequest) as caught:
        decode_request(pack({"k" * 10_000: float("nan")}))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"prompt": "go" * 5_001},
            "is a text of 10002 characters; expected at most 10000",
        ),
        ({"a": [{"b": "é" * 10_001}]}, r"'a\[0\]/b' is a text of 10001 characters"),
        ({"prompt": np.array("x" * 10_001)}, "'prompt' is a text of 10001 characters"),
        ({"prompt": np.array(b"x" * 10_001)}, "'prompt' is a text of 10001 characters"),
        ({"image": np.zeros((4_097, 1, 3), np.uint8)}, r"'image' has the shape \(4097, 1, 3\)"),
        ({"image": np.zeros((3, 0, 10**7), np.uint8)}, "expected sides of at most 4096"),
        ({"image": np.zeros((1, 4_097, 3))}, r"'image' has the shape \(1, 4097, 3\)"),
    ],
)
def test_long_texts_and_images_are_refused_when_they_are_decoded(part, message):
    with pytest.raises(BadRequest, match=message) as caught:
        decode_request(pack({**part, "request_id": 3}))
    assert caught.value.request_id == 3


def test_what_is_as_long_as_the_limits_is_accepted():
    image = np.zeros((4_096, 1, 3), np.uint8)
    part = {"prompt": "😀" * 10_000, "image": image, "state": np.zeros(100_000)}
    assert decode_request(pack(part))[0]["prompt"] == part["prompt"]


def test_a_huge_text_is_not_even_decoded():
    message = pack({"prompt": "é" * 15_000_000})
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        with pytest.raises(BadRequest, match="text of 30000000 bytes; expected at most 10000 char"):
            decode_request(message)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.01


def test_the_policy_does_not_see_what_is_too_long(start, connect, policy, observe):
    server = start(policy, max_text_length=5, max_image_side=16)
    client = connect(server)
    for wrong in (observe(size=17), observe() | {"prompt": "longer"}, observe(x="x" * 10**7)):
        with pytest.raises(RuntimeError, match="bad_request: .*expected .*at most (5|16) ?"):
            client.infer(wrong)
    assert policy.batch_sizes == []
    assert client.infer(observe(size=16) | {"prompt": "short"})["actions"].shape == (5, 4)
