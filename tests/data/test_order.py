"""The order of samples: complete, the same for everyone, and restored exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piston.data.loader import Order
from piston.data.mixture import WeightedMixture

sizes = st.integers(1, 40)


def batches(order, count, position=0):
    return [order.take(position + k * order.batch_size).tolist() for k in range(count)]


def joined(parts):
    return [index for part in parts for index in part]


@given(num_samples=sizes, batch_size=sizes, seed=st.integers(0, 2**32), epochs=st.integers(1, 4))
def test_every_epoch_holds_every_sample_once(num_samples, batch_size, seed, epochs):
    order = Order(range(num_samples), batch_size, seed=seed)
    count = -(-num_samples * epochs // batch_size)
    row = joined(batches(order, count))
    for epoch in range(epochs):
        seen = row[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(seen) == list(range(num_samples))


@given(num_samples=sizes, per_rank=st.integers(1, 5), world_size=st.integers(1, 6))
def test_a_global_batch_does_not_depend_on_the_number_of_ranks(num_samples, per_rank, world_size):
    batch_size = per_rank * world_size
    alone = Order(range(num_samples), batch_size, seed=1)
    ranks = [
        Order(range(num_samples), batch_size, seed=1, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for number, whole in enumerate(batches(alone, 5)):
        parts = [rank.take(number * batch_size).tolist() for rank in ranks]
        assert all(len(part) == per_rank for part in parts)
        assert joined(parts) == whole


def test_each_epoch_and_each_seed_shuffles_anew():
    def epochs(seed):
        order = Order(range(100), 100, seed=seed)
        return [tuple(batch) for batch in batches(order, 3)]

    assert len({*epochs(0), *epochs(1)}) == 6
    assert epochs(0) == epochs(0)
    assert tuple(range(100)) not in epochs(0)


@given(num_samples=sizes, cut=st.integers(0, 30), world_size=st.sampled_from([1, 2, 4]))
def test_a_saved_position_goes_on_with_any_number_of_ranks(num_samples, cut, world_size):
    order = Order(range(num_samples), 4, seed=3)
    expected = batches(order, cut + 5)[cut:]
    state = order.state_dict(cut * 4)
    ranks = [
        Order(range(num_samples), 4, seed=3, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    continued = [batches(rank, 5, rank.position_of(state)) for rank in ranks]
    assert [joined(parts) for parts in zip(*continued)] == expected


def test_a_position_of_other_data_is_one_in_their_order(caplog):
    state = Order(range(10), 2, seed=0).state_dict(6)
    other = Order(range(11), 2, seed=0)
    assert other.position_of(state) == 6
    assert caplog.text.count("samples_per_epoch was 10, now it is 11") == 1
    Order(range(11), 2, seed=0, rank=1, world_size=2).position_of(state)
    assert len(caplog.records) == 1  # the first process tells it for all


def test_a_position_of_another_seed_is_refused():
    state = Order(range(10), 2, seed=0).state_dict(6)
    with pytest.raises(ValueError, match="seed is 0, now it is 1"):
        Order(range(10), 2, seed=1).position_of(state)


def test_a_mixture_is_taken_in_its_shares_on_all_ranks():
    mixture = WeightedMixture([range(1000), range(10)], [1, 3], samples_per_epoch=400)
    ranks = [Order(mixture, 40, seed=0, rank=rank, world_size=2) for rank in range(2)]
    row = np.concatenate([rank.take(k * 40) for k in range(20) for rank in ranks])
    assert [int((part < 1000).sum()) for part in row.reshape(2, 400)] == [100, 100]
    small = row[row >= 1000]
    assert set(np.bincount(small - 1000)) == {60}
    large = row[row < 1000]
    assert len(set(large)) == len(large)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 5, "world_size": 2}, "multiple of the number of processes"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank is 2"),
        ({"batch_size": 0}, "batch size"),
    ],
)
def test_what_cannot_be_ordered_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Order(range(10), **arguments)
    with pytest.raises(ValueError, match="no samples"):
        Order([], 1)
