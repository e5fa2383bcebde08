import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As in processes that tests start: with other numbers of threads sums round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items):
    # Piston filters it when it is imported; pytest undoes that.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:torch.distributed is disabled"))
