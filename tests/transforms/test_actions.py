"""Relative and absolute actions, masks, thinning, padding."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piston.transforms import compose, for_inference
from piston.transforms.actions import (
    AbsoluteActions,
    DeltaActions,
    InterpolateActions,
    PadStatesAndActions,
    PerturbState,
    SubsampleActions,
    make_bool_mask,
    pad_to_dim,
)

# A busy machine is no failure.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

moderate = st.floats(-100, 100, width=32)


@st.composite
def samples(draw):
    """State, actions and a mask that may be shorter than both, with random batch axes."""
    leading = draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3))
    state_dim, action_dim = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    horizon = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return {
        "state": draw(hnp.arrays(dtype, (*leading, state_dim), elements=moderate)),
        "actions": draw(hnp.arrays(dtype, (*leading, horizon, action_dim), elements=moderate)),
    }, draw(st.lists(st.booleans(), max_size=min(state_dim, action_dim)))


@RELAXED
@given(samples())
def test_absolute_undoes_delta(sample):
    data, mask = sample
    delta = DeltaActions(mask)(data)
    back = AbsoluteActions(mask)(delta)
    np.testing.assert_allclose(back["actions"], data["actions"], atol=1e-4)
    assert back["actions"].dtype == delta["actions"].dtype == data["actions"].dtype


@RELAXED
@given(samples())
def test_delta_is_relative_to_the_state_at_the_start_of_the_chunk(sample):
    data, mask = sample
    delta = DeltaActions(mask)(data)["actions"]
    for dim in range(data["actions"].shape[-1]):
        relative = dim < len(mask) and mask[dim]
        start = data["state"][..., None, dim] if relative else 0.0
        np.testing.assert_allclose(delta[..., dim], data["actions"][..., dim] - start, atol=1e-4)


def test_no_mask_or_no_actions_change_nothing():
    data = {"state": np.ones(2), "actions": np.ones((3, 2))}
    assert DeltaActions(None)(data) is data
    assert DeltaActions([True])({"state": np.ones(2)}).keys() == {"state"}


@pytest.mark.parametrize(
    ("state", "actions", "mask", "message"),
    [
        ((2,), (4, 2), [True] * 3, "mask has 3 entries, 'actions' only 2 dimensions"),
        (
            (2,),
            (4, 5),
            [False, False, True],
            "action dimension 2 relative to dimension 2 of 'state', which has only 2",
        ),
        ((3, 2), (4, 2), [True], "batch axes must agree"),
        ((2,), (2,), [True], r"'actions' \(2,\); their batch axes .* \(…, horizon, dim\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(state, actions, mask, message):
    with pytest.raises(ValueError, match=message):
        DeltaActions(mask)({"state": np.zeros(state), "actions": np.zeros(actions)})


def test_absolute_dimensions_need_no_state():
    data = {"state": np.ones(1), "actions": np.zeros((4, 3))}
    result = AbsoluteActions([True, False, False])(data)["actions"]
    np.testing.assert_array_equal(result, [[1, 0, 0]] * 4)


def test_integer_actions_do_not_wrap():
    data = {"state": np.array([0.5]), "actions": np.array([[1]], dtype=np.uint8)}
    np.testing.assert_array_equal(DeltaActions([True])(data)["actions"], [[0.5]])


def test_run_lengths_are_no_mask():
    with pytest.raises(TypeError, match="make_bool_mask"):
        DeltaActions([6, -1])


def test_make_bool_mask_meets_the_reference(small_reference):
    cases = json.loads((small_reference / "transforms.json").read_text())
    masks = {name: value for name, value in cases.items() if name.startswith("make_bool_mask")}
    assert masks
    for name, expected in masks.items():
        dims = name.removeprefix("make_bool_mask(").removesuffix(")").split(",")
        assert list(make_bool_mask(*map(int, dims))) == expected, name


def test_a_perturbed_state_leaves_the_way_to_the_right_place():
    random = np.random.default_rng(0)
    mask = (True, True, False)
    perturb, delta = PerturbState(0.1, mask), DeltaActions(mask)
    state = random.normal(size=(5_000, 3)).astype(np.float32)
    actions = random.normal(size=(5_000, 4, 3)).astype(np.float32)
    data = {"state": state, "actions": actions}

    seen = perturb(data)
    errors = seen["state"] - state
    assert seen["state"].dtype == np.float32
    np.testing.assert_array_equal(errors[:, 2], 0)
    assert errors[:, :2].std() == pytest.approx(0.1, rel=0.05)
    assert np.abs(errors[:, :2].mean(0)).max() < 0.01
    assert len(np.unique(errors[:, 0])) > 2_000
    # What the model learns leads from the state it sees to where the robot should go.
    arrived = AbsoluteActions(mask)(delta(seen))["actions"]
    np.testing.assert_allclose(arrived, actions, atol=1e-5)


def test_a_sample_is_perturbed_alike_alone_and_in_a_batch_and_not_at_inference():
    perturb = PerturbState(0.1, (True, True))
    assert for_inference([compose([perturb])]) == (compose([]),)
    state = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    actions = np.zeros((3, 1, 2))
    together = perturb({"state": state, "actions": actions})["state"]
    for one, expected in zip(state, together):
        alone = perturb({"state": one, "actions": actions[0]})["state"]
        np.testing.assert_array_equal(alone, expected)
    with pytest.raises(ValueError, match="std is -1"):
        PerturbState(-1.0, (True,))


def test_subsample_keeps_every_nth_step_and_its_padding_mark():
    actions = np.arange(24.0).reshape(2, 6, 2)
    marks = np.arange(12).reshape(2, 6) > 3
    result = SubsampleActions(4)({"actions": actions, "action_is_pad": marks})
    np.testing.assert_array_equal(result["actions"], actions[:, [0, 4]])
    np.testing.assert_array_equal(result["action_is_pad"], marks[:, [0, 4]])
    with pytest.raises(ValueError, match="stride is 0; expected at least 1"):
        SubsampleActions(0)


@RELAXED
@given(samples(), st.integers(6, 9))
def test_padding_is_zeros_behind_the_data(sample, dim):
    data, _ = sample
    padded = PadStatesAndActions(dim)(data)
    for key, values in data.items():
        width = values.shape[-1]
        assert padded[key].shape == (*values.shape[:-1], dim)
        assert padded[key].dtype == values.dtype
        np.testing.assert_array_equal(padded[key][..., :width], values)
        assert not padded[key][..., width:].any()


def test_more_dimensions_than_the_model_takes_are_refused():
    with pytest.raises(ValueError, match="'state' has 44 dimensions; the model takes at most 32"):
        PadStatesAndActions(32)({"state": np.zeros(44)})


def test_pad_to_dim_along_any_axis():
    assert pad_to_dim(np.zeros((2, 3)), 4, axis=0, value=1.0).sum() == 6
    with pytest.raises(ValueError, match="longer"):
        pad_to_dim(np.zeros(3), 2)


@given(
    stride=st.integers(1, 5),
    horizon=st.integers(1, 6),
    batch=st.lists(st.integers(1, 3), max_size=2),
    seed=st.integers(0, 99),
)
def test_interpolation_passes_through_every_action_in_straight_lines(stride, horizon, batch, seed):
    actions = np.random.default_rng(seed).normal(size=(*batch, horizon, 2))
    data = {"actions": actions}
    between = InterpolateActions(stride)(data)["actions"]
    assert between.shape == (*batch, (horizon - 1) * stride + 1, 2)
    np.testing.assert_allclose(between[..., ::stride, :], actions, atol=1e-12)
    thinned = SubsampleActions(stride)({"actions": between})["actions"]
    np.testing.assert_allclose(thinned, actions, atol=1e-12)
    steps = np.arange(horizon)
    fine = np.arange(between.shape[-2]) / stride
    for index in np.ndindex(*batch, 2):
        line = np.interp(fine, steps, actions[(*index[:-1], slice(None), index[-1])])
        found = between[(*index[:-1], slice(None), index[-1])]
        np.testing.assert_allclose(found, line, atol=1e-9)
