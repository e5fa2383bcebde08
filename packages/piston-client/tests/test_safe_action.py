"""A robot that is driven by velocities stands still after every way out of `Runtime.run`."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from piston_client import ActionChunkBroker, Client, ConnectionLost, Hooks, Runtime, ServerError
from piston_client.codec import pack


class VelocityRobot:
    """Keeps its last speed until it is told another one; fails in the method `broken` at step 3."""

    def __init__(self, num_steps=10_000, broken=None, dim=2):
        self.num_steps, self.broken = num_steps, broken
        self.velocity = np.zeros(dim)
        self.applied = []
        self.num_resets = 0

    def reset(self):
        self.num_resets += 1
        self._break("reset")

    def get_observation(self):
        self._break("get_observation")
        return {"n": len(self.applied)}

    def apply_action(self, action):
        self.velocity = np.array(action)
        self.applied.append(self.velocity)
        self._break("apply_action")

    def is_done(self):
        self._break("is_done")
        return len(self.applied) >= self.num_steps * self.num_resets

    def _break(self, method):
        if method == self.broken and (method == "reset" or len(self.applied) == 3):
            self.broken = None
            self.velocity = np.ones(2)
            raise OSError(f"{method} failed")


class Moves:
    """The same speed at each call; from step 3 on, what `then` does or returns."""

    def __init__(self, then=None):
        self.then = then
        self.num_calls = 0

    def infer(self, observation):  # noqa: ARG002
        self.num_calls += 1
        if self.then is not None and self.num_calls > 3:
            return {"actions": self.then()}
        return {"actions": np.array([0.5, -0.5])}

    def reset(self):
        pass


class StandStill:
    """Zero velocity; remembers what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, observation, last):
        self.calls.append((dict(observation), None if last is None else last.copy()))
        return np.zeros(2)


def raises(error):
    def function(*_):
        raise error

    return function


def run(agent, robot=None, *, control_hz=None, **options):
    """Run to the end; return the robot, the safe action's calls, and the exception or summary."""
    robot, safe = robot or VelocityRobot(), StandStill()
    try:
        outcome = Runtime(robot, agent, control_hz, safe_action=safe, **options).run()
    except BaseException as error:
        outcome = error
    return robot, safe.calls, outcome


def assert_stands(robot, calls):
    """The safe action came once, after the last action of the agent."""
    np.testing.assert_array_equal(robot.velocity, [0, 0])
    assert len(calls) == 1
    assert len(robot.applied) > 1
    np.testing.assert_array_equal(robot.applied[-2], [0.5, -0.5])
    observation, last = calls[0]
    np.testing.assert_array_equal(last, [0.5, -0.5])
    assert observation["n"] in (len(robot.applied) - 1, len(robot.applied) - 2)


@pytest.mark.parametrize(
    ("then", "error", "says"),
    [
        (raises(RuntimeError("agent broke")), RuntimeError, "agent broke"),
        (raises(ServerError("the server refused")), ServerError, "refused"),
        (lambda: np.full(2, np.nan), ValueError, "not finite"),
        (lambda: np.zeros((4, 2)), ValueError, r"\(4, 2\)"),
        (lambda: np.zeros(3), ValueError, "3 dimensions"),
        (lambda: np.ones(2, bool), ValueError, "type bool"),
        (lambda: np.ones(2, int), ValueError, "type int64"),
    ],
)
@pytest.mark.parametrize("control_hz", [None, 100])
def test_after_a_mistake_of_the_agent(then, error, says, control_hz):
    robot, calls, outcome = run(Moves(then), control_hz=control_hz)
    with pytest.raises(error, match=says):
        raise outcome
    assert not hasattr(outcome, "__notes__")
    np.testing.assert_array_equal(robot.velocity, [0, 0])
    # At a rate, an answer that comes late is a held step, which has a safe action too.
    if control_hz is None:
        assert len(robot.applied) == 4
        assert_stands(robot, calls)


def test_after_an_error_of_a_real_server(start_server):
    def answer(websocket, request):
        reply = {"actions": np.full((1, 2), [0.5, -0.5], np.float32)}
        if request["n"] == 3:
            reply = {"error": {"type": "ValueError", "message": "no such camera"}}
        websocket.send(pack({**reply, "request_id": request["request_id"]}))

    with Client("127.0.0.1", start_server(answer).port) as client:
        robot, calls, outcome = run(ActionChunkBroker(client))
    assert isinstance(outcome, ServerError)
    assert_stands(robot, calls)


def test_after_done_and_max_steps():
    robot, calls, summary = run(Moves(), VelocityRobot(num_steps=5))
    assert (summary.ended_by, summary.num_steps) == ("done", 5)
    assert_stands(robot, calls)
    robot, calls, summary = run(Moves(), max_steps=5)
    assert (summary.ended_by, summary.num_steps) == ("max_steps", 5)
    assert_stands(robot, calls)


def test_after_each_episode():
    """The robot stands while hooks and the environment's reset take their time."""
    velocities = []

    class Watch(Hooks):
        def on_episode_end(self, episode, ended_by):  # noqa: ARG002
            velocities.append(robot.velocity.tolist())

    robot = VelocityRobot(num_steps=5)
    _, calls, summary = run(Moves(), robot, num_episodes=3, max_steps=4, hooks=[Watch()])
    assert (summary.num_episodes, summary.num_steps) == (3, 12)
    assert velocities == [[0, 0]] * 3
    assert len(calls) == 3
    assert len(robot.applied) == 12 + 3


def test_after_stop():
    class Stops(Hooks):
        def on_action(self, step, action, result):  # noqa: ARG002
            if step == 3:
                runtime.stop()

    robot, safe = VelocityRobot(), StandStill()
    runtime = Runtime(robot, Moves(), None, safe_action=safe, hooks=[Stops()])
    assert runtime.run().ended_by == "stopped"
    assert_stands(robot, safe.calls)


def test_after_holding_too_long():
    agent = Moves(raises(ConnectionLost("away")))
    robot, calls, summary = run(agent, control_hz=100, max_hold=0.1)
    assert summary.ended_by == "held"
    np.testing.assert_array_equal(robot.velocity, [0, 0])
    # For each held step, and once more.
    assert len(calls) == summary.num_held + 1


def test_after_ctrl_c():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    robot, _, summary = run(Moves(), control_hz=50)
    assert summary.ended_by == "interrupted"
    np.testing.assert_array_equal(robot.velocity, [0, 0])


_PROGRAM = """
import signal, sys
sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which ignores it
from test_safe_action import Moves, Runtime, StandStill, VelocityRobot

class Robot(VelocityRobot):
    def apply_action(self, action):
        super().apply_action(action)
        print(*action, flush=True)

Runtime(Robot(), Moves(), 50, safe_action=StandStill()).run()
print("not reached", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_after_a_signal_that_ends_the_program(number):
    command = [sys.executable, "-c", _PROGRAM, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0.5 -0.5\n"
        process.send_signal(number)
        lines = process.stdout.readlines()
    assert lines[-1] == "0.0 0.0\n"
    assert process.returncode == -number


def test_a_signal_reaches_the_handler_of_the_program_after_the_end():
    robot, received = VelocityRobot(), []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(robot.velocity.tolist()))
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        _, _, summary = run(Moves(), robot, control_hz=50)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert summary.ended_by == "interrupted"
    assert received == [[0, 0]]


class Stuck(VelocityRobot):
    """A driver that does not return from step 3, and is slow to take the safe action."""

    def apply_action(self, action):
        super().apply_action(action)
        if len(self.applied) == 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
        if not action.any():
            self.velocity = np.ones(2)
            # A third and a fourth Ctrl-C of an impatient user.
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
            self.velocity = np.array(action)


def test_after_a_second_ctrl_c_and_more():
    before = signal.getsignal(signal.SIGINT)
    robot, calls, outcome = run(Moves(), Stuck())
    assert isinstance(outcome, KeyboardInterrupt)
    assert_stands(robot, calls)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("method", ["get_observation", "apply_action", "is_done"])
def test_after_an_exception_of_the_environment(method):
    robot, calls, outcome = run(Moves(), VelocityRobot(broken=method))
    assert str(outcome) == f"{method} failed"
    assert_stands(robot, calls)


def test_after_an_exception_of_the_environment_s_reset():
    robot, calls, outcome = run(Moves(), VelocityRobot(broken="reset"))
    assert str(outcome) == "reset failed"
    # There is no last observation yet: a new one is made.
    assert calls == [({"n": 0}, None)]
    np.testing.assert_array_equal(robot.velocity, [0, 0])


class MovedByReset(VelocityRobot):
    """Its second reset fails after it has moved the robot."""

    def reset(self):
        super().reset()
        if self.num_resets == 2:
            self.applied += [self.velocity] * 10
            self.broken = "reset"
            self._break("reset")


@pytest.mark.parametrize("runs", [1, 2])
def test_the_safe_action_after_a_reset_does_not_follow_from_the_episode_before(runs):
    robot, safe = MovedByReset(num_steps=2), StandStill()
    runtime = Runtime(robot, Moves(), None, safe_action=safe, num_episodes=3 - runs)
    with pytest.raises(OSError, match="reset failed"):  # noqa: PT012
        for _ in range(runs):
            runtime.run()
    assert safe.calls[-1] == ({"n": 13}, None)


@pytest.mark.parametrize(
    "hook", ["on_observation", "on_action", "on_episode_end", "on_end", "on_hold", "on_overrun"]
)
def test_after_an_exception_of_a_hook(hook):
    class Breaks(Hooks):
        def on_action(self, step, action, result):  # noqa: ARG002
            time.sleep(0.1 if hook == "on_overrun" and step == 2 else 0)

    hooks = Breaks()

    def fail(*args):
        if hook not in ("on_observation", "on_action") or args[0] == 2:
            raise LookupError(f"{hook} failed")

    setattr(hooks, hook, fail)
    agent = Moves(raises(ConnectionLost("away")) if hook == "on_hold" else None)
    rate = 20 if hook == "on_overrun" else None
    robot, calls, outcome = run(agent, control_hz=rate, hooks=[hooks], max_steps=6)
    assert str(outcome) == f"{hook} failed"
    np.testing.assert_array_equal(robot.velocity, [0, 0])
    if rate is None and hook != "on_hold":
        assert_stands(robot, calls)


@pytest.mark.parametrize("hook", ["on_start", "on_episode_start"])
def test_after_an_exception_of_a_hook_before_the_first_step(hook):
    hooks = Hooks()
    setattr(hooks, hook, raises(LookupError("hook failed")))
    robot = VelocityRobot()
    robot.velocity = np.ones(2)  # left over from what drove the robot before
    _, calls, outcome = run(Moves(), robot, hooks=[hooks])
    assert str(outcome) == "hook failed"
    assert calls == [({"n": 0}, None)]
    np.testing.assert_array_equal(robot.velocity, [0, 0])


def test_a_failure_of_the_safe_action_is_noted_on_the_original_exception(caplog):
    robot = VelocityRobot()
    agent = Moves(raises(RuntimeError("agent broke")))
    with pytest.raises(RuntimeError, match="agent broke") as caught:
        Runtime(robot, agent, None, safe_action=raises(OSError("no motor"))).run()
    (note,) = caught.value.__notes__
    assert "may still be moving" in note
    assert "OSError: no motor" in note
    assert note in caplog.text


def test_a_failure_of_the_safe_action_alone_is_raised():
    ends = []

    class Ends(Hooks):
        def on_episode_end(self, episode, ended_by):  # noqa: ARG002
            ends.append(ended_by)

        def on_end(self, summary):
            ends.append(summary.ended_by)

    fail = raises(OSError("no motor"))
    runtime = Runtime(VelocityRobot(5), Moves(), None, safe_action=fail, hooks=[Ends()])
    with pytest.raises(OSError, match="no motor") as caught:
        runtime.run()
    assert "may still be moving" in caught.value.__notes__[0]
    assert ends == ["error", "error"]


def test_zeros_may_be_written_as_integers():
    robot = VelocityRobot(5)
    Runtime(robot, Moves(), None, safe_action=lambda *_: [0, 0]).run()
    np.testing.assert_array_equal(robot.velocity, [0, 0])
    assert robot.velocity.dtype == np.float64


def test_without_a_safe_action_nothing_is_added():
    robot = VelocityRobot(5)
    Runtime(robot, Moves(), None).run()
    assert len(robot.applied) == 5
    np.testing.assert_array_equal(robot.velocity, [0.5, -0.5])
