"""These tests construct models themselves, so they choose the CPU's products themselves."""

import pytest

from piston.models import cpu


@pytest.fixture(scope="session", autouse=True)
def _chosen_product():
    cpu.choose_product()
