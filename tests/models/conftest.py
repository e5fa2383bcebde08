"""These tests construct models themselves, so they choose the CPU's products themselves."""

import pytest
import torch

from piston.models import cpu


@pytest.fixture(scope="session", autouse=True)
def _chosen_product():
    cpu.choose_product()


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Numbers drawn without a generator are the same in every run."""
    torch.manual_seed(0)
