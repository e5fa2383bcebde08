"""What reaches a robot: type, dimension, finite values, range, and the change per step."""

import time

import numpy as np
import pytest

from piston_client import (
    ActionChunkBroker,
    AsyncChunkBroker,
    Client,
    LimitExceeded,
    Limits,
    RealTimeBroker,
    Runtime,
    TemporalEnsemble,
)
from piston_client.codec import pack


class VelocityRobot:
    def __init__(self):
        self.applied = []

    def reset(self):
        pass

    def get_observation(self):
        return {"n": len(self.applied)}

    def apply_action(self, action):
        self.applied.append(np.array(action))

    def is_done(self):
        return False


class Says:
    """Returns these actions, one per call; chunks of one for a broker if `is_policy`."""

    def __init__(self, *actions, is_policy=False, metadata=None):
        self.actions = iter(actions)
        self.is_policy = is_policy
        if metadata is not None:
            self.metadata = metadata

    def infer(self, observation):  # noqa: ARG002
        action = np.asarray(next(self.actions))
        return {"actions": action[np.newaxis] if self.is_policy else action}

    def reset(self):
        pass


def drive(actions, **options):
    """Return what reached the robot, and the summary; a safe action is not counted."""
    robot = VelocityRobot()
    agent = actions if hasattr(actions, "infer") else Says(*actions)
    max_steps = options.pop("max_steps", None) or len(actions)
    summary = Runtime(robot, agent, None, max_steps=max_steps, **options).run()
    return np.array(robot.applied), summary


def test_values_outside_the_range_are_clamped_and_counted(caplog):
    limits = Limits(low=[-1, -2], high=[1, 2])
    actions = np.array([[0.5, 0.5], [100, 0], [3e38, -3e38], [1, -2]], np.float32)
    applied, summary = drive(actions, limits=limits)
    np.testing.assert_array_equal(applied, [[0.5, 0.5], [1, 0], [1, -2], [1, -2]])
    assert applied.dtype == np.float32
    assert summary.num_clamped == 2
    assert "clamped to the limits: 2 steps" in str(summary)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "dimension 0 is 100; the limits allow -1 … 1" in warnings[0].getMessage()


def test_a_jump_is_made_in_steps_from_the_action_before():
    """The first action has none before it; the change counts from what was applied."""
    applied, summary = drive([[5.0]] + [[105.0]] * 4, limits=Limits(max_step=0.25))
    np.testing.assert_allclose(applied[:, 0], [5, 5.25, 5.5, 5.75, 6])
    assert summary.num_clamped == 4


def test_each_dimension_has_its_own_step():
    limits = Limits(max_step=[0.1, np.inf])
    applied, _ = drive([[0.0, 0.0], [1.0, 1.0]], limits=limits)
    np.testing.assert_allclose(applied, [[0, 0], [0.1, 1]])


def test_rounding_is_no_violation():
    steps = (np.float32(0.1) * np.arange(200, dtype=np.float32))[:, np.newaxis]
    limits = Limits(0.0, float(steps[-1, 0]) - 1e-9, 0.1 + 1e-9)
    both_ways = np.concatenate([steps, steps[::-1]])
    applied, summary = drive(both_ways, limits=limits)
    np.testing.assert_array_equal(applied, both_ways)
    assert summary.num_clamped == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [([0.0, 100.0], "dimension 1 is 100"), ([0.6, 0.0], "at most 0.5 from 0")],
)
def test_a_violation_may_stop_the_run(wrong, says):
    limits = Limits(-1, 1, 0.5, on_violation="stop")
    robot = VelocityRobot()
    safe = lambda _, last: np.zeros_like(last)  # noqa: E731
    runtime = Runtime(robot, Says([0.0, 0.0], wrong), None, limits=limits, safe_action=safe)
    with pytest.raises(LimitExceeded, match=says):
        runtime.run()
    np.testing.assert_array_equal(robot.applied, [[0, 0], [0, 0]])


def test_the_safe_action_is_not_limited():
    """From full speed to zero, although the policy may change by 0.1 only and never stands."""
    for on_violation in ("clamp", "stop"):
        limits = Limits(low=0.5, high=1, max_step=0.1, on_violation=on_violation)
        applied, _ = drive([[1.0]], limits=limits, safe_action=lambda *_: np.zeros(1))
        np.testing.assert_array_equal(applied, [[1], [0]])


REFUSED = [
    (np.ones(14, bool), "type bool"),
    (np.ones(14, np.int32), "type int32"),
    (np.zeros(15), "15 dimensions.*had 14"),
    (np.full(14, np.inf), "finite"),
    (np.array(["a"] * 14), "type <U1"),
]


@pytest.mark.parametrize(("wrong", "says"), REFUSED)
@pytest.mark.parametrize("limits", [None, False])
def test_the_runtime_refuses(wrong, says, limits):
    robot = VelocityRobot()
    with pytest.raises(ValueError, match=says):
        Runtime(robot, Says(np.zeros(14), wrong), None, limits=limits).run()
    assert len(robot.applied) == 1


@pytest.mark.parametrize(("wrong", "says"), REFUSED)
@pytest.mark.parametrize(
    "make", [ActionChunkBroker, TemporalEnsemble, AsyncChunkBroker, RealTimeBroker]
)
def test_brokers_refuse(make, wrong, says):
    broker = make(Says(np.zeros(14), wrong, wrong, is_policy=True))
    broker.infer({})
    with pytest.raises(ValueError, match=says):
        _ask_until_it_raises(broker)


def _ask_until_it_raises(broker):
    """An asynchronous broker repeats its last action until the answer is there."""
    for _ in range(500):
        assert broker.infer({}).get("held")
        time.sleep(0.01)


def test_the_dimension_may_change_between_episodes():
    broker = ActionChunkBroker(Says(np.zeros(14), np.zeros(15), is_policy=True))
    robot = VelocityRobot()
    Runtime(robot, broker, None, num_episodes=2, max_steps=1).run()
    assert [action.size for action in robot.applied] == [14, 15]


METADATA = {"action_limits": {"low": [-1.0, -1.0], "high": [1.0, 1.0], "max_step": [0.5, 9.0]}}
JUMP = ([0.0, 0.0], [9.0, 9.0])


def test_limits_come_from_the_policy_s_metadata():
    allowed, as_said = [[0, 0], [0.5, 1]], [[0, 0], [9, 9]]
    for is_policy in (False, True):

        def agent(metadata=METADATA, is_policy=is_policy):
            agent = Says(*JUMP, is_policy=is_policy, metadata=metadata)
            return ActionChunkBroker(agent) if is_policy else agent

        np.testing.assert_array_equal(drive(agent(), max_steps=2)[0], allowed)
        np.testing.assert_array_equal(drive(agent(), max_steps=2, limits=False)[0], as_said)
        for without in ({}, {"action_limits": None}, None):
            np.testing.assert_array_equal(drive(agent(without), max_steps=2)[0], as_said)
        # The runtime's own replace them.
        applied, _ = drive(agent(), max_steps=2, limits=Limits(high=2))
        np.testing.assert_array_equal(applied, [[0, 0], [2, 2]])


def test_limits_come_from_a_server_s_metadata(start_server):
    def answer(websocket, request):
        actions = np.array([JUMP[request["n"]]], np.float32)
        websocket.send(pack({"actions": actions, "request_id": request["request_id"]}))

    server = start_server(answer)
    server.metadata = {**server.metadata, **METADATA}
    # Not connected before the run.
    client = Client("127.0.0.1", server.port)
    applied, summary = drive(ActionChunkBroker(client), max_steps=2)
    client.close()
    np.testing.assert_array_equal(applied, [[0, 0], [0.5, 1]])
    assert summary.num_clamped == 1


def test_a_warning_names_the_dimension_if_the_metadata_do(caplog):
    named = {
        **METADATA,
        "actions": {"dtype": "float32", "shape": [1, 2], "names": ["lift", "grip"]},
    }
    drive(Says(*JUMP, metadata=named), max_steps=2)
    assert "The action's dimension 0 (lift) is" in caplog.text


def test_metadata_that_makes_no_sense():
    for wrong, says in (
        ([1, 2], "expected a dictionary with low, high, max_step"),
        ({"lower": [1]}, "expected a dictionary with low, high, max_step"),
        ({"low": ["a"]}, "low is not a list of numbers"),
        ({"low": [0.0] * 3}, "for 3 dimensions, the action has 2"),
    ):
        agent = Says(*JUMP, metadata={"action_limits": wrong})
        with pytest.raises(ValueError, match=says):
            drive(agent, max_steps=2)


def test_settings_that_make_no_sense():
    for options, says in (
        ({"low": [1, 1], "high": [2, 0]}, "low is above high"),
        ({"low": [1, 1], "high": [2, 2, 2]}, "different numbers of dimensions"),
        ({"max_step": -1}, "0 or more"),
        ({"high": np.nan}, "not NaN"),
        ({"high": [[1.0]]}, "one number per dimension"),
        ({"on_violation": "ignore"}, "'clamp' or 'stop'"),
    ):
        with pytest.raises(ValueError, match=says):
            Limits(**options)
    with pytest.raises(TypeError, match="limits is a Limits"):
        Runtime(VelocityRobot(), Says(), None, limits=True)
    assert repr(Limits(low=[0])) == (
        "Limits(low=[0.0], high=inf, max_step=inf, on_violation='clamp')"
    )
