"""Learning rates at the steps where a schedule turns."""

import math

import pytest

from piston.config import CosineDecaySchedule, RsqrtDecaySchedule


def test_warmup_starts_at_a_fraction_of_the_peak_and_reaches_it():
    schedule = CosineDecaySchedule(warmup_steps=10, peak_lr=1.1, decay_steps=50, decay_lr=0.1)
    assert schedule(0) == pytest.approx(0.1)
    assert schedule(5) == pytest.approx(0.6)
    assert schedule(10) == pytest.approx(1.1)


def test_cosine_is_halfway_in_the_middle_and_stays_at_the_end():
    schedule = CosineDecaySchedule(warmup_steps=10, peak_lr=1.0, decay_steps=50, decay_lr=0.2)
    assert schedule(30) == pytest.approx(0.6)
    assert schedule(50) == pytest.approx(0.2)
    assert schedule(10_000) == pytest.approx(0.2)


def test_rsqrt_falls_to_the_peak_over_root_two_after_its_timescale():
    schedule = RsqrtDecaySchedule(warmup_steps=100, peak_lr=1.0, timescale=500)
    assert schedule(100) == pytest.approx(1.0)
    assert schedule(600) == pytest.approx(1 / math.sqrt(2))


def test_no_warmup_begins_at_the_peak():
    assert CosineDecaySchedule(warmup_steps=0, peak_lr=3.0)(0) == pytest.approx(3.0)


def test_a_decay_that_would_end_before_the_warmup_is_refused():
    with pytest.raises(ValueError, match=r"decay_steps \(500\).*warmup_steps \(1000\)"):
        CosineDecaySchedule(decay_steps=500)
