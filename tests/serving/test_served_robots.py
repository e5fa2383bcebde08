"""A checkpoint of two robots behind a real server; one of them writes its subtask."""

import threading

import numpy as np
import pytest
from tests.training.two_robots import BRIGHT, CART, DARK, QUESTION, observation

from piston.cli import main
from piston.inference import Policy, load_policies
from piston.serving import running_server
from piston.sim.rollouts import infer_with_server
from piston_client import ActionChunkBroker, Client, ServerError


@pytest.fixture(scope="module")
def policies(checkpoint_of_two_robots):
    return load_policies(checkpoint_of_two_robots, num_steps=2, subtask_interval="3")


@pytest.fixture(scope="module")
def server(policies):
    """A server that takes no robot for granted."""
    policy = Policy.join(policies)
    with running_server(policy, warm_up=policy.warm_up) as server:
        yield server


@pytest.fixture(scope="module")
def server_of_arm(policies):
    with running_server(Policy.join(policies, default="arm")) as server:
        yield server


def test_two_robots_at_the_same_time(server, connect, policies):
    """One with the public client, which sends its name within the observation."""
    asked = {
        "arm": [observation("arm", i, seed=i, robot="arm", subtask="lift") for i in range(12)],
        "cart": [observation("cart", i, seed=i) for i in range(12)],
    }
    replies = {"arm": [], "cart": []}
    together = threading.Barrier(len(asked))

    def drive(name, client):
        for one in asked[name]:
            together.wait(10)
            replies[name].append(client.infer(one))

    with Client(server.url, robot="cart") as ours:
        pairs = {"arm": connect(server), "cart": ours}.items()
        threads = [threading.Thread(target=drive, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    for name, requests in asked.items():
        for request, reply in zip(requests, replies[name], strict=True):
            expected = policies[name].infer(request)["actions"]
            np.testing.assert_allclose(reply["actions"], expected, atol=1e-5)
    assert {reply["subtask"] for reply in replies["arm"]} == {"lift"}
    assert not any("subtask" in reply for reply in replies["cart"])


def test_connections_do_not_share_a_subtask(server, connect):
    first, second = connect(server), connect(server)
    dark, bright = (observation("arm", 1, b, robot="arm") for b in (DARK, BRIGHT))
    assert first.infer(dark)["subtask"] == "reach"
    assert first.infer(bright)["subtask"] == "reach"  # kept for three chunks
    assert second.infer(bright)["subtask"] == "lift"
    assert first.infer(bright)["subtask"] == "reach"
    assert first.infer(bright)["subtask"] == "lift"


@pytest.mark.parametrize("named", [True, False], ids=["client", "observation"])
def test_reset_begins_anew(server, named):
    """Whether the client or its observations say which robot asks."""
    extra = {} if named else {"robot": "arm"}
    dark, bright = (observation("arm", 1, b, **extra) for b in (DARK, BRIGHT))
    with Client(server.url, robot="arm" if named else None) as client:
        assert client.infer(dark)["subtask"] == "reach"
        assert client.infer(bright)["subtask"] == "reach"
        client.reset()
        assert client.infer(bright)["subtask"] == "lift"


def test_a_broker_hands_the_subtask_on(server):
    with Client(server.url, robot="arm") as client:
        broker = ActionChunkBroker(client)
        result = broker.infer(observation("arm", 1, DARK))
        assert result["subtask"] == "reach"
        assert result["actions"].shape == (3,)
        broker.reset()
        assert broker.infer(observation("arm", 1, BRIGHT))["subtask"] == "lift"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "does not say which robot asks.*one of arm, cart"),
        ({"robot": "boat"}, "no robot 'boat' here. There is arm, cart"),
        ({"robot": "cart"}, "mast"),
        ({"robot": "arm", "subtask": "reach for the other one"}, "has 23 tokens.*keeps 12"),
        ({"robot": "arm", "session": {"a": 1}}, "session is .*expected a number or a text"),
        ({"robot": "arm", "question": 3}, "question is 3; expected a string"),
    ],
)
def test_a_bad_request_leaves_the_connection_usable(server, connect, request_, message):
    good = observation("arm", 1, DARK, robot="arm")
    bad = {key: value for key, value in good.items() if key != "robot"} | request_
    client = connect(server)
    with pytest.raises(RuntimeError, match=message) as refused:
        client.infer(bad)
    assert "bad_request" in str(refused.value)
    assert client.infer(good)["subtask"] == "reach"


def test_questions_are_answered(server):
    with Client(server.url, robot="cart") as client:
        reply = client.infer(observation("cart", 1, BRIGHT, question=QUESTION))
    assert reply["answer"] == "bright"
    assert "actions" not in reply


def test_a_client_sees_the_metadata_of_its_robot(server_of_arm, policies):
    with Client(server_of_arm.url) as client:
        assert client.metadata["subtasks"] is True
        assert client.metadata["robots"].keys() == policies.keys()
        assert client.infer(observation("arm", 1, DARK))["subtask"] == "reach"
    with Client(server_of_arm.url, robot="cart") as client:
        # Nothing of the arm is left, which the server takes for granted.
        of_server = client.metadata.keys() - policies["cart"].metadata.keys()
        assert of_server == {"piston", "robots"}
        assert client.metadata["control_hz"] == CART.rate
        assert client.infer(client.example_observation())["actions"].shape == (4, 2)


def test_a_client_of_no_known_robot_is_told_which_there_are(server):
    with Client(server.url, robot="boat") as client:
        with pytest.raises(ServerError, match="has no robot 'boat'; it has arm, cart"):
            _ = client.metadata
        with pytest.raises(ServerError, match="has no robot 'boat'|no robot 'boat' in this"):
            client.infer(observation("arm"))


def test_simulated_episodes_keep_their_connection(server):
    """Which of them ask at the same time varies."""
    with infer_with_server(server.url, 2, "arm") as (infer, _, metadata):
        assert metadata["subtasks"]
        first = infer([observation("arm", 1, DARK, session=number) for number in (4, 5)])
        assert [one["subtask"] for one in first] == ["reach", "reach"]
        (second,) = infer([observation("arm", 1, BRIGHT, session=5)])
        assert second["subtask"] == "reach"
        third = infer([observation("arm", 1, BRIGHT, session=number) for number in (7, 4)])
        assert [one["subtask"] for one in third] == ["lift", "reach"]


def test_ping_shows_every_robot(server, server_of_arm, capsys):
    def ping(which, *words):
        assert main(["client", "ping", which.url, "--count", "2", *words]) == 0
        return capsys.readouterr().out

    shown = ping(server)
    for text in ("2 observations of arm", "Observations of arm", "Observations of cart"):
        assert text in shown
    assert "returns: subtask" in shown
    assert "subtask of the last reply: " in shown
    shown = ping(server, "--robot", "cart")
    assert "Observations of cart, 20 steps per second" in shown
    assert "arm" not in shown
    assert "subtask" not in shown
    assert "Observations of cart" in ping(server_of_arm)


def test_ping_as_a_robot_that_is_not_there(server, capsys):
    assert main(["client", "ping", server.url, "--robot", "boat"]) == 1
    error = capsys.readouterr().err
    assert "has no robot 'boat'; it has arm, cart" in error
    assert "refused" not in error  # the client knows it before it asks
