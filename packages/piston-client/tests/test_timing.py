"""Absolute deadlines and percentiles, on a clock that the test moves."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from piston_client.runtime import Pacer, Percentiles


def test_steps_begin_on_the_grid_however_long_the_work_takes():
    pacer = Pacer(0.1, start=100.0)
    begins = []
    for work in (0.01, 0.09, 0.05, 0.0):
        begins.append(pacer.begin)
        assert pacer.advance(pacer.begin + work) == (0, 0)
    np.testing.assert_allclose(begins, [100.0, 100.1, 100.2, 100.3])


def test_an_overrun_shortens_the_next_step_and_does_not_move_the_grid():
    pacer = Pacer(0.1, start=100.0)
    overrun, num_skipped = pacer.advance(100.13)
    assert math.isclose(overrun, 0.03)
    assert num_skipped == 0
    assert math.isclose(pacer.begin, 100.1)
    assert pacer.advance(100.2) == (0, 0)
    assert math.isclose(pacer.begin, 100.2)


def test_steps_whose_time_has_passed_are_left_out():
    pacer = Pacer(0.1, start=100.0)
    overrun, num_skipped = pacer.advance(100.45)
    assert math.isclose(overrun, 0.35)
    # Steps 1, 2 and 3 are over; step 4 (begun at 100.4) is under way.
    assert num_skipped == 3
    assert math.isclose(pacer.begin, 100.4)
    assert pacer.advance(100.46) == (0, 0)


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=30))
def test_never_more_than_a_period_behind_and_always_on_the_grid(works):
    pacer = Pacer(0.1, start=100.0)
    now = 100.0
    for work in works:
        now = max(now, pacer.begin) + work
        pacer.advance(now)
        assert now - pacer.begin <= 0.1 + 1e-9
        index = (pacer.begin - 100.0) / 0.1
        assert abs(index - round(index)) < 1e-6


def test_percentiles_are_milliseconds():
    found = Percentiles.of([0.001 * n for n in range(1, 101)])
    assert math.isclose(found.p50, 50.5)
    assert math.isclose(found.worst, 100.0)
    assert "median 50.50 ms" in str(found)
    assert math.isnan(Percentiles.of([]).p50)
    assert str(Percentiles.of([])) == "nothing to measure"
