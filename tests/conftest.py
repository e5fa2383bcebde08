"""Where tests find the reference cases, and how properties are tried."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from piston.extras import require_compiler

# Examples are small; a busy machine must not fail a property.
hypothesis.settings.register_profile(
    "piston", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("piston")

# Workers of pytest-xdist have the terminal's width in this variable; output is tested without one.
os.environ.pop("COLUMNS", None)
# Without pytest-xdist, readline sets it for the processes that tests start, past os.environ.
os.unsetenv("COLUMNS")

# A shell that runs the tests in the background makes all processes ignore Ctrl-C; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


REPOSITORY = Path(__file__).parent.parent
SHARED_REFERENCE = Path(
    os.environ.get("PISTON_REFERENCE", REPOSITORY.parent / "shared" / "reference")
)
SMALL_REFERENCE = Path(__file__).parent / "reference"


@pytest.fixture(scope="session")
def reference() -> Path:
    """The full set of reference cases; skips where it is not on this machine."""
    if not SHARED_REFERENCE.is_dir():
        pytest.skip(
            f"needs the full reference cases at {SHARED_REFERENCE} (set PISTON_REFERENCE); "
            "the small ones in tests/reference are tested regardless"
        )
    return SHARED_REFERENCE


@pytest.fixture(scope="session")
def small_reference() -> Path:
    """The numerical cases that travel with the repository."""
    return SMALL_REFERENCE


@pytest.fixture(scope="session")
def shapes_checked():
    """Turns the checks of shapes off, or on, within a block. They take half the time of a step."""

    @contextlib.contextmanager
    def checked(yes: bool) -> Iterator[None]:
        before = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", not yes)
        try:
            yield
        finally:
            jaxtyping.config.update("jaxtyping_disable", before)

    return checked


@pytest.fixture(scope="session")
def checkpoint_of_two_robots(tmp_path_factory, shapes_checked) -> Path:
    """See `training/two_robots.py`."""
    from tests.training import two_robots

    with shapes_checked(False):
        return two_robots.train(tmp_path_factory.mktemp("two robots"))


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skip tests that use torch.compile where it has no compiler."""
    try:
        require_compiler("torch.compile")
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture
def wait_until():
    """Waits for another process to get somewhere."""

    def wait(is_so: Callable[[], object], seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, "waited too long"
            time.sleep(0.05)

    return wait


@pytest.fixture
def is_alive():
    """Whether a process runs; a zombie does not."""

    def alive(process: int) -> bool:
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    return alive


@pytest.fixture
def process_tree():
    """The ids of a process and all below it, on Linux."""

    def tree(root: int) -> list[int]:
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                # After the name, which may hold anything: state, parent …
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(path.parent.name))
        found = [root]
        for process in found:
            found += children.get(process, [])
        return found

    return tree
