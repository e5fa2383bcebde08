"""Which episodes, and a mixture's plan."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piston.config import DataConfig
from piston.data.mixture import (
    RepeatedStarts,
    WeightedMixture,
    choose_episodes,
    mixed,
    shuffled,
    split_episodes,
)
from piston.data.protocol import Episode


def _episodes(indices):
    return [Episode(index, 10 + index) for index in indices]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("0:3", [0, 1, 2]),
        (":2", [0, 1]),
        ("8:", [8, 9]),
        ("0:100", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("3,7,8-9", [3, 7, 8, 9]),
        (" 5 , 1:3 ", [1, 2, 5]),
        ("!7", [0, 1, 2, 3, 4, 5, 6, 8, 9]),
        ("0:4,!1", [0, 2, 3]),
        ("! 2-8", [0, 1, 9]),
        ([7, 3, 3], [3, 7]),
        (np.array([1, 2]), [1, 2]),
        (range(2), [0, 1]),
        (lambda episode: episode.length >= 18, [8, 9]),
    ],
)
def test_episodes_are_chosen_in_their_own_order(choice, expected):
    assert [episode.index for episode in choose_episodes(_episodes(range(10)), choice)] == expected


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ([3, 12], r"Episodes 12 were asked for; the data set has 0, 1, 2, 3 … 9 \(10 in all\)"),
        ("8-11", "Episodes 10, 11"),
        ("50:60", "selects none of 10"),
        (lambda _: False, "selects none"),
        ("first", "names no episodes"),
        ("", "names no episodes"),
        ("1--3", "names no episodes"),
        ("!12", "Episodes 12 were asked for"),
        ("!", "names no episodes"),
        ("3,!3", "selects none"),
        ([True, False], "by their numbers"),
        (np.zeros(10, bool), "by their numbers"),
        ([1.5], "by their numbers"),
    ],
)
def test_what_names_no_episode_is_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        choose_episodes(_episodes(range(10)), choice)


@given(
    indices=st.sets(st.integers(0, 10_000), min_size=2, max_size=60),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 1000),
)
def test_a_split_holds_every_episode_once(indices, share, seed):
    episodes = _episodes(sorted(indices))
    count = max(round(share * len(episodes)), 1)
    if count == len(episodes):
        with pytest.raises(ValueError, match="at least one episode"):
            split_episodes(episodes, share, seed=seed)
        return
    train, held_out = split_episodes(episodes, share, seed=seed)
    assert sorted(train + held_out) == sorted(indices)
    assert len(held_out) == count
    assert split_episodes(episodes[::-1], share, seed=seed) == (train, held_out)


def test_a_split_depends_on_the_seed_and_hardly_on_what_is_added_later():
    episodes = _episodes(range(100))
    held_out = set(split_episodes(episodes, 10, seed=1)[1])
    assert held_out != set(split_episodes(episodes, 10, seed=2)[1])
    later = set(split_episodes(_episodes(range(110)), 11, seed=1)[1])
    assert len(held_out & later) >= 8
    assert split_episodes(episodes, 3, seed=0)[1] == [16, 31, 46]  # the same on every machine


@pytest.mark.parametrize("held_out", [0, 10, 12, 0.0, 1.0, -0.5])
def test_both_sides_of_a_split_have_episodes(held_out):
    with pytest.raises(ValueError):
        split_episodes(_episodes(range(10)), held_out)


def test_a_mixture_numbers_all_samples():
    mixture = WeightedMixture([list("abc"), list("de")], [1, 1])
    assert "".join(mixture[index] for index in range(len(mixture))) == "abcde"
    assert mixture.locate(3) == (1, 0)
    with pytest.raises(IndexError):
        mixture[5]
    picked = [mixture.datasets[dataset][index] for dataset, index in rows(mixture, 0, 0)]
    assert [mixture[int(index)] for index in mixture.plan(seed=0, epoch=0)] == picked


def rows(mixture, seed, epoch):
    """The order of an epoch as (data set, index)."""
    return np.array([mixture.locate(index) for index in mixture.plan(seed=seed, epoch=epoch)])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
    seed=st.integers(0, 99),
    per_epoch=st.integers(1, 120),
)
def test_shares_hold_and_every_sample_comes_equally_often(sizes, weights, seed, per_epoch):
    weights = weights[: len(sizes)]
    datasets = [range(size) for size in sizes]
    mixture = WeightedMixture(datasets, weights, samples_per_epoch=per_epoch)
    plans = [rows(mixture, seed, epoch) for epoch in range(5)]
    for plan in plans:
        assert plan.shape == (per_epoch, 2)
        counts = np.bincount(plan[:, 0], minlength=len(sizes))
        exact = np.asarray(weights) / sum(weights) * per_epoch
        assert (np.abs(counts - exact) < 1 + 1e-9).all()
    together = np.concatenate(plans)
    for number, size in enumerate(sizes):
        seen = np.bincount(together[together[:, 0] == number, 1], minlength=size)
        assert len(seen) == size
        assert seen.max() - seen.min() <= 1


@given(
    weights=st.lists(st.floats(0.001, 20), min_size=2, max_size=5),
    per_epoch=st.integers(1, 50),
)
def test_over_many_epochs_even_the_smallest_share_is_drawn(weights, per_epoch):
    mixture = WeightedMixture([range(7)] * len(weights), weights, samples_per_epoch=per_epoch)
    counts = mixture._counts(400)
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == per_epoch).all()
    exact = np.asarray(weights) / sum(weights) * per_epoch
    sums, epochs = np.cumsum(counts, axis=0), np.arange(1, 401)[:, np.newaxis]
    assert np.abs(sums - epochs * exact).max() < 6


def test_a_share_of_less_than_a_sample_per_epoch_has_its_turn():
    mixture = WeightedMixture([range(32), range(16)], [100, 1])
    drawn = [rows(mixture, 0, epoch)[:, 0].sum() for epoch in range(42)]
    assert 18 <= sum(drawn) <= 22  # every 101st of 42 times 48 samples
    assert max(drawn) == 1


@given(sizes=st.lists(st.integers(1, 400), min_size=2, max_size=6), epoch=st.integers(0, 9))
def test_without_shares_every_sample_comes_once_in_an_epoch(sizes, epoch):
    mixture = mixed([range(size) for size in sizes], [DataConfig()] * len(sizes))
    plan = mixture.plan(seed=3, epoch=epoch)
    assert sorted(plan) == list(range(sum(sizes)))


def test_one_set_is_no_mixture():
    alone = range(3)
    assert mixed([alone], [DataConfig()]) is alone


def test_robots_have_their_shares_and_their_sets_divide_them():
    sets = [range(100), range(300), range(50), range(8)]
    pipelines = [
        DataConfig(entry="a", share=3.0),
        DataConfig(entry="a", share=3.0),
        DataConfig(entry="b", share=1.0, set_share=1.0),
        DataConfig(entry="b", share=1.0, set_share=4.0),
    ]
    weights = np.array(mixed(sets, pipelines).weights)
    np.testing.assert_allclose(weights, [3 / 16, 9 / 16, 1 / 20, 4 / 20])
    by_frames = [dataclasses.replace(one, share=None) for one in pipelines]
    weights = np.array(mixed(sets, by_frames).weights) * 458
    np.testing.assert_allclose(weights, [100, 300, 58 / 5, 58 * 4 / 5])


def test_a_plan_depends_on_seed_and_epoch_alone():
    def plan(seed, epoch):
        return rows(WeightedMixture([range(50), range(20)], [3, 1]), seed, epoch)

    np.testing.assert_array_equal(plan(1, 2), plan(1, 2))
    assert not np.array_equal(plan(1, 2), plan(1, 3))
    assert not np.array_equal(plan(1, 2), plan(2, 2))
    # Data sets are mixed through the whole epoch, not one after another.
    halves = np.split(plan(0, 0)[:, 0], 2)
    assert all(0 < half.sum() < len(half) for half in halves)


def test_a_shuffle_is_the_same_everywhere_and_keys_differ():
    assert shuffled(8, 3, 1).tolist() == shuffled(8, 3, 1).tolist()
    assert sorted(shuffled(1000, 0)) == list(range(1000))
    assert shuffled(50, 3, 1).tolist() != shuffled(50, 1, 3).tolist()
    with pytest.raises(ValueError, match="from 0 up"):
        shuffled(3, -1)


@pytest.mark.parametrize(
    ("datasets", "weights", "message"),
    [
        ([], [], "as many expected"),
        ([[1]], [1, 2], "as many expected"),
        ([[1], [2]], [1, 0], "more than 0"),
        ([[1], [2]], [1, float("nan")], "more than 0"),
        ([[1], []], [1, 1], "without samples"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(datasets, weights, message):
    with pytest.raises(ValueError, match=message):
        WeightedMixture(datasets, weights)


def test_starts_are_repeated_and_nothing_is_lost():
    samples = list(range(100, 110))  # episodes of 4, 1 and 5
    repeated = RepeatedStarts(samples, [4, 1, 5], frames=2, times=3)
    found = [repeated[i] for i in range(len(repeated))]
    assert found[:10] == samples
    assert sorted(found[10:]) == sorted([100, 101, 104, 105, 106] * 2)
    with pytest.raises(ValueError, match="9 frames, the data set has 10"):
        RepeatedStarts(samples, [4, 5], frames=2, times=3)
