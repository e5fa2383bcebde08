"""Where tests find the reference cases, and how properties are tried."""

import os
import signal
from pathlib import Path

import hypothesis
import pytest

# Examples are small; a busy machine must not fail a property.
hypothesis.settings.register_profile(
    "piston", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("piston")

# A shell that runs the tests in the background makes all processes ignore Ctrl-C; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
