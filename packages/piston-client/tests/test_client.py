"""The client against small real servers: Piston's kind, openpi's kind, slow, dying, absent."""

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.server import ServerProtocol
from websockets.sync.server import serve

from piston_client import Client, ConnectionLost, ReplyTimeout, ServerBusy, ServerError
from piston_client.client import make_uri
from piston_client.codec import ProtocolError, pack, unpack

KINDS = pytest.mark.parametrize("kind", ["piston", "openpi"])


def answer_to(reply):
    return int(reply["actions"][0, 0])


def send_echo(websocket, request):
    reply = {"actions": np.full((4, 2), request["n"], np.float32)}
    if "request_id" in request:
        reply["request_id"] = request["request_id"]
    websocket.send(pack(reply))


@KINDS
def test_metadata_then_many_answers(start_server, kind):
    server = start_server(kind=kind)
    with Client("127.0.0.1", server.port) as client:
        assert client.metadata["reset_pose"] == [0.0, 1.0]
        requests = ({"n": n, "executed_steps": 1} for n in range(50))
        assert [answer_to(client.infer(request)) for request in requests] == list(range(50))
        reply = client.infer({"n": 7})
        assert set(reply) == {"actions"}
        reply["actions"][0] = 1  # the caller's own
        client.reset()
    assert server.num_connections == 1
    # An openpi server gets exactly what it would get from openpi's own client.
    own = {"request_id", "executed_steps"} if kind == "piston" else set()
    assert all(set(request) == {"n"} | own for request in server.requests[:50])


def test_nothing_is_connected_before_the_first_use(start_server):
    server = start_server()
    client = Client("127.0.0.1", server.port)
    assert server.num_connections == 0
    client.infer({"n": 1})
    assert server.num_connections == 1
    client.close()


@KINDS
def test_a_late_reply_is_never_taken_for_a_newer_one(start_server, kind):
    release = threading.Event()

    def answer(websocket, request):
        if request["n"] == 1:
            release.wait(5)
        send_echo(websocket, request)

    server = start_server(answer, kind=kind)
    with Client("127.0.0.1", server.port, timeout=0.3) as client:
        assert answer_to(client.infer({"n": 0})) == 0
        with pytest.raises(ReplyTimeout):
            client.infer({"n": 1})
        release.set()
        # The reply to 1 is on its way, or there already; these must get their own.
        time.sleep(0.05)
        assert [answer_to(client.infer({"n": n})) for n in range(2, 30)] == list(range(2, 30))
    # Numbered replies need no new connection; openpi's kind does.
    assert server.num_connections == (1 if kind == "piston" else 2)


def test_a_late_reply_that_comes_during_a_newer_request(start_server):
    asked_again = threading.Event()

    def answer(websocket, request):
        if request["n"] == 1:
            threading.Thread(target=late, args=(websocket, request)).start()
            return
        asked_again.set()
        time.sleep(0.1)
        send_echo(websocket, request)

    def late(websocket, request):
        asked_again.wait(5)
        send_echo(websocket, request)

    server = start_server(answer)
    with Client("127.0.0.1", server.port, timeout=0.5) as client:
        with pytest.raises(ReplyTimeout):
            client.infer({"n": 1})
        assert answer_to(client.infer({"n": 2})) == 2


def test_a_reply_to_a_request_that_was_never_made_is_refused(start_server):
    def answer(websocket, request):
        websocket.send(pack({"actions": np.zeros((1, 1)), "request_id": request["n"]}))

    server = start_server(answer)
    with Client("127.0.0.1", server.port) as client:
        with pytest.raises(ProtocolError, match="99"):
            client.infer({"n": 99})
        assert client.infer({"n": 2})["actions"].shape == (1, 1)


@KINDS
def test_server_errors_end_one_request_only(start_server, kind):
    """Piston's server replies with the error; openpi's sends text and closes."""

    def answer(websocket, request):
        if request["n"] != 13:
            send_echo(websocket, request)
        elif kind == "openpi":
            websocket.send("Traceback: KeyError 'state'")
            websocket.close(1011)
        else:
            error = {"type": "bad_request", "message": "KeyError 'state'"}
            websocket.send(pack({"error": error, "request_id": request["request_id"]}))

    server = start_server(answer, kind=kind)
    with Client("127.0.0.1", server.port) as client:
        for _ in range(3):
            with pytest.raises(ServerError, match="KeyError 'state'"):
                client.infer({"n": 13})
            assert answer_to(client.infer({"n": 5})) == 5
    assert server.num_connections == (1 if kind == "piston" else 4)


def test_a_busy_server(start_server):
    def answer(websocket, request):
        error = {"type": "busy", "message": "32 requests wait already"}
        websocket.send(pack({"error": error, "request_id": request["request_id"]}))

    server = start_server(answer)
    with Client("127.0.0.1", server.port) as client:  # noqa: SIM117
        with pytest.raises(ServerBusy, match="wait already"):
            client.infer({"n": 0})


def test_a_reply_that_is_too_large_is_refused(start_server, monkeypatch):
    monkeypatch.setattr("piston_client.client._MAX_REPLY_BYTES", 1000)

    def answer(websocket, request):
        reply = {"actions": np.full((4, 2), request["n"]), "request_id": request["request_id"]}
        websocket.send(pack({**reply, "large": b"x" * (1000 if request["n"] == 0 else 10)}))

    server = start_server(answer)
    with Client("127.0.0.1", server.port) as client:
        with pytest.raises(ProtocolError, match="too large"):
            client.infer({"n": 0})
        assert answer_to(client.infer({"n": 1})) == 1


def test_what_cannot_be_sent_leaves_the_connection_alone(start_server):
    server = start_server()
    with Client("127.0.0.1", server.port) as client:
        with pytest.raises(ProtocolError, match="object"):
            client.infer({"n": 0, "image": np.array([None])})
        assert answer_to(client.infer({"n": 1})) == 1
    assert server.num_connections == 1


@KINDS
def test_a_restarted_server_is_found_again(start_server, kind, caplog):
    first = start_server(kind=kind)
    with Client("127.0.0.1", first.port, timeout=5) as client:
        assert answer_to(client.infer({"n": 1})) == 1
        first.stop()
        second = []
        timer = threading.Timer(
            0.3, lambda: second.append(start_server(kind=kind, port=first.port))
        )
        timer.start()
        with caplog.at_level(logging.INFO, logger="piston_client"):
            assert answer_to(client.infer({"n": 2})) == 2
        timer.join()
        assert answer_to(client.infer({"n": 3})) == 3
    assert "Waiting for the policy server" in caplog.text
    assert second[0].num_connections == 1


def test_a_connection_that_breaks_in_the_middle_is_replaced_once(start_server):
    """A request that kills the server must not kill it for ever."""

    def answer(websocket, request):
        if request["n"] == 1:
            websocket.socket.shutdown(socket.SHUT_RDWR)
        else:
            send_echo(websocket, request)

    server = start_server(answer)
    with Client("127.0.0.1", server.port) as client:
        with pytest.raises(ConnectionLost):
            client.infer({"n": 1})
        assert answer_to(client.infer({"n": 2})) == 2
    assert [request["n"] for request in server.requests] == [1, 1, 2]


def test_waits_for_a_server_that_is_not_up_yet(start_server, free_port, caplog):
    timer = threading.Timer(0.3, lambda: start_server(port=free_port))
    timer.start()
    caplog.set_level(logging.INFO, logger="piston_client")
    with Client("127.0.0.1", free_port, connect_timeout=10) as client:
        assert answer_to(client.infer({"n": 4})) == 4
    timer.join()
    assert caplog.text.count("Waiting for the policy server") == 1
    assert "Connected" in caplog.text


def test_gives_up_on_a_server_that_never_comes(free_port):
    started = time.monotonic()
    with pytest.raises(ConnectionLost, match=f"No server at ws://127.0.0.1:{free_port}"):
        Client("127.0.0.1", free_port, connect_timeout=0.4).infer({"n": 1})
    assert time.monotonic() - started < 2


def test_a_server_that_goes_away_for_good_takes_no_longer_than_the_timeout(start_server):
    server = start_server()
    with Client("127.0.0.1", server.port, timeout=0.4) as client:
        client.infer({"n": 1})
        server.stop()
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(ConnectionLost):
                client.infer({"n": 2})
            assert time.monotonic() - started < 2


def test_a_silent_numbered_connection_is_replaced_after_two_timeouts(start_server):
    def answer(websocket, request):
        if server.num_connections > 1:
            send_echo(websocket, request)

    server = start_server(answer)
    with Client("127.0.0.1", server.port, timeout=0.2) as client:
        for _ in range(2):
            with pytest.raises(ReplyTimeout):
                client.infer({"n": 1})
        assert answer_to(client.infer({"n": 2})) == 2


@contextlib.contextmanager
def deaf_server():
    """Shakes hands, says who it is, and never reads again; its port."""
    finished = threading.Event()

    def serve(listener):
        connection, _ = listener.accept()
        protocol = ServerProtocol()
        while not (events := protocol.events_received()):
            protocol.receive_data(connection.recv(4096))
        protocol.send_response(protocol.accept(events[0]))
        protocol.send_binary(pack({"piston": {"version": "test", "protocol": 1}}))
        with connection:
            connection.sendall(b"".join(protocol.data_to_send()))
            finished.wait(60)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            finished.set()
            thread.join()


def test_a_server_that_reads_no_more_does_not_block_sending():
    image = np.zeros((64, 2**20), np.uint8)  # more than any socket buffers
    with deaf_server() as port, Client("127.0.0.1", port, timeout=0.5) as client:
        started = time.monotonic()
        with pytest.raises(ReplyTimeout, match="did not reply"):
            client.infer({"n": 0})
        with pytest.raises(ReplyTimeout, match="did not take the request"):
            client.infer({"n": 1, "image": image})
        assert time.monotonic() - started < 8


def test_something_that_accepts_but_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(ConnectionLost):
            Client("127.0.0.1", port, connect_timeout=0.5).connect()
        assert time.monotonic() - started < 3


def test_the_api_key_is_sent_as_openpi_sends_it(start_server):
    server = start_server()
    with Client("127.0.0.1", server.port, api_key="secret") as client:
        client.infer({"n": 1})
    assert server.headers[0]["Authorization"] == "Api-Key secret"


def test_a_wrong_key_is_said_at_once(start_server):
    def refuse(websocket, request):  # noqa: ARG001
        return Response(401, "Unauthorized", Headers(), b"")

    server = start_server(process_request=refuse)
    started = time.monotonic()
    with pytest.raises(ConnectionLost, match="api_key"):
        Client("127.0.0.1", server.port, connect_timeout=10).connect()
    assert time.monotonic() - started < 3


def test_a_server_that_warms_up_is_waited_for(start_server):
    refusals = [503, 503]

    def not_yet(websocket, request):  # noqa: ARG001
        return Response(refusals.pop(), "Warming up", Headers(), b"") if refusals else None

    server = start_server(process_request=not_yet)
    with Client("127.0.0.1", server.port, connect_timeout=10) as client:
        assert answer_to(client.infer({"n": 1})) == 1


def test_a_server_that_is_not_ready_in_time_is_no_absent_server():
    ready = threading.Event()
    with serve(lambda _: ready.wait(10), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.socket.getsockname()[1]
        client = Client("127.0.0.1", port, connect_timeout=0.3)
        with pytest.raises(ConnectionLost, match=r"No ready server at .* still warming up"):
            client.connect()
        ready.set()


def test_the_reason_of_a_refusal_is_told(start_server):
    def refuse(websocket, request):  # noqa: ARG001
        return Response(503, "Service Unavailable", Headers(), b"too many connections\n")

    server = start_server(process_request=refuse)
    with pytest.raises(ConnectionLost, match="answered HTTP 503, 'too many connections'"):
        Client("127.0.0.1", server.port, connect_timeout=0.2).connect()


def test_many_threads_share_a_client(start_server):
    server = start_server()
    with Client("127.0.0.1", server.port) as client, ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda n: answer_to(client.infer({"n": n})), range(200))
        assert list(answers) == list(range(200))
    assert server.num_connections == 1


def test_waiting_for_another_thread_s_request_is_bounded_too(start_server):
    release = threading.Event()

    def answer(websocket, request):
        release.wait(5)
        send_echo(websocket, request)

    server = start_server(answer)
    slow = Client("127.0.0.1", server.port, timeout=0.3)
    with slow as client, ThreadPoolExecutor(3) as pool:
        started = time.monotonic()
        errors = [pool.submit(client.infer, {"n": n}).exception for n in range(3)]
        assert all(isinstance(error(), ConnectionLost) for error in errors)
        assert time.monotonic() - started < 3
        release.set()


def test_close_wakes_a_waiting_request(start_server, caplog):
    release = threading.Event()
    server = start_server(lambda *_: release.wait(20))
    client = Client("127.0.0.1", server.port, timeout=20)
    client.connect()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.infer, {"n": 1})
        time.sleep(0.1)
        client.close()
        assert isinstance(waiting.exception(timeout=5), ConnectionLost)
    assert "Asking again" not in caplog.text
    with pytest.raises(ConnectionLost, match="closed"):
        client.infer({"n": 1})
    client.close()
    release.set()


def test_real_time_chunking_is_not_silently_ignored(start_server):
    server = start_server(kind="openpi")
    with Client("127.0.0.1", server.port) as client:  # noqa: SIM117
        with pytest.raises(ValueError, match="no Piston server"):
            client.infer({"n": 1, "rtc": {}})


@pytest.mark.parametrize(
    ("host", "port", "uri"),
    [
        ("robot", None, "ws://robot:8000"),
        ("robot", 1234, "ws://robot:1234"),
        ("robot:1234", None, "ws://robot:1234"),
        ("::1", 1234, "ws://[::1]:1234"),
        ("[::1]:99", None, "ws://[::1]:99"),
        ("ws://robot", 1234, "ws://robot:1234"),
        ("wss://robot/policy", None, "wss://robot/policy"),
        ("wss://robot/policy", 1234, "wss://robot:1234/policy"),
        ("ws://robot:99", None, "ws://robot:99"),
    ],
)
def test_locations(host, port, uri):
    assert make_uri(host, port) == uri


@pytest.mark.parametrize(("host", "port"), [("http://robot", None), ("robot:1", 2), ("", None)])
def test_locations_that_are_none(host, port):
    with pytest.raises(ValueError):
        make_uri(host, port)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="positive"):
        Client(timeout=0)
    with pytest.raises(ValueError, match="wss"):
        Client("robot", ca_file="ca.pem")


def test_the_client_needs_nothing_heavy():
    code = (
        "import sys, piston_client; "
        "heavy = {'torch', 'pyarrow', 'tyro', 'rich', 'PIL', 'av', 'piston'}; "
        "found = heavy & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_requests_are_readable_by_openpi(start_server):
    """What goes over the wire, byte by byte: the observation and one more key."""
    seen = []

    def answer(websocket, request):
        seen.append(request)
        send_echo(websocket, request)

    server = start_server(answer)
    with Client("127.0.0.1", server.port) as client:
        client.infer({"n": 3, "state": np.arange(3, dtype=np.float32)})
    np.testing.assert_array_equal(unpack(pack(seen[0]))["state"], [0, 1, 2])
    assert isinstance(seen[0]["request_id"], int)
