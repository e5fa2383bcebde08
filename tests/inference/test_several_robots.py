"""One checkpoint of several robots: each with its own keys, statistics, limits and rate."""

import json

import numpy as np
import pytest
from tests.training.two_robots import (
    ARM,
    BRIGHT,
    CART,
    DARK,
    HORIZON,
    QUESTION,
    SPREADS,
    observation,
)

import piston
from piston.config import UnknownRobot
from piston.inference import Policy, RobotPolicies, load_policies, load_policy
from piston.inference.loading import random_policy
from piston.serving import PreparingPolicy

LIST = "There is arm, cart."


@pytest.fixture(scope="module")
def policies(checkpoint_of_two_robots):
    return load_policies(checkpoint_of_two_robots, num_steps=3)


@pytest.fixture(scope="module")
def both(policies):
    return Policy.join(policies)


def test_the_robots_share_one_model(policies):
    assert list(policies) == ["arm", "cart"]  # and not the questions
    arm, cart = policies.values()
    assert arm.model is cart.model
    assert (arm.robot, cart.robot) == ("arm", "cart")
    assert (arm.has_sessions, cart.has_sessions) == (True, False)


def test_each_robot_has_its_own_numbers(policies, both):
    assert both.metadata["robots"] == {name: one.metadata for name, one in policies.items()}
    for name, table in (("arm", ARM), ("cart", CART)):
        policy, metadata = policies[name], both.metadata["robots"][name]
        dim, spread = table.action_dim, SPREADS[name]
        assert metadata["robot"] == table.name
        assert metadata["control_hz"] == table.rate
        assert metadata["actions"]["shape"] == [HORIZON, dim]
        limits = metadata["action_limits"]
        assert len(limits["low"]) == len(limits["high"]) == dim
        assert 0.3 * spread < max(limits["high"]) < 0.8 * spread  # actions are half of the state
        stats = policy.data.norm_stats["actions"]
        np.testing.assert_allclose(stats.std, np.full(dim, 0.6 * spread))
        assert policy.infer(observation(name))["actions"].shape == (HORIZON, dim)
    assert "subtasks" in both.metadata["robots"]["arm"]
    assert "subtasks" not in both.metadata["robots"]["cart"]
    assert json.loads(json.dumps(both.metadata)) == both.metadata


def test_one_robot_by_name(checkpoint_of_two_robots, policies):
    cart = load_policy(checkpoint_of_two_robots, robot="cart", num_steps=3)
    assert isinstance(cart, Policy)
    assert cart.metadata == policies["cart"].metadata
    found, expected = (one.infer(observation("cart"), seed=0) for one in (cart, policies["cart"]))
    np.testing.assert_array_equal(found["actions"], expected["actions"])


def test_a_mixture_without_a_name_lists_the_robots(checkpoint_of_two_robots):
    with pytest.raises(UnknownRobot, match="with several robots. Name one of arm, cart"):
        piston.load_policy(checkpoint_of_two_robots)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("crat", "'crat' here. Did you mean 'cart'"),
        ("questions", "'questions' here"),
    ],
)
def test_a_robot_that_is_not_there_is_refused_with_the_list(
    checkpoint_of_two_robots, policies, name, message
):
    with pytest.raises(UnknownRobot, match=message) as loaded:
        load_policy(checkpoint_of_two_robots, robot=name)
    with pytest.raises(UnknownRobot, match=message) as default:
        Policy.join(policies, default=name)
    assert str(loaded.value).endswith(LIST)
    assert str(default.value).endswith(LIST)


def test_requests_of_both_robots_share_a_batch(both):
    assert isinstance(both, PreparingPolicy)
    chunk = both.infer(observation("cart", robot="cart", seed=9))["actions"]
    rtc = {"previous_chunk": chunk[1:], "delay": 1, "execute_horizon": 1}
    requests = [
        observation("arm", 1, DARK, robot="arm", seed=1),
        observation("cart", 2, robot="cart", seed=2),
        observation("arm", 3, BRIGHT, robot="arm", seed=3, subtask="wait"),
        observation("cart", 4, BRIGHT, robot="cart", question=QUESTION),
        observation("cart", 5, robot="cart", seed=5, rtc=rtc),
        observation("arm", 6, DARK, robot="arm", question=QUESTION),
    ]
    found = both.infer_batch(requests)
    subtasks, answers = ([one.get(key) for one in found] for key in ("subtask", "answer"))
    assert subtasks == ["reach", None, "wait", None, None, None]
    assert answers == [None, None, None, "bright", None, "dark"]
    prepared = both.infer_batch([both.prepare(one) for one in requests])
    for request, *results in zip(requests, found, prepared, strict=True):
        expected = both.infer(request)
        for result in results:
            assert result.keys() == expected.keys()
            if "actions" in expected:
                np.testing.assert_allclose(result["actions"], expected["actions"], atol=1e-5)


def test_the_batch_equals_each_robots_own_policy(both, policies):
    requests = [observation("arm", 1, robot="arm"), observation("cart", 2, robot="cart")]
    found = both.infer_batch([{**one, "seed": 4} for one in requests])
    for request, result in zip(requests, found, strict=True):
        expected = policies[request["robot"]].infer(request, seed=4)
        np.testing.assert_allclose(result["actions"], expected["actions"], atol=1e-5)


@pytest.mark.parametrize(
    ("robot", "message"),
    [
        ({}, "does not say which robot asks. Give it the field robot, one of arm, cart"),
        ({"robot": "boat"}, f"no robot 'boat' here. {LIST}"),
        ({"robot": "questions"}, f"no robot 'questions' here. {LIST}"),
        ({"robot": 3}, f"no robot 3 here. {LIST}"),
        ({"robot": ["arm"]}, r"no robot \['arm'\] here"),
    ],
)
def test_a_request_of_no_known_robot_is_refused(both, robot, message):
    with pytest.raises(UnknownRobot, match=message):
        both.infer({**observation("arm"), **robot})


def test_a_request_in_another_robots_keys_is_refused(both):
    with pytest.raises((KeyError, ValueError), match="mast|front|bumper"):
        both.infer(observation("arm", robot="cart"))


def test_the_default_is_for_requests_that_do_not_say_it(policies):
    served = Policy.join(policies, default="cart")
    assert served.metadata["robot"] == "cart"
    assert served.metadata["control_hz"] == CART.rate
    assert served.infer(observation("cart"))["actions"].shape == (HORIZON, 2)
    assert served.infer(observation("arm", robot="arm"))["actions"].shape == (HORIZON, 3)


def test_a_single_robot_need_not_be_named(policies):
    served = RobotPolicies({"arm": policies["arm"]})  # the former name of `Policy.join`
    assert served.infer(observation("arm"))["subtask"] == "reach"


def test_robots_of_different_models_are_not_joined(policies):
    other = random_policy("pi0_libero")
    with pytest.raises(ValueError, match="different models cannot share batches"):
        Policy.join({"arm": policies["arm"], "libero": other})


def test_one_robots_policy_refuses_the_other(policies):
    with pytest.raises(UnknownRobot, match="of robot 'cart'; this policy drives arm"):
        policies["arm"].infer(observation("arm", robot="cart"))
    assert "actions" in policies["arm"].infer(observation("arm", robot="arm"))
