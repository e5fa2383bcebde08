"""Signals reach the loop as notes, and nothing else."""

import os
import signal
import time
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest

from piston.data.loader import Loader, Order
from piston.data.samples import FakeDataset
from piston.signals import StopSignals

from .tiny_presets import PI0


def test_the_first_signal_leaves_a_note(capfd):
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals("finishing the step, then saving.") as signals:
        assert signals.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM: finishing the step, then saving." in capfd.readouterr().err


def test_a_second_interrupt_ends_at_once():
    with StopSignals("finishing the step, then saving."):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_program_that_cannot_check_is_called():
    calls = []
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals("finishing pending requests.", then=lambda: calls.append(1)) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (calls, signals.received) == ([1], signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is before  # for a second signal
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_to_all_processes_leave_the_data_alone():
    """As torchrun and clusters send them, to a process that has not used multiprocessing before."""
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
    data = FakeDataset(PI0)
    with Loader(data, Order(data, 4), num_workers=1) as loader:
        next(loader)
        # The fork server, what it starts, and what that starts.
        for process in psutil.Process().children(recursive=True):
            for number in (signal.SIGTERM, signal.SIGINT):
                process.send_signal(number)
        time.sleep(0.2)
        for _ in range(6):
            next(loader)
