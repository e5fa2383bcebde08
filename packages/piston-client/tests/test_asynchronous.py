"""Asking while moving: which action at which step, with the answers let through by the test."""

import functools
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from piston_client import AsyncChunkBroker, ConnectionLost, RealTimeBroker


class Script:
    """A broker over a gated policy: the test says between which steps an answer arrives."""

    def __init__(self, policy, broker):
        self.policy, self.broker = policy, broker
        self.step = 0
        # The first answer of an episode is waited for.
        policy.gate = threading.Semaphore(1)

    def steps(self, count):
        return [self.one()["actions"][0] for _ in range(count)]

    def one(self):
        self.step += 1
        return self.broker.infer({"n": self.step - 1})

    def answer(self):
        """Let the request under way finish, and wait until the broker can see it."""
        self.policy.gate.release()
        future = self.broker._request.answer
        wait_until(future.done)

    def asked(self, number):
        """The request with this number, once the policy has it; none has come after it."""
        wait_until(lambda: len(self.policy.observations) > number)
        assert len(self.policy.observations) == number + 1
        return self.policy.observations[number]


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def script_of(make_policy):
    scripts = []

    def make(make_broker, horizon, execute_horizon, **options):
        policy = make_policy(horizon)
        scripts.append(Script(policy, make_broker(policy, execute_horizon, **options)))
        return scripts[-1]

    yield make
    for script in scripts:
        for _ in range(100):
            script.policy.gate.release()


@pytest.fixture(params=[AsyncChunkBroker, RealTimeBroker])
def make_script(script_of, request):
    def make(horizon=8, execute_horizon=3, **options):
        return script_of(request.param, horizon, execute_horizon, **options)

    return make


def test_skips_the_steps_that_passed_meanwhile(make_script):
    script = make_script(horizon=8, execute_horizon=3)
    # Asked at step 3 with step 3's observation; the answer comes before step 6.
    assert script.steps(6) == [0, 1, 2, 3, 4, 5]
    assert script.asked(1)["n"] == script.asked(1)["executed_steps"] == 3
    script.answer()
    assert script.steps(1) == [103]
    # Three of the new chunk are past already, so the next is asked for right then (step 6).
    assert (script.asked(2)["n"], script.asked(2)["executed_steps"]) == (6, 3)
    assert script.steps(1) == [104]
    script.answer()
    assert script.steps(2) == [202, 203]
    assert script.broker.num_held == 0


def test_an_answer_within_the_step_is_used_at_the_next(make_script):
    script = make_script(horizon=4, execute_horizon=1)
    assert script.steps(2) == [0, 1]
    for chunk in range(1, 6):
        script.answer()
        assert script.steps(1) == [100 * chunk + 1]


def test_half_of_the_chunk_by_default(make_script):
    script = make_script(horizon=8, execute_horizon=None)
    script.steps(4)
    assert script.asked(0)["n"] == 0
    script.steps(1)
    assert script.asked(1)["n"] == 4


def test_a_late_chunk_holds_the_last_action_and_the_plan_waits_with_the_robot(make_script):
    script = make_script(horizon=4, execute_horizon=2)
    assert script.steps(4) == [0, 1, 2, 3]
    held = [script.one() for _ in range(3)]
    assert [result["actions"][0] for result in held] == [3, 3, 3]
    assert all(result["held"] for result in held)
    assert script.broker.num_held == 3
    script.answer()
    # Asked at step 2; steps 2 and 3 were executed since, the held ones were not.
    result = script.one()
    assert result["actions"][0] == 102
    assert "held" not in result


def test_a_mistake_surfaces_at_the_next_call(make_script):
    script = make_script(horizon=8, execute_horizon=2)
    script.steps(3)
    script.policy.error = RuntimeError("wrong shape")
    script.answer()
    with pytest.raises(RuntimeError, match="wrong shape"):
        script.one()
    # The plan goes on, and the policy is asked again.
    script.policy.error = None
    assert script.steps(1) == [3]
    script.answer()
    assert script.steps(1) == [201]


def test_an_outage_is_borne_while_actions_last(make_script):
    script = make_script(horizon=5, execute_horizon=2)
    assert script.steps(3) == [0, 1, 2]
    script.policy.error = ConnectionLost("server away")
    script.answer()
    assert script.steps(1) == [3]  # and asks again
    script.answer()
    assert script.steps(1) == [4]
    script.answer()
    with pytest.raises(ConnectionLost):
        script.one()
    assert script.broker.num_failures == 3
    script.policy.error = None
    assert script.one()["held"]  # asked again, with nothing left
    script.answer()
    assert script.steps(1) == [400]


def test_nan_is_not_executed(make_script):
    script = make_script(horizon=8, execute_horizon=2)
    script.steps(3)
    script.policy.bias = np.nan
    script.answer()
    with pytest.raises(ValueError, match="finite"):
        script.one()


def test_reset_forgets_the_chunk_and_the_request(make_script):
    script = make_script(horizon=8, execute_horizon=2)
    script.steps(3)
    script.asked(1)  # under way
    for _ in range(2):
        script.policy.gate.release()
    script.broker.reset()
    assert script.policy.num_resets == 1
    # The answer to the old episode's request (chunk 1) is not used.
    assert script.steps(1) == [200]


def test_the_first_answer_s_error_is_raised_and_the_next_call_asks_again(make_script):
    script = make_script()
    script.policy.error = ConnectionLost("not yet")
    with pytest.raises(ConnectionLost):
        script.one()
    script.policy.error = None
    script.policy.gate.release()
    assert script.steps(1) == [100]


def test_observations_are_copied_before_the_robot_uses_its_buffers_again(make_policy):
    policy = make_policy(horizon=4)
    script = Script(policy, AsyncChunkBroker(policy, 1))
    state = np.zeros(2)
    script.broker.infer({"robot": {"state": state}})
    state[:] = 1
    script.broker.infer({"robot": {"state": state}})
    state[:] = 2
    script.answer()
    np.testing.assert_array_equal(policy.observations[1]["robot"]["state"], [1, 1])


def test_with_real_delays_every_step_is_on_the_line():
    """A policy that takes 20 ms at 5 ms per step: time goes on without gaps or repetitions."""

    class Clock:
        """Chunk for step n: the actions n, n+1, …; so what is executed must count up."""

        def infer(self, observation):
            time.sleep(0.02)
            return {"actions": observation["n"] + np.arange(200.0)[:, np.newaxis]}

    broker = AsyncChunkBroker(Clock(), 1)
    found = []
    for n in range(60):
        found.append(broker.infer({"n": n})["actions"][0])
        time.sleep(0.005)
    assert found == list(range(60))
    assert broker.num_held == 0


def test_settings_that_make_no_sense(make_policy):
    with pytest.raises(ValueError, match="chunks have 8 steps"):
        AsyncChunkBroker(make_policy(8), 9).infer({})


def test_slow_answers_are_asked_for_earlier(make_script):
    """The first answer comes after the end of its chunk; from then on nothing is held."""
    script = make_script(horizon=8, execute_horizon=6)
    script.steps(10)  # asked at step 6, held at 8 and 9
    assert script.broker.num_held == 2
    script.answer()
    script.steps(1)
    assert script.broker.delay == script.broker.median_delay == 4
    # The new chunk began at its step 2: the next is asked for with 4 ahead, at step 4.
    script.steps(1)
    assert script.broker._request is None
    script.steps(1)
    assert script.asked(2)["n"] == 12
    script.steps(3)
    script.answer()
    assert "held" not in script.one()
    assert script.broker.num_held == 2


def test_a_policy_may_answer_when_it_likes():
    """With `submit` nothing runs in a thread, and observations are needed only when asking."""

    class Deferred:
        def __init__(self):
            self.futures = []

        def submit(self, observation):
            self.futures.append((observation, Future()))
            return self.futures[-1][1]

    policy = Deferred()
    broker = AsyncChunkBroker(policy, 2)
    chunk = np.arange(6.0)[:, None]
    assert broker.is_due
    broker.ask({"n": 0})
    policy.futures[0][1].set_result({"actions": chunk})
    assert broker.act()["actions"][0] == 0
    for step in (1, 2, 3):
        assert broker.is_due == (step == 2)
        broker.ask({"n": step} if step == 2 else {})
        assert broker.act()["actions"][0] == step
    assert [one["n"] for one, _ in policy.futures] == [0, 2]
    # Answered at the very step that is next: its first two steps have passed.
    policy.futures[1][1].set_result({"actions": 100 + chunk})
    assert broker.infer({"n": 4})["actions"][0] == 102
    assert broker.delay == 2
    with pytest.raises(ValueError, match="call ask"):
        AsyncChunkBroker(Deferred()).act()


class TestRealTime:
    @pytest.fixture
    def make(self, script_of):
        return functools.partial(script_of, RealTimeBroker)

    def test_what_a_request_carries(self, make):
        script = make(10, 3, initial_delay=2)
        script.steps(4)
        rtc = script.asked(1)["rtc"]
        assert "rtc" not in script.policy.observations[0]
        # At step 3: actions 3…9 of chunk 0 are ahead, 3 begins with this step.
        np.testing.assert_array_equal(rtc["previous_chunk"][:, 0], np.arange(3, 10))
        assert (rtc["delay"], rtc["execute_horizon"]) == (2, 3)

    def test_the_delay_is_the_largest_of_the_last_ones(self, make):
        script = make(horizon=20, execute_horizon=1)
        script.steps(2)  # asks at step 1
        # Not measured yet: all that is ahead counts as committed.
        assert script.asked(1)["rtc"]["delay"] == 19
        sent = []
        for number, delay in enumerate((4, 2, *[1] * 10), start=2):
            script.steps(delay - 1)
            script.answer()
            script.steps(1)  # takes the answer, asks for the next
            sent.append(script.asked(number)["rtc"]["delay"])
        assert sent == [4] * 10 + [2, 1]
        assert script.broker.delay == 1

    def test_the_median_is_one_of_the_delays(self, make_policy):
        broker = RealTimeBroker(make_policy())
        assert broker.delay is broker.median_delay is None
        broker._delays.extend([1, 9, 2, 3])
        assert (broker.delay, broker.median_delay) == (9, 2)

    def test_the_delay_is_never_more_than_what_is_ahead(self, make):
        script = make(horizon=5, execute_horizon=3, initial_delay=40)
        script.steps(2)  # so long a delay asks as soon as possible
        assert script.asked(1)["n"] == 1
        assert script.asked(1)["rtc"]["delay"] == 4

    def test_the_kind_is_what_the_policy_was_trained_for(self, make, make_policy):
        script = make(10, 3, initial_delay=2)
        script.policy.metadata = {"rtc": {"kinds": ["guided"]}}
        script.steps(4)
        assert script.asked(1)["rtc"]["kind"] == "guided"
        for options, kind in (({}, "trained"), ({"kind": "guided"}, "guided")):
            script = make(10, 3, initial_delay=2, **options)
            script.policy.metadata = {"rtc": {"kinds": ["trained", "guided"], "max_delay": 4}}
            script.steps(4)
            assert script.asked(1)["rtc"]["kind"] == kind
        with pytest.raises(ValueError, match="kind is 'trained', 'guided' or None"):
            RealTimeBroker(make_policy(), kind="quick")

    def test_an_unknown_delay_is_the_longest_that_was_trained(self, make):
        script = make(10, 3)
        script.policy.metadata = {"rtc": {"kinds": ["trained", "guided"], "max_delay": 4}}
        script.steps(4)
        assert script.asked(1)["rtc"]["delay"] == 4

    def test_longer_delays_than_trained_are_guided_with_a_warning(self, make, caplog):
        about = {"rtc": {"kinds": ["trained", "guided"], "max_delay": 4}}
        script = make(20, 3, initial_delay=5)
        script.policy.metadata = about
        script.steps(4)
        assert script.asked(1)["rtc"]["kind"] == "guided"
        script.answer()
        script.steps(3)  # measured: 1
        rtc = script.asked(2)["rtc"]
        assert set(rtc) == {"previous_chunk", "kind", "delay", "execute_horizon"}
        assert (rtc["kind"], rtc["delay"], rtc["execute_horizon"]) == ("trained", 1, 3)
        (message,) = (one.getMessage() for one in caplog.records)
        assert "take 5 control steps" in message
        assert "at most 4" in message
        script = make(20, 3, initial_delay=5, kind="trained")
        script.policy.metadata = about
        with pytest.raises(ValueError, match="take 5 control steps.* at most 4"):
            script.steps(1)

    def test_without_guidance_longer_delays_are_plain_requests(self, make, caplog):
        """As with a compiled file: robots go on, with a warning."""
        script = make(20, 3, initial_delay=5)
        script.policy.metadata = {"rtc": {"kinds": ["trained"], "max_delay": 4}}
        script.steps(4)
        assert "rtc" not in script.asked(1)
        assert "made without real-time chunking" in caplog.text

    def test_a_chunk_that_came_too_late_is_continued_from_its_first_step(self, make):
        """Asked for with nothing ahead; so long a delay asks for the next one at once."""
        script = make(horizon=3, execute_horizon=3)
        script.steps(7)  # all three, then held
        script.answer()
        assert script.steps(1) == [100]
        rtc = script.asked(2)["rtc"]
        assert (rtc["execute_horizon"], rtc["delay"], len(rtc["previous_chunk"])) == (1, 2, 3)

    def test_metadata_are_those_of_the_wrapped_policy(self, make_policy):
        class Wrapped:
            def __init__(self, policy):
                self.policy = policy

        policy = make_policy(10)
        policy.metadata = {"rtc": {"kinds": ["trained", "guided"], "max_delay": 4}}
        assert RealTimeBroker(Wrapped(policy), 3)._kind(8) == ("trained", 4)

    def test_a_policy_that_cannot_is_told_at_the_first_request(self, make):
        script = make(10, 3)
        script.policy.metadata = {"rtc": {"kinds": []}}
        with pytest.raises(ValueError, match="it can do none at all. Use AsyncChunkBroker"):
            script.steps(1)
        script = make(10, 3, kind="trained")
        script.policy.metadata = {"rtc": {"kinds": ["guided"]}}
        with pytest.raises(ValueError, match="kind 'trained' is not possible.*can do guided"):
            script.steps(1)

    def test_with_nothing_ahead_it_is_an_ordinary_request(self, make):
        script = make(horizon=2, execute_horizon=2)
        script.steps(2)
        assert script.one()["held"]
        assert "rtc" not in script.asked(1)

    def test_chunks_join_when_the_policy_keeps_the_promise(self):
        """A policy that repeats the committed part: the executed actions have no seam."""

        class Continues:
            def infer(self, observation):
                actions = np.full((12, 1), 100.0 * observation["n"])
                if "rtc" in observation:
                    delay = observation["rtc"]["delay"]
                    ahead = observation["rtc"]["previous_chunk"]
                    actions[:delay] = ahead[:delay]
                    actions[delay:] = ahead[delay - 1] + np.arange(1, 13 - delay)[:, np.newaxis]
                else:
                    actions[:] = np.arange(12)[:, np.newaxis]
                time.sleep(0.02)
                return {"actions": actions}

        broker = RealTimeBroker(Continues(), 2)
        found = []
        for n in range(60):
            found.append(broker.infer({"n": n})["actions"][0])
            time.sleep(0.01)
        assert np.abs(np.diff(found)).max() <= 1
        assert found[-1] > 12  # several chunks were needed for that
