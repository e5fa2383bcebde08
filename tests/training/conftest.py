import weakref

import pytest
import torch

from piston.training.step import Trainer


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As in processes that tests start: with other numbers of threads sums round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _shapes_are_checked_in_first_steps(monkeypatch, shapes_checked):
    """The shapes of a trainer's later steps are the same."""
    original, started = Trainer.step, weakref.WeakSet()

    def step(self, *arguments):
        with shapes_checked(self not in started):
            started.add(self)
            return original(self, *arguments)

    monkeypatch.setattr(Trainer, "step", step)


def pytest_collection_modifyitems(items):
    # Piston filters it when it is imported; pytest undoes that.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:torch.distributed is disabled"))
