"""A served policy as the public openpi-client sees it."""

import asyncio
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.sync.client import connect as open_websocket

from piston.serving import Server, ServerConfig, running_server
from piston.serving.server import PolicyThreadEnded
from piston_client.codec import pack, unpack


def test_metadata_comes_first(start, connect, policy):
    metadata = connect(start(policy, name="runs/first/100")).get_server_metadata()
    assert metadata["reset_pose"] == policy.metadata["reset_pose"]
    assert metadata["piston"]["protocol"] == 1
    assert metadata["piston"]["name"] == "runs/first/100"


def test_many_inferences_with_images_of_mixed_sizes(start, connect, policy, observe):
    client = connect(start(policy))
    sizes = [1, 8, 224, 480, 8, 224] * 20
    for number, size in enumerate(sizes):
        observation = observe(number, size)
        reply = client.infer(observation)
        expected = policy._act(observation)
        np.testing.assert_array_equal(reply["actions"], expected["actions"])
        assert reply["policy_timing"] == expected["policy_timing"]


def test_server_timing(start, connect, policy, observe):
    policy.delay = 0.05
    client = connect(start(policy))
    first, second = (client.infer(observe())["server_timing"] for _ in range(2))
    assert set(first) == {"infer_ms", "queue_ms", "batch_size"}
    assert set(second) == {"infer_ms", "queue_ms", "batch_size", "prev_total_ms"}
    assert 50 <= first["infer_ms"] <= second["prev_total_ms"]
    assert first["batch_size"] == 1


def test_what_arrives_is_what_was_sent(start, connect, policy, observe):
    arrived = []
    policy.infer_batch = lambda observations: arrived.extend(observations) or [{}]
    client = connect(start(policy))
    sent = observe(3.5, 480, nested={"list": [1, 2.5, "three", None, True]}, flag=np.bool_(True))
    client.infer(sent)
    client.infer(sent)
    assert len(arrived) == 2
    for seen in arrived:
        np.testing.assert_array_equal(seen["images"]["top"], sent["images"]["top"])
        np.testing.assert_array_equal(seen["state"], sent["state"])
        assert seen["nested"] == sent["nested"]
        assert "request_id" not in seen


def test_reference_message_is_understood(start, policy, reference):
    policy.infer_batch = lambda observations: [{"keys": sorted(observations[0])}]
    message = (reference / "message.msgpack").read_bytes()
    with open_websocket(start(policy).url, max_size=None) as websocket:
        websocket.recv()
        websocket.send(message)
        assert unpack(websocket.recv())["keys"] == sorted(unpack(message))


def test_reconnect_after_a_restart(policy, observe):
    with running_server(policy) as server:
        port = server.port
        client = WebsocketClientPolicy("127.0.0.1", port)
        client.infer(observe(1))
    with pytest.raises(Exception, match="shutting down"):
        client.infer(observe(2))
    with running_server(policy, ServerConfig(port=port)):
        again = WebsocketClientPolicy("127.0.0.1", port)
        assert again.infer(observe(3))["actions"].shape == (5, 4)
        again._ws.close()


def test_stopping_answers_what_waits(connect, policy, observe):
    """Also what the policy has not begun with."""
    policy.gate = threading.Event()
    with running_server(policy, ServerConfig(port=0, max_batch=1)) as server:
        clients = [connect(server) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            replies = [pool.submit(client.infer, observe()) for client in clients]
            policy.began.acquire()
            while len(server._batcher) < 3:
                time.sleep(0.001)
            server.stop()
            policy.gate.set()
            assert all(reply.result(10)["actions"].shape == (5, 4) for reply in replies)
    assert server.finished


def test_request_ids_come_back_and_need_no_order(start, policy, observe):
    """A busy reply overtakes the request that keeps the policy busy."""
    policy.gate = threading.Event()
    with open_websocket(start(policy, max_queue=1, max_batch=1).url) as websocket:
        websocket.recv()
        websocket.send(pack(observe(0, request_id=10)))
        policy.began.acquire()
        websocket.send(pack(observe(1, request_id=11)))
        websocket.send(pack(observe(2, request_id=12)))
        refused = unpack(websocket.recv(timeout=5))
        assert refused["request_id"] == 12
        assert refused["error"]["type"] == "busy"
        policy.gate.set()
        replies = [unpack(websocket.recv(timeout=5)) for _ in range(2)]
    assert [reply["request_id"] for reply in replies] == [10, 11]


def test_replies_without_ids_keep_their_order(start, policy, observe):
    policy.gate = threading.Event()
    with open_websocket(start(policy, max_queue=1, max_batch=1).url) as websocket:
        websocket.recv()
        websocket.send(pack(observe(0)))
        policy.began.acquire()
        websocket.send(pack(observe(1)))
        websocket.send(pack(observe(2)))
        websocket.send(b"\xc1")
        with pytest.raises(TimeoutError):
            websocket.recv(timeout=0.1)
        policy.gate.set()
        replies = [websocket.recv(timeout=5) for _ in range(4)]
    light = observe(0)["images"]["top"].mean()
    first, second = (unpack(reply)["actions"][0, 0] - light for reply in replies[:2])
    assert first == pytest.approx(0, abs=1e-3)
    assert second == pytest.approx(1, abs=1e-3)
    assert replies[2].startswith("busy")
    assert replies[3].startswith("bad_request")


def test_sixteen_clients_each_get_their_own_reply(start, connect, policy, observe):
    """Batched, and equal to one by one."""
    policy.delay = 0.005
    server = start(policy, max_batch=16)

    def robot(source: int) -> int:
        client = connect(server)
        rng = np.random.default_rng(source)
        for number in range(25):
            noise = rng.standard_normal((5, 4)).astype(np.float32)
            observation = observe(100 * source + number, 8 + source, noise=noise)
            alone = policy._act(observation)["actions"]
            np.testing.assert_allclose(client.infer(observation)["actions"], alone, atol=1e-5)
        return 25

    with ThreadPoolExecutor(16) as robots:
        assert sum(robots.map(robot, range(16))) == 400
    assert max(policy.batch_sizes) > 4
    assert sum(policy.batch_sizes) == 400


def test_memory_does_not_grow_with_requests(start, connect, policy, observe, resident_bytes):
    client = connect(start(policy))
    for number in range(1500):
        if number == 500:
            before = resident_bytes()
        client.infer(observe(number, 224 + number % 16))
    assert resident_bytes() - before < 10 * 2**20


def test_not_ready_before_warm_up_is_done(policy, get):
    """/healthz says so, and a client that comes early waits for its metadata."""
    proceed, threads = threading.Event(), []

    def warm_up():
        threads.append(threading.current_thread())
        assert proceed.wait(10)

    server = Server(policy, ServerConfig(port=0), warm_up=warm_up)
    thread = threading.Thread(target=lambda: asyncio.run(server.run()))
    thread.start()
    try:
        while not threads:
            time.sleep(0.01)
        assert get(server.port, "/healthz") == (503, "The policy warms up.\n")
        with open_websocket(server.url) as websocket:
            with pytest.raises(TimeoutError):
                websocket.recv(timeout=0.1)
            proceed.set()
            assert "reset_pose" in unpack(websocket.recv(timeout=5))
        assert get(server.port, "/healthz")[0] == 200
        assert threads[0].name == "piston-inference"
    finally:
        proceed.set()
        server.stop()
        thread.join()


def test_a_failed_warm_up_ends_the_server(policy):
    def warm_up():
        raise ValueError("no such weights")

    with (
        pytest.raises(ValueError, match="no such weights"),
        running_server(policy, warm_up=warm_up),
    ):
        pytest.fail("the server must not come up")


def test_a_warm_up_that_exits_is_no_orderly_end(policy):
    """Otherwise the process would end with the code 0, which no supervisor restarts."""
    with (
        pytest.raises(PolicyThreadEnded, match=r"warm-up ended with SystemExit\(0\)"),
        running_server(policy, warm_up=lambda: sys.exit(0)),
    ):
        pytest.fail("the server must not come up")


def test_health_and_metrics_answer_while_the_policy_works(start, connect, policy, observe, get):
    policy.delay = 1.0
    server = start(policy)
    client = connect(server)
    working = threading.Thread(target=client.infer, args=(observe(),))
    working.start()
    policy.began.acquire()
    seconds = []
    for path in ["/healthz", "/metrics"] * 5:
        began = time.perf_counter()
        status, _ = get(server.port, path)
        seconds.append(time.perf_counter() - began)
        assert status == 200
    assert working.is_alive()
    working.join()
    # The median, because a busy machine may stop anybody for a while.
    assert statistics.median(seconds) < 0.05


def test_metrics_count_what_happened(start, connect, policy, observe, get):
    server = start(policy)
    client = connect(server)
    for number in range(3):
        client.infer(observe(number))
    with pytest.raises(RuntimeError, match="bad_request"):
        client.infer({"state": np.zeros(4)})
    with pytest.raises(RuntimeError, match="internal"):
        client.infer(observe(fail=True))
    lines = get(server.port, "/metrics")[1].splitlines()
    assert {
        "piston_requests_total 5",
        'piston_errors_total{type="bad_request"} 1',
        'piston_errors_total{type="internal"} 1',
        'piston_errors_total{type="busy"} 0',
        "piston_queue_length 0",
        "piston_connections 1",
        'piston_batch_size_bucket{le="1"} 5',
        'piston_batch_size_bucket{le="+Inf"} 5',
        "piston_inference_seconds_count 5",
        "piston_request_seconds_count 5",
    } <= set(lines)


def test_a_browser_is_told_what_this_is(start, policy, get):
    status, text = get(start(policy).port, "/")
    assert status == 426
    assert "WebSocket" in text


def test_a_taken_port_is_an_error_that_names_it(start, policy):
    server = start(policy)
    with (
        pytest.raises(OSError, match=f"{server.port}") as caught,
        running_server(policy, ServerConfig(port=server.port)),
    ):
        pytest.fail("the port is taken")
    assert "Choose another" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"port": 70_000}, "port is 70000"),
        ({"api_key": ""}, "api_key is empty"),
        ({"api_key": "two words"}, "spaces"),
        ({"api_key": "ключ"}, "ASCII"),
        ({"api_key": "one", "api_key_file": "key"}, "only one"),
        ({"allow_origin": ("robots.example.com",)}, "https://robots.example.com"),
        ({"allow_origin": ("https://robots.example.com/",)}, "without a path"),
        ({"send_timeout_s": 0}, "send_timeout_s"),
        ({"tls_certificate": "cert.pem"}, "only one"),
        ({"max_wait_ms": -1}, "max_wait_ms"),
    ],
)
def test_wrong_configurations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**options)


def test_the_api_key_is_not_shown():
    assert "secret" not in repr(ServerConfig(api_key="secret"))
