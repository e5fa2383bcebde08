"""Who is let in, and that slow, dead, greedy or too many clients hold nobody back."""

import dataclasses
import re
import select
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as open_websocket

from piston.serving import MOST_IN_A_BATCH, Server, ServerConfig, running_server
from piston.serving.server import PolicyThreadEnded
from piston_client import Client, ConnectionLost, ServerBusy, ServerError
from piston_client.codec import pack, unpack


def wait_until(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_busy_is_said_at_once(start, connect, policy, observe):
    policy.gate = threading.Event()
    server = start(policy, max_queue=2, max_batch=1)
    clients = [connect(server) for _ in range(3)]
    threads = [threading.Thread(target=client.infer, args=(observe(),)) for client in clients]
    threads[0].start()
    policy.began.acquire()
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(server._batcher) == 2)
    with pytest.raises(RuntimeError, match="busy: 2 requests are waiting"):
        connect(server).infer(observe())
    with Client("127.0.0.1", server.port) as client, pytest.raises(ServerBusy):
        client.infer(observe())
    policy.gate.set()
    for thread in threads:
        thread.join(5)
    assert len(policy.batch_sizes) == 3


def test_one_connection_cannot_take_the_whole_queue(start, policy, observe):
    policy.gate = threading.Event()
    server = start(policy, max_batch=1)
    with open_websocket(server.url) as greedy:
        greedy.recv()
        for number in range(100):
            greedy.send(pack(observe(number, request_id=number)))
        policy.began.acquire()
        wait_until(lambda: len(server._batcher) == 7)
        time.sleep(0.05)
        assert len(server._batcher) == 7
        policy.gate.set()
        # Nothing was lost either.
        assert [unpack(greedy.recv(timeout=5))["request_id"] for _ in range(100)] == list(
            range(100)
        )


def test_greedy_clients_do_not_make_the_server_busy_for_polite_ones(start, policy, observe):
    policy.delay = 0.01
    server = start(policy, max_batch=2)
    done = threading.Event()

    def ask_greedily() -> None:
        with open_websocket(server.url) as websocket:
            websocket.recv()
            for number in range(8):
                websocket.send(pack(observe(request_id=number)))
            while not done.is_set():
                websocket.recv(timeout=5)
                websocket.send(pack(observe(request_id=0)))
                time.sleep(0.001)

    greedy = [threading.Thread(target=ask_greedily) for _ in range(6)]
    for thread in greedy:
        thread.start()
    try:
        wait_until(lambda: len(server._sessions) == 6)
        time.sleep(0.5)
        with Client(server.url) as first, Client(server.url) as second:
            for number in range(15):
                for client in (first, second):
                    assert client.infer(observe(number))["actions"][0, 0] >= number
    finally:
        done.set()
        for thread in greedy:
            thread.join(5)


def test_a_policy_that_hangs_is_reported(start, policy, observe, get):
    policy.gate = threading.Event()
    server = start(policy, policy_timeout=0.3, request_timeout=0.2, max_batch=1)
    assert get(server.port, "/healthz")[0] == 200
    with Client(server.url) as first, Client(server.url) as second:
        # The first request is being worked on, the second one waits in the queue.
        for client in (first, second):
            with pytest.raises(ServerBusy, match=r"has waited 0\.\d s .* limit is 0\.2 s"):
                client.infer(observe())
        assert len(server._batcher) == 0
        wait_until(lambda: get(server.port, "/healthz")[0] == 503)
        assert "The policy has been working for" in get(server.port, "/healthz")[1]
        policy.gate.set()
        wait_until(lambda: get(server.port, "/healthz")[0] == 200)
        assert second.infer(observe(7))["actions"].shape == (5, 4)
    assert policy.batch_sizes == [1, 1]


def test_a_policy_whose_thread_ends_ends_the_server(policy, observe):
    def leave(_):
        raise SystemExit(3)

    policy.infer_batch = leave
    with (
        pytest.raises(PolicyThreadEnded, match=r"SystemExit\(3\)"),
        running_server(policy) as server,
        Client(server.url) as client,
        pytest.raises(ServerError, match="inference thread has ended"),
    ):
        client.infer(observe())


def test_a_client_that_does_not_read_is_cut_off_and_holds_nobody_back(
    start, connect, policy, observe
):
    large = np.zeros(2**22, np.uint8)
    act = policy._act
    policy._act = lambda observation: {**act(observation), "large": large}
    server = start(policy, send_timeout_s=0.5)
    with open_websocket(server.url, max_queue=1, max_size=None) as deaf:
        for number in range(30):
            deaf.send(pack(observe(number)))
        other = connect(server)
        began = time.monotonic()
        for number in range(5):
            assert len(other.infer(observe(number))["large"]) == len(large)
        assert time.monotonic() - began < 5
        wait_until(lambda: len(server._sessions) == 1)
        with pytest.raises(ConnectionClosed):
            list(iter(lambda: deaf.recv(timeout=5), None))


def test_a_client_that_dies_with_a_request_waiting(start, connect, policy, observe):
    policy.gate = threading.Event()
    server = start(policy, max_batch=1)
    first = threading.Thread(target=connect(server).infer, args=(observe(),))
    first.start()
    policy.began.acquire()
    with open_websocket(server.url) as dying:
        dying.recv()
        dying.send(pack(observe()))
        wait_until(lambda: len(server._batcher) == 1)
        dying.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: len(server._sessions) == 1)
    policy.gate.set()
    first.join(5)
    assert connect(server).infer(observe())["actions"].shape == (5, 4)
    # Nobody waited for its reply, so it was never computed.
    assert len(policy.batch_sizes) == 2


def test_a_client_that_answers_no_ping_is_cut_off(start, policy):
    server = start(policy, ping_timeout_s=0.1)
    with open_websocket(server.url, ping_interval=None) as silent:
        silent.recv()
        # The client's thread would answer; take the socket away from it.
        silent.protocol.send_pong = silent.protocol.recv_frame = lambda *_: None
        wait_until(lambda: not server._sessions)


def test_no_more_connections_than_allowed(start, connect, policy, observe, get):
    server = start(policy, max_connections=2)
    clients = [connect(server) for _ in range(2)]
    with pytest.raises(InvalidStatus, match="503"):
        connect(server)
    assert get(server.port, "/healthz")[0] == 200
    clients[0]._ws.close()
    wait_until(lambda: len(server._sessions) == 1)
    assert connect(server).infer(observe())["actions"].shape == (5, 4)


def test_api_key(start, connect, policy, observe, get):
    server = start(policy, api_key="s3cret")
    assert connect(server, api_key="s3cret").infer(observe())["actions"].shape == (5, 4)
    for wrong in (None, "s3cre", "s3cret1", "S3CRET", "x" * 5000):
        with pytest.raises(InvalidStatus, match="401"):
            connect(server, api_key=wrong)
    assert get(server.port, "/metrics", {"Authorization": "Api-Key s3cret"})[0] == 200
    assert get(server.port, "/metrics", {"Authorization": "Bearer s3cret"})[0] == 401
    assert get(server.port, "/metrics")[0] == 401
    assert get(server.port, "/healthz")[0] == 200


def test_api_key_from_a_file_or_the_environment(start, policy, observe, tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("from-file\n")
    monkeypatch.setenv("PISTON_API_KEY", "from-environment")
    by_file, by_environment = start(policy, api_key_file=file), start(policy)
    for server, options in ((by_file, {"api_key_file": file}), (by_environment, {})):
        with Client(server.url, **options) as client:
            assert client.infer(observe())["actions"].shape == (5, 4)
    for server, options in ((by_file, {}), (by_environment, {"api_key": "from-file"})):
        with pytest.raises(ConnectionLost, match="PISTON_API_KEY"):
            Client(server.url, **options).connect()


@pytest.mark.parametrize("key", ["", "two words", "ключ"])
def test_a_wrong_key_in_a_file_or_the_environment_lets_nobody_in(
    key, policy, tmp_path, monkeypatch
):
    file = tmp_path / "key"
    file.write_text(key)
    with pytest.raises(ValueError, match="API key in .*key is empty, or has spaces"):
        Server(policy, ServerConfig(api_key_file=file))
    monkeypatch.setenv("PISTON_API_KEY", key)
    with pytest.raises(ValueError, match="PISTON_API_KEY is empty, or has spaces"):
        Server(policy, ServerConfig())
    with pytest.raises(ValueError, match="PISTON_API_KEY is empty, or has spaces"):
        Client()


def test_a_missing_key_file_is_named(policy, tmp_path):
    with pytest.raises(FileNotFoundError, match="no-key"):
        Server(policy, ServerConfig(api_key_file=tmp_path / "no-key"))


def test_web_pages_are_refused_unless_allowed(start, policy, get):
    allowed, foreign = "https://robots.example.com", "https://example.org"
    server = start(policy, allow_origin=(allowed,))
    for origin in (None, allowed):
        with open_websocket(server.url, origin=origin) as websocket:
            assert "piston" in unpack(websocket.recv())
    for origin in (foreign, "null", f"{allowed}:8443", f"{allowed}.example.org"):
        with pytest.raises(InvalidStatus, match="403"):
            open_websocket(server.url, origin=origin)
    with pytest.raises(InvalidStatus, match="403"):
        open_websocket(server.url, origin=allowed, additional_headers={"Origin": foreign})
    status, text = get(server.port, "/metrics", {"Origin": foreign})
    assert status == 403
    assert "--allow-origin" in text
    assert get(server.port, "/healthz", {"Origin": foreign})[0] == 200


def test_tls(start, connect, policy, observe, certificate, monkeypatch):
    server = start(policy, tls_certificate=certificate[0], tls_key=certificate[1])
    assert server.url.startswith("wss://")
    with pytest.raises(OSError, match="certificate"):
        connect(server)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    client = connect(server)
    for size in (8, 480):
        observation = observe(1, size)
        expected = policy._act(observation)["actions"]
        np.testing.assert_array_equal(client.infer(observation)["actions"], expected)


def test_a_tls_server_says_nothing_before_it_is_asked(start, policy, certificate):
    """Session tickets then would meet the first request of clients that read in a thread.

    Without this, one in forty connections of websockets' own threaded client was not opened.
    """
    server = start(policy, tls_certificate=certificate[0], tls_key=certificate[1])
    context = ssl.create_default_context(cafile=certificate[0])
    raw = socket.create_connection(("127.0.0.1", server.port))
    with context.wrap_socket(raw, server_hostname="localhost") as secure:
        assert secure.version() == "TLSv1.3"
        assert select.select([secure], [], [], 0.3)[0] == []
        secure.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert secure.recv(100).startswith(b"HTTP/1.1 200")


def test_tls_files_that_are_missing_or_wrong(certificate, tmp_path):
    missing = ServerConfig(tls_certificate=certificate[0], tls_key=tmp_path / "no.pem")
    with pytest.raises(FileNotFoundError, match="no.pem"):
        missing.tls()
    swapped = ServerConfig(tls_certificate=certificate[1], tls_key=certificate[0])
    with pytest.raises(ValueError, match="PEM"):
        swapped.tls()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("", False)],
)
def test_which_hosts_are_for_this_machine_only(host, is_local):
    assert ServerConfig(host=host).is_local is is_local


def test_the_documentation_has_the_right_defaults():
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    found = dict(re.findall(r"^\| `--([a-z-]+)` \| ([\d.]+)[^|]*\|", text, re.MULTILINE))
    defaults = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
    assert defaults["max_batch"] is None
    defaults["max_batch"] = MOST_IN_A_BATCH
    limits = [name for name in defaults if name.startswith("max_") or "timeout" in name]
    assert {name.replace("-", "_") for name in found} == {*limits} - {"max_wait_ms"}
    for name, value in found.items():
        assert float(value) == defaults[name.replace("-", "_")], name


def test_listening_says_for_whom(start, policy, caplog):
    with caplog.at_level("INFO"):
        start(policy)
        assert "for this machine only" in caplog.text
        assert "API key" not in caplog.text
        start(policy, host="0.0.0.0")
    assert "No API key is set" in caplog.text


def test_the_log_names_a_client_by_host_and_port(start, policy, caplog):
    with caplog.at_level("INFO"), Client(start(policy).url) as client:
        assert client.metadata
    assert re.search(r" 127\.0\.0\.1:\d+ connected; open connections: 1\.", f" {caplog.text}")
