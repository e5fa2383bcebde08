"""A real policy (transforms, tiny model) behind the server, through the public client."""

import copy
import threading

import numpy as np
import pytest

from piston.inference.loading import random_policy
from piston.inference.policy import Policy
from piston.robots.aloha import make_aloha_example
from piston_client import Client


@pytest.fixture(scope="module")
def model_policy():
    return random_policy("pi0_aloha_sim", num_steps=3)


def requests(policy, count: int) -> list[dict]:
    config = policy.model.config
    shape = (config.action_horizon, config.action_dim)
    random = np.random.default_rng(0)
    return [
        {
            **make_aloha_example(),
            "state": random.uniform(0, 1, 14).astype(np.float32),
            "noise": random.standard_normal(shape, np.float32),
        }
        for _ in range(count)
    ]


def test_in_process_one_by_one_and_batched_are_equal(start, connect, model_policy):
    asked = requests(model_policy, 4)
    in_process = [model_policy.infer(request)["actions"] for request in asked]
    server = start(model_policy, warm_up=model_policy.warm_up)
    clients = [connect(server) for _ in asked]
    for client, request, expected in zip(clients, asked, in_process, strict=True):
        reply = client.infer(request)
        np.testing.assert_allclose(reply["actions"], expected, atol=1e-5)
        assert reply["policy_timing"]["infer_ms"] <= reply["server_timing"]["infer_ms"]

    batched: dict[int, dict] = {}
    together = threading.Barrier(len(asked))

    def ask(number: int) -> None:
        together.wait(10)
        batched[number] = clients[number].infer(asked[number])

    # Who comes first may be served alone; after that they are in step.
    for _ in range(3):
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert max(reply["server_timing"]["batch_size"] for reply in batched.values()) > 1
    for number, expected in enumerate(in_process):
        np.testing.assert_allclose(batched[number]["actions"], expected, atol=1e-5)


def test_the_model_refuses_what_it_cannot_use(start, connect, model_policy):
    client = connect(start(model_policy))
    good = requests(model_policy, 1)[0]
    bad = {
        "'state' is missing": {key: value for key, value in good.items() if key != "state"},
        r"shape \(15,\)": {**good, "state": np.zeros(15)},
        "NaN": {**good, "state": np.full(14, np.nan)},
        "noise is": {**good, "noise": np.zeros((2, 2))},
        "images": {**good, "images": np.zeros(3)},
        "uint8|shape|image": {**good, "images": {"cam_high": np.zeros((2, 2))}},
    }
    for message, observation in bad.items():
        with pytest.raises(RuntimeError, match=message) as caught:
            client.infer(observation)
        assert "bad_request" in str(caught.value)
        assert client.infer(good)["actions"].shape == (50, 14)


class TwiceAsFar(Policy):
    """A policy of somebody who overrides the one method that infers."""

    def infer_batch(self, requests):
        observations = [getattr(request, "observation", request) for request in requests]
        results = super().infer_batch(
            [
                {**observation, "prompt": "go"} if observation["prompt"] == "stop" else request
                for request, observation in zip(requests, observations, strict=True)
            ]
        )
        return [{**result, "actions": 2 * result["actions"]} for result in results]


def test_a_policy_that_overrides_infer_batch_is_not_bypassed(start, model_policy):
    policy = copy.copy(model_policy)
    policy.__class__ = TwiceAsFar
    (request,) = requests(model_policy, 1)
    with Client(start(policy).url) as client:
        for prompt, replaced in (("go", "go"), ("stop", "go"), ("turn", "turn")):
            expected = model_policy.infer({**request, "prompt": replaced})["actions"]
            actions = client.infer({**request, "prompt": prompt})["actions"]
            np.testing.assert_allclose(actions, 2 * expected, atol=1e-5)
