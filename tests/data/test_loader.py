"""Batches: right, in order, restored exactly; workers that neither leak nor hang."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from piston import presets
from piston.data.loader import Loader, Order, WorkerError
from piston.data.mixture import WeightedMixture
from piston.data.samples import FakeDataset
from piston.observation import Observation, stack_samples

HERE = Path(__file__).parent


@pytest.fixture
def samples(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    import worker_samples

    return worker_samples


def loader(data, *, batch_size=4, num_workers=2, seed=0, **rest):
    return Loader(data, Order(data, batch_size, seed=seed), num_workers=num_workers, **rest)


def indices(batches):
    return [batch["index"].tolist() for batch in batches]


def take(source, count):
    return [next(source) for _ in range(count)]


def alive(pid):
    """A process that ended but was not waited for yet does not count."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter: ended while it was looked at
        return False


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_a_batch_keeps_shapes_types_and_values(samples):
    batch = stack_samples([samples.Numbers()[3], samples.Numbers()[5]])
    assert batch["image"]["top"].shape == (2, 4, 4, 3)
    assert batch["image"]["top"].dtype == torch.uint8
    assert batch["image_mask"]["top"].dtype == torch.bool
    assert batch["state"].dtype == torch.float32
    assert batch["index"].tolist() == [3, 5]
    assert batch["image"]["top"][1].unique().tolist() == [5]
    assert Observation.from_dict(batch).batch_size == 2


def test_samples_that_differ_are_refused_by_name():
    first = {"state": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"'state' is float32\[3\] in sample 0 .* sample 1"):
        stack_samples([first, {"state": np.zeros(4, np.float32)}])
    with pytest.raises(ValueError, match="different keys"):
        stack_samples([first, {"states": np.zeros(3, np.float32)}])
    with pytest.raises(ValueError, match="'prompt' is of <U2"):
        stack_samples([{"prompt": "hi"}])


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
def test_workers_give_what_one_process_gives(samples):
    data = samples.Numbers(21)
    with loader(data, num_workers=0) as alone, loader(data, num_workers=3) as many:
        expected, found = take(alone, 12), take(many, 12)
    assert indices(found) == indices(expected)
    for ours, theirs in zip(expected, found):
        assert torch.equal(ours["image"]["top"], theirs["image"]["top"])
        assert torch.equal(ours["state"], theirs["state"])
    assert {pid for b in expected for pid in b["process"].tolist()} == {os.getpid()}
    assert len({pid for b in found for pid in b["process"].tolist()}) == 3


def test_batches_stay_valid_after_the_loader_is_closed(samples):
    with loader(samples.Numbers()) as source:
        batches = take(source, 4)
    for batch in batches:
        batch["state"] += 1
        assert batch["state"][:, 0].tolist() == [index + 1 for index in batch["index"].tolist()]


def test_batches_do_not_change_when_later_ones_arrive(samples):
    with loader(samples.Numbers(1000), num_workers=1) as source:
        batches = take(source, 20)
    for batch in batches:
        assert batch["state"][:, 0].tolist() == batch["index"].tolist()
        assert batch["image"]["top"][:, 0, 0, 0].tolist() == [
            i % 256 for i in batch["index"].tolist()
        ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_restored_position_goes_on_as_if_never_cut(samples, num_workers):
    data = samples.Numbers(13)
    with loader(data, num_workers=num_workers) as never_cut:
        expected = indices(take(never_cut, 15))
    with loader(data, num_workers=num_workers) as first:
        assert indices(take(first, 5)) == expected[:5]
        state = first.state_dict()  # workers are several batches ahead
        assert state["position"] == 20
    with loader(data, num_workers=num_workers) as second:
        take(second, 2)
        second.load_state_dict(state)
        assert indices(take(second, 10)) == expected[5:]
        assert second.epoch == pytest.approx(15 * 4 / 13)


def test_mixtures_load_through_workers(samples):
    mixture = WeightedMixture([samples.Numbers(5), samples.Numbers(50)], [1, 1])
    with loader(mixture, batch_size=11) as source:
        assert sum(len(batch["index"]) for batch in take(source, 5)) == 55


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_arrives_as_it_was_raised(samples, num_workers):
    data = samples.Numbers(8, bad=3, trouble="raise")
    source = loader(data, batch_size=8, num_workers=num_workers)
    with pytest.raises(KeyError, match="sample 3 is bad") as caught:
        next(source)
    assert "in episode 7" in caught.value.__notes__
    if num_workers:
        assert "worker_samples.py" in str(caught.value.__cause__)


def test_an_error_that_cannot_be_pickled_still_says_what_it_was(samples):
    source = loader(samples.Numbers(8, bad=3, trouble="raise_unpicklable"), batch_size=8)
    with pytest.raises(RuntimeError, match="UnpicklableError: one and 3"):
        next(source)


def test_an_error_in_one_batch_comes_in_its_turn(samples):
    data = samples.Numbers(40, bad=Order(range(40), 4, seed=0).take(12)[1], trouble="raise")
    source = loader(data)
    take(source, 3)
    with pytest.raises(KeyError):
        next(source)


def test_workers_end_with_an_error(samples):
    data = samples.Numbers(40, bad=Order(range(40), 4, seed=0).take(12)[1], trouble="raise")
    source = loader(data)
    pids = {pid for batch in take(source, 3) for pid in batch["process"].tolist()}
    with pytest.raises(KeyError):
        next(source)
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    ("trouble", "message"), [("die", "killed by SIGKILL.*memory"), ("exit", "exit code 3")]
)
def test_a_worker_that_dies_is_noticed_at_once(samples, trouble, message):
    data = samples.Numbers(40, bad=Order(range(40), 4, seed=0).take(12)[1], trouble=trouble)
    source = loader(data)
    next(source)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        take(source, 4)
    assert time.monotonic() - begun < 5


def test_a_worker_killed_from_outside_is_noticed(samples):
    source = loader(samples.Numbers(1000))
    victim = int(next(source)["process"][0])
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=f"process {victim}.*SIGKILL"):
        take(source, 20)


def test_closing_stops_a_worker_in_the_middle_of_a_sample(samples):
    order = Order(range(40), 4, seed=0)
    source = loader(samples.Numbers(40, bad=order.take(4)[0], trouble="sleep"))
    pids = set(next(source)["process"].tolist())
    begun = time.monotonic()
    source.close()
    assert time.monotonic() - begun < 5
    wait_until(lambda: not any(map(alive, pids)))


def test_a_forgotten_loader_ends_its_workers(samples):
    source = loader(samples.Numbers())
    pids = set(next(source)["process"].tolist())
    del source
    wait_until(lambda: not any(map(alive, pids)))


def test_nothing_is_left_open(samples):
    def open_files():
        return len(list(Path("/proc/self/fd").iterdir()))

    with loader(samples.Numbers()) as source:
        take(source, 3)  # starts what stays for good
    gc.collect()  # what other tests have left
    before = open_files()
    for _ in range(3):
        with loader(samples.Numbers()) as source:
            take(source, 30)
            assert open_files() < before + 20
    wait_until(lambda: open_files() <= before)  # threads of the queues close them


def test_data_that_cannot_be_pickled_says_what_to_do(samples):
    data = samples.Numbers()
    data.transform = lambda x: x
    with pytest.raises(Exception, match="pickle") as caught:
        next(loader(data))
    assert any("--num-workers 0" in note for note in caught.value.__notes__)


def test_ranks_share_the_batches_of_a_run():
    data = FakeDataset(presets.get("debug").model)
    alone = Loader(data, Order(data, 4, seed=7))
    ranks = [Loader(data, Order(data, 4, seed=7, rank=rank, world_size=2)) for rank in range(2)]
    for _ in range(2):
        whole = next(alone)["index"].tolist()
        assert [index for rank in ranks for index in next(rank)["index"].tolist()] == whole


def test_impossible_numbers_are_refused(samples):
    with pytest.raises(ValueError, match="num_workers is -1"):
        loader(samples.Numbers(), num_workers=-1)


SCRIPT = """
import signal, sys, time
from worker_samples import Numbers
from piston.data.loader import Loader, Order

if __name__ == "__main__":
    # A shell that runs the tests in the background makes all of them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    data = Numbers(1000)
    loader = Loader(data, Order(data, 4), num_workers=2)
    pids = {pid for _ in range(4) for pid in next(loader)["process"].tolist()}
    print(*pids, flush=True)
    if sys.argv[1] == "wait":
        time.sleep(600)
    while sys.argv[1] == "train":
        next(loader)
"""


@pytest.fixture
def script(tmp_path):
    """Starts a training process; gives it and its workers' process ids."""
    started = []

    def start(how):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        process = subprocess.Popen(
            [sys.executable, str(path), how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", ["train", "wait"])
def test_ctrl_c_ends_everything_and_only_the_main_process_speaks(script, how):
    process, pids = script(how)
    assert len(pids) == 2
    assert all(map(alive, pids))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate(timeout=30)
    assert errors.count("Traceback") == 1
    assert errors.strip().endswith("KeyboardInterrupt")
    wait_until(lambda: not any(map(alive, pids)))


def test_workers_end_when_the_main_process_is_killed(script):
    process, pids = script("wait")
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, pids)))


def test_a_script_that_ends_without_closing_ends(script):
    process, pids = script("end")
    process.communicate(timeout=30)
    assert process.returncode == 0
    wait_until(lambda: not any(map(alive, pids)))
