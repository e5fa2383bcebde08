"""Batches: who shares one, who waits, and that nobody gets another's reply."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from piston.serving.batching import Batcher, Busy


class Recorder:
    """Gives back each observation's number; fails on a negative one."""

    def __init__(self, delay: float = 0.0) -> None:
        self.metadata: dict = {}
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Semaphore(0)
        self.delay = delay

    def infer_batch(self, observations):
        numbers = [observation["number"] for observation in observations]
        self.batches.append(numbers)
        self.began.release()
        assert self.gate.wait(10)
        time.sleep(self.delay)
        if min(numbers) < 0:
            raise ValueError(f"{min(numbers)} is negative")
        return [{"number": number} for number in numbers]


@pytest.fixture
def policy() -> Recorder:
    return Recorder()


@pytest.fixture
def call():
    """`call(function, *args)` calls it in an event loop, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def called(function, *args):
        async def run():
            result = function(*args)
            return await result if asyncio.isfuture(result) else result

        return asyncio.run_coroutine_threadsafe(run(), loop).result(10)

    yield called
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def run(policy, call):
    """`run(max_batch=…)` gives `ask(number, source)`: an event, and its `.outcome` once set."""
    batchers = []

    def started(*, max_batch=4, max_wait=0.0, max_queue=100):
        batcher = Batcher(policy, max_batch=max_batch, max_wait=max_wait, max_queue=max_queue)
        call(batcher.start)
        batchers.append(batcher)

        def ask(number: int, source="robot") -> threading.Event:
            answered = threading.Event()

            def finish(future: asyncio.Future) -> None:
                answered.outcome = future.result()
                answered.set()

            def submit() -> None:
                batcher.submit({"number": number}, source).add_done_callback(finish)

            call(submit)
            return answered

        ask.batcher = batcher
        return ask

    yield started
    policy.gate.set()
    for batcher in batchers:
        assert call(batcher.stop, 5)


def test_what_comes_while_the_policy_works_is_the_next_batch(run, policy):
    ask = run(max_batch=4)
    policy.gate.clear()
    answers = [ask(0)]
    policy.began.acquire()
    answers += [ask(number) for number in range(1, 7)]
    policy.gate.set()
    assert all(answer.wait(5) for answer in answers)
    assert policy.batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert [answer.outcome.result["number"] for answer in answers] == list(range(7))
    assert [answer.outcome.batch_size for answer in answers] == [1, 4, 4, 4, 4, 2, 2]


def test_one_bad_request_fails_alone(run, policy):
    ask = run()
    policy.gate.clear()
    ask(0)
    policy.began.acquire()
    answers = [ask(number) for number in (1, -2, 3)]
    policy.gate.set()
    assert all(answer.wait(5) for answer in answers)
    good, bad, other = (answer.outcome.result for answer in answers)
    assert (good, other) == ({"number": 1}, {"number": 3})
    assert isinstance(bad, ValueError)
    assert policy.batches[1:] == [[1, -2, 3], [1], [-2, 3], [-2], [3]]


def test_a_batch_that_fails_is_halved_until_the_bad_request_is_alone(run, policy):
    ask = run(max_batch=8)
    policy.gate.clear()
    ask(0)
    policy.began.acquire()
    answers = [ask(number) for number in (1, 2, 3, 4, 5, -6, 7, 8)]
    policy.gate.set()
    assert all(answer.wait(5) for answer in answers)
    assert policy.batches[2:] == [[1, 2, 3, 4], [5, -6, 7, 8], [5, -6], [5], [-6], [7, 8]]
    results = [answer.outcome.result for answer in answers]
    assert [type(result) for result in results] == [dict] * 5 + [ValueError] + [dict] * 2
    assert [answer.outcome.batch_size for answer in answers] == [4] * 4 + [1, 1, 2, 2]


def test_a_request_that_cannot_be_prepared_joins_no_batch(run, policy):
    def prepare(observation):
        if observation["number"] < 0:
            raise ValueError("negative")
        return {"number": 10 * observation["number"]}

    policy.prepare = prepare
    ask = run()
    policy.gate.clear()
    ask(0)
    policy.began.acquire()
    answers = [ask(number) for number in (1, -2, 3)]
    policy.gate.set()
    assert all(answer.wait(5) for answer in answers)
    assert policy.batches == [[0], [10, 30]]
    good, bad, other = (answer.outcome for answer in answers)
    assert (good.result, other.result) == ({"number": 10}, {"number": 30})
    assert isinstance(bad.result, ValueError)
    assert (good.batch_size, bad.batch_size) == (2, 0)
    last = ask(-4)
    assert last.wait(5)
    assert isinstance(last.outcome.result, ValueError)
    assert len(policy.batches) == 2


def test_a_wrong_number_of_results_is_an_error_for_all(run, policy):
    policy.infer_batch = lambda _: []
    answer = run()(1)
    assert answer.wait(5)
    assert isinstance(answer.outcome.result, RuntimeError)


def test_a_full_queue_refuses_at_once(run, policy):
    ask = run(max_queue=2)
    policy.gate.clear()
    ask(0)
    policy.began.acquire()
    ask(1)
    ask(2, "another")
    for source in ("robot", "another", "third"):
        with pytest.raises(Busy, match="2 requests"):
            ask(3, source)
    assert len(ask.batcher) == 2


def test_a_greedy_source_leaves_room_for_the_others(run, policy):
    ask = run(max_queue=8, max_batch=8)
    policy.gate.clear()
    ask(0, "greedy")
    policy.began.acquire()
    for number in range(1, 5):
        ask(number, "greedy")
    with pytest.raises(Busy, match="4 requests of this connection .* share of the queue is 4"):
        ask(5, "greedy")
    for source in ("first", "second", "third", "fourth"):
        ask(6, source)
        # The share shrinks with the number of robots, but is never less than one request.
        with pytest.raises(Busy):
            ask(7, "greedy")
    assert len(ask.batcher) == 8


def test_sources_take_turns_in_the_queue(run, policy):
    ask = run(max_queue=100, max_batch=2)
    policy.gate.clear()
    ask(0, "greedy")
    policy.began.acquire()
    answers = [ask(number, "greedy") for number in (1, 2, 3)]
    answers += [ask(10, "polite"), ask(11, "polite")]
    policy.gate.set()
    assert all(answer.wait(5) for answer in answers)
    assert policy.batches == [[0], [1, 10], [2, 11], [3]]


def test_a_robot_that_is_alone_never_waits(run):
    ask = run(max_wait=5.0)
    began = time.perf_counter()
    for number in range(20):
        assert ask(number).wait(5)
    assert time.perf_counter() - began < 2.5


def test_idle_connections_are_not_waited_for(run):
    ask = run(max_wait=5.0)
    for source in ("gone quiet", "never again"):
        assert ask(0, source).wait(5)
    began = time.perf_counter()
    assert ask(1, "robot").wait(5)
    assert time.perf_counter() - began < 2.5


def test_robots_in_step_share_batches(run, policy):
    """Each asks again as soon as it is answered: the first to come waits for the others."""
    policy.delay = 0.1
    ask = run(max_batch=4, max_wait=0.5)
    together = threading.Barrier(4)

    def robot(source: int) -> None:
        together.wait(5)
        for number in range(10):
            assert ask(10 * source + number, source).wait(5)

    with ThreadPoolExecutor(4) as robots:
        list(robots.map(robot, range(4)))
    sizes = [len(batch) for batch in policy.batches]
    assert sum(sizes) == 40
    assert sizes.count(4) >= 5, sizes


def test_who_is_due_but_does_not_come_costs_the_wait_and_no_more(run, policy):
    policy.delay = 0.6
    ask = run(max_wait=0.4)
    for number in range(3):
        assert ask(number, "partner").wait(5)
    first = ask(3, "robot")
    assert first.wait(5)
    second = ask(4, "robot")
    assert second.wait(5)
    assert 200 < first.outcome.queue_ms < 1200
    assert second.outcome.queue_ms < 300


def test_nobody_waits_longer_than_the_policy_takes(run):
    """The policy is fast, so that waiting for the partner, which is due, would gain nothing."""
    ask = run(max_wait=5.0)
    for number in range(3):
        assert ask(number, "partner").wait(5)
    answer = ask(3, "robot")
    assert answer.wait(5)
    assert answer.outcome.queue_ms < 2500


def test_requests_of_a_connection_that_is_gone_are_dropped(run, policy, call):
    ask = run()
    policy.gate.clear()
    ask(0)
    policy.began.acquire()
    lost, kept = ask(1, "gone"), ask(2, "here")
    call(ask.batcher.forget, "gone")
    policy.gate.set()
    assert kept.wait(5)
    assert policy.batches == [[0], [2]]
    assert not lost.is_set()


def test_stopping_waits_for_the_policy(run, policy, call):
    ask = run()
    policy.gate.clear()
    answer = ask(0)
    policy.began.acquire()
    assert not call(ask.batcher.stop, 0.1)
    policy.gate.set()
    assert answer.wait(5)


def test_a_request_that_was_cancelled_disturbs_nobody(run, policy, call):
    ask = run()
    policy.gate.clear()
    call(lambda: ask.batcher.submit({"number": 1}, "gone").cancel() and None)
    policy.began.acquire()
    policy.gate.set()
    assert ask(2).wait(5)
