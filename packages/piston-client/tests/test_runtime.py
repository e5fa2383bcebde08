"""The control loop on a real clock, with slow, absent and dying agents and servers."""

import asyncio
import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from piston_client import (
    ActionChunkBroker,
    AsyncChunkBroker,
    Client,
    ConnectionLost,
    Hooks,
    Runtime,
)


class Robot:
    """Remembers what it was told, and when."""

    def __init__(self, num_steps=20, apply_seconds=None):
        self.num_steps = num_steps
        self.apply_seconds = apply_seconds or {}
        self.actions = []
        self.times = []
        self.num_resets = 0
        self.num_observed = 0

    def reset(self):
        self.num_resets += 1
        self.actions, self.times = [], []

    def get_observation(self):
        self.num_observed += 1
        return {"n": len(self.actions)}

    def apply_action(self, action):
        time.sleep(self.apply_seconds.get(len(self.actions), 0))
        self.actions.append(np.array(action))
        self.times.append(time.monotonic())

    def is_done(self):
        return len(self.actions) >= self.num_steps

    @property
    def said(self):
        return [float(action[0]) for action in self.actions]


class Agent:
    """Action n at call n; a call may be slow or fail."""

    def __init__(self, seconds=None, errors=None):
        self.seconds, self.errors = seconds or {}, errors or {}
        self.num_calls = 0
        self.num_resets = 0

    def infer(self, observation):  # noqa: ARG002
        number, self.num_calls = self.num_calls, self.num_calls + 1
        time.sleep(self.seconds.get(number, 0))
        if number in self.errors:
            raise self.errors[number]
        return {"actions": np.array([float(number)])}

    def reset(self):
        self.num_resets += 1


class Journal(Hooks):
    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *args: self.events.append((name[len("on_") :], *args))

    def named(self, name):
        return [event[1:] for event in self.events if event[0] == name]


def test_every_step_in_order_at_the_rate():
    robot, agent = Robot(30), Agent()
    summary = Runtime(robot, agent, control_hz=50).run()
    # Never back, never left out; a step may be held when the machine is busy.
    assert sorted(set(robot.said)) == list(range(30 - summary.num_held))
    assert robot.said == sorted(robot.said)
    assert summary.num_held < 5
    assert (summary.ended_by, summary.num_steps) == ("done", 30)
    assert summary.num_episodes == agent.num_resets == robot.num_resets == 1
    # Absolute deadlines: 29 periods between the first and the last, whatever the jitter.
    periods = 29 + summary.num_skipped
    assert robot.times[-1] - robot.times[0] == pytest.approx(periods / 50, abs=0.05)
    assert 40 < summary.achieved_hz < 55
    assert summary.agent.p50 < 10


def test_work_within_the_period_does_not_make_it_drift():
    robot = Robot(30, apply_seconds=dict.fromkeys(range(30), 0.006))
    summary = Runtime(robot, Agent(), control_hz=50).run()
    periods = 29 + summary.num_skipped
    assert robot.times[-1] - robot.times[0] == pytest.approx(periods / 50, abs=0.05)


def test_overruns_are_counted_with_the_worst():
    robot = Robot(20, apply_seconds={5: 0.1, 12: 0.25})
    journal = Journal()
    summary = Runtime(robot, Agent(), control_hz=20, hooks=[journal]).run()
    overruns = dict(journal.named("overrun"))
    assert {5, 12} <= set(overruns)
    assert summary.num_overruns == len(overruns)
    assert summary.worst_overrun == max(overruns.values()) == overruns[12]
    assert 0.19 < overruns[12] < 0.3
    # 0.25 s are five periods: the steps whose time had passed are left out, not caught up with.
    assert summary.num_skipped >= 3
    after = np.diff(robot.times[13:])
    assert after.max() < 0.1
    assert (after > 0.02).sum() >= len(after) - 1


def test_a_slow_answer_holds_the_last_action_at_the_full_rate():
    robot, agent, journal = Robot(30), Agent(seconds={10: 0.2}), Journal()
    summary = Runtime(robot, agent, control_hz=50, hooks=[journal]).run()
    said = robot.said
    held = [step for step, _ in journal.named("hold")]
    # 0.2 s are ten periods; action 9 is repeated until action 10 comes, then it goes on.
    repeated = [step for step in held if said[step] == 9]
    assert 7 <= len(repeated) <= 12
    assert said[repeated[-1] + 1] == 10
    assert said == sorted(said)
    assert summary.num_held == len(held)
    assert 0.1 < summary.longest_hold < 0.4
    assert np.median(np.diff(robot.times)) == pytest.approx(0.02, abs=0.008)
    assert "not answered" in journal.named("hold")[0][1]


def test_the_first_answer_may_take_long():
    robot = Robot(10)
    summary = Runtime(robot, Agent(seconds={0: 0.3}), control_hz=50, max_hold=0.1).run()
    assert robot.said[0] == 0
    assert summary.longest_hold < 0.1
    assert summary.seconds < 0.3


def test_an_outage_is_held_through():
    outage = {n: ConnectionLost("server away") for n in range(5, 9)}
    robot, journal = Robot(15), Journal()
    summary = Runtime(robot, Agent(errors=outage), control_hz=None, hooks=[journal]).run()
    assert robot.said == [0, 1, 2, 3, 4, 4, 4, 4, 4, 9, 10, 11, 12, 13, 14]
    assert summary.ended_by == "done"
    assert summary.num_held == 4
    assert str(summary.last_error) == "server away"
    held = [event for event in journal.named("action") if event[2] is None]
    assert [step for step, _, _ in held] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    "error", [TimeoutError, socket.timeout, concurrent.futures.TimeoutError, asyncio.TimeoutError]
)
def test_every_kind_of_timeout_is_held_through(error):
    """Up to Python 3.10 these are four classes."""
    robot = Robot(3)
    summary = Runtime(robot, Agent(errors={1: error()}), control_hz=None).run()
    assert robot.said == [0, 0, 2]
    assert isinstance(summary.last_error, error)


def test_holding_too_long_ends_the_run(caplog):
    outage = {n: ConnectionLost("server away") for n in range(5, 10_000)}
    robot = Robot(10_000)
    summary = Runtime(robot, Agent(errors=outage), 100, num_episodes=3, max_hold=0.2).run()
    assert summary.ended_by == "held"
    assert summary.num_episodes == 1
    assert 0.2 <= summary.longest_hold < 0.5
    assert len(set(robot.said[-10:])) == 1
    assert "server away" in caplog.text


def test_a_safe_action_instead_of_the_last():
    outage = {n: ConnectionLost("server away") for n in range(2, 4)}
    seen = []

    def stand_still(observation, last):
        seen.append((observation["n"], float(last[0])))
        return np.zeros_like(last)

    robot = Robot(6)
    Runtime(robot, Agent(errors=outage), control_hz=None, safe_action=stand_still).run()
    # Once more at the end, with the last observation and action.
    assert robot.said == [0, 1, 0, 0, 4, 5, 0]
    assert seen == [(2, 1.0), (3, 0.0), (5, 5.0)]


def test_an_agent_that_holds_counts_as_holding(make_policy):
    """An asynchronous broker repeats its last action; the runtime knows, and limits it."""
    policy = make_policy(horizon=4)
    policy.gate = threading.Semaphore(1)
    robot = Robot(10_000)
    agent = AsyncChunkBroker(policy, 2)
    summary = Runtime(robot, agent, control_hz=100, max_hold=0.15).run()
    assert summary.ended_by == "held"
    assert sorted(set(robot.said)) == [0, 1, 2, 3]
    assert robot.said[-5:] == [3.0] * 5
    assert robot.said == sorted(robot.said)
    assert summary.num_held == len(robot.said) - 4
    for _ in range(100):
        policy.gate.release()


def test_without_anything_to_hold_an_outage_is_an_error():
    robot, journal = Robot(), Journal()
    runtime = Runtime(robot, Agent(errors={0: ConnectionLost("away")}), 100, hooks=[journal])
    with pytest.raises(ConnectionLost):
        runtime.run()
    assert robot.actions == []
    assert journal.named("episode_end") == [(0, "error")]
    assert journal.named("end")[0][0].ended_by == "error"


def test_a_mistake_ends_the_run_and_is_raised():
    robot = Robot()
    with pytest.raises(ValueError, match="wrong shape"):
        Runtime(robot, Agent(errors={3: ValueError("wrong shape")}), None).run()
    assert robot.said == [0, 1, 2]


def test_a_chunk_instead_of_an_action_is_refused(make_policy):
    with pytest.raises(ValueError, match=r"\(8, 1\).*broker"):
        Runtime(Robot(), make_policy(8), 100).run()


def test_nan_is_not_executed():
    class Broken(Agent):
        def infer(self, observation):
            return {"actions": super().infer(observation)["actions"] * np.nan}

    robot = Robot()
    with pytest.raises(ValueError, match="not finite"):
        Runtime(robot, Broken(), None).run()
    assert robot.actions == []


def test_a_safe_action_passes_the_same_checks():
    outage = {1: ConnectionLost("away")}
    for wrong, says in ((np.array([np.nan]), "not finite"), (np.zeros((1, 1)), r"\(1, 1\)")):
        robot = Robot()
        runtime = Runtime(robot, Agent(errors=outage), None, safe_action=lambda *_, a=wrong: a)
        with pytest.raises(ValueError, match=says):
            runtime.run()
        assert robot.said == [0]


def test_what_is_held_is_not_what_the_robot_made_of_it():
    class Scales(Robot):
        def apply_action(self, action):
            super().apply_action(action)
            action *= 100

    robot = Scales(4)
    outage = {n: ConnectionLost("away") for n in (2, 3)}
    Runtime(robot, Agent(errors=outage), None).run()
    assert robot.said == [0, 1, 1, 1]


def test_hooks_are_told_everything_in_order():
    robot, journal = Robot(2), Journal()
    Runtime(robot, Agent(), control_hz=100, hooks=[journal], num_episodes=2).run()
    names = [name for name, *_ in journal.events if name not in ("overrun", "hold")]
    steps = ["observation", "action"] * 2
    episode = ["episode_start", *steps, "episode_end"]
    assert names == ["start", *episode, *episode, "end"]
    assert journal.named("episode_end") == [(0, "done"), (1, "done")]
    assert [step for step, _ in journal.named("observation")] == [0, 1, 0, 1]


def test_every_episode_begins_without_the_last_one_s_action():
    robot = Robot(3)
    agent = Agent(seconds={3: 0.2})
    firsts = []

    class Firsts(Hooks):
        def on_action(self, step, action, result):  # noqa: ARG002
            if step == 0:
                firsts.append(result is not None)

    summary = Runtime(robot, agent, control_hz=20, num_episodes=2, hooks=[Firsts()]).run()
    # The agent's own, however long it took; never a held one.
    assert firsts == [True, True]
    assert (summary.num_episodes, summary.num_steps, agent.num_resets) == (2, 6, 2)


def test_max_steps_and_stop():
    assert Runtime(Robot(), Agent(), 100, max_steps=5).run().num_steps == 5

    class StopsAtThree(Hooks):
        def on_action(self, step, action, result):  # noqa: ARG002
            if step == 3:
                runtime.stop()

    runtime = Runtime(Robot(), Agent(), 100, hooks=[StopsAtThree()], num_episodes=5)
    summary = runtime.run()
    assert (summary.ended_by, summary.num_steps, summary.num_episodes) == ("stopped", 4, 1)
    # And it can run again.
    assert runtime.run().num_steps == 4


def test_without_a_rate_each_step_waits_for_the_agent():
    robot = Robot(5)
    summary = Runtime(robot, Agent(seconds={2: 0.1}), control_hz=None).run()
    assert robot.said == [0, 1, 2, 3, 4]
    assert (summary.num_held, summary.num_overruns) == (0, 0)
    assert summary.seconds < 1


def test_in_another_thread():
    summaries = []
    runtime = Runtime(Robot(5), Agent(), 100)
    thread = threading.Thread(target=lambda: summaries.append(runtime.run()))
    thread.start()
    thread.join(5)
    assert summaries[0].num_steps == 5


def test_ctrl_c_ends_after_the_step_and_gives_back_the_signal():
    before = signal.getsignal(signal.SIGINT)
    robot, journal = Robot(10_000), Journal()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    summary = Runtime(robot, Agent(), control_hz=100, hooks=[journal]).run()
    assert summary.ended_by == "interrupted"
    assert journal.named("episode_end") == [(0, "interrupted")]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_the_agent_does_not_answer():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    summary = Runtime(Robot(), Agent(seconds={0: 3}), control_hz=100).run()
    assert summary.ended_by == "interrupted"
    assert summary.num_steps == 0
    assert time.monotonic() - started < 1


SERVER = """
import sys
import numpy as np
from websockets.sync.server import serve
from piston_client.codec import pack, unpack

def handle(websocket):
    websocket.send(pack({"piston": {"version": "test", "protocol": 1}}))
    for message in websocket:
        request = unpack(message)
        actions = np.full((4, 1), request["n"], np.float32)
        websocket.send(pack({"actions": actions, "request_id": request["request_id"]}))

with serve(handle, "127.0.0.1", int(sys.argv[1]), compression=None) as server:
    server.serve_forever()
"""


@pytest.fixture
def run_server(free_port):
    processes = []

    def run():
        processes.append(subprocess.Popen([sys.executable, "-c", SERVER, str(free_port)]))
        return processes[-1]

    run.port = free_port
    yield run
    for process in processes:
        process.kill()
        process.wait()


def test_a_server_killed_in_the_middle_and_started_again(run_server):
    first = run_server()
    robot, journal = Robot(10_000), Journal()

    class Disaster(Hooks):
        """Kill the server at step 20; start it again a while into the hold; end after it works."""

        num_held = 0
        num_good_since = 0

        def on_action(self, step, action, result):  # noqa: ARG002
            if step == 20:
                first.kill()
            if result is not None and self.num_held > 15:
                self.num_good_since += 1
                if self.num_good_since == 10:
                    runtime.stop()

        def on_hold(self, step, reason):  # noqa: ARG002
            self.num_held += 1
            if self.num_held == 15:
                run_server()

    with Client("127.0.0.1", run_server.port, timeout=0.2, connect_timeout=30) as client:
        agent = ActionChunkBroker(client, 4)
        runtime = Runtime(
            robot, agent, control_hz=50, hooks=[journal, Disaster()], max_hold=30, max_steps=2000
        )
        summary = runtime.run()
    assert summary.ended_by == "stopped"
    assert isinstance(summary.last_error, ConnectionLost)
    held = [step for step, _ in journal.named("hold") if step > 20]
    assert len(held) >= 15
    # Held: the very action before, at the full rate. (On a busy machine there is a second hold.)
    assert [robot.said[step] for step in held] == [robot.said[step - 1] for step in held]
    times = np.diff(robot.times[held[0] : held[-1]])
    assert np.median(times) == pytest.approx(0.02, abs=0.008)
    # Afterwards new actions, from new observations.
    assert robot.said[-1] > robot.said[held[-1]]


def test_a_server_killed_for_good(run_server):
    server = run_server()
    robot = Robot(10_000)

    class Kill(Hooks):
        def on_action(self, step, action, result):  # noqa: ARG002
            if step == 10:
                server.kill()

    with Client("127.0.0.1", run_server.port, timeout=0.2, connect_timeout=30) as client:
        agent = AsyncChunkBroker(client, 2)
        summary = Runtime(robot, agent, 50, hooks=[Kill()], max_hold=0.5, max_steps=500).run()
    assert summary.ended_by == "held"
    assert isinstance(summary.last_error, ConnectionLost)
    assert summary.longest_hold >= 0.5
