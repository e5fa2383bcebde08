"""What every environment promises, whichever robot it holds."""

import json
import sys

import numpy as np
import pytest

pytest.importorskip("gym_aloha", reason="needs the extra `sim`")

from piston.sim import (
    RECORDING_SEEDS,
    check_evaluation_seeds,
    environment_names,
    make_environment,
    make_expert,
)

NAMES = ("aloha_transfer_cube", "aloha_insertion", "metaworld:tiny", "metaworld:door-open")


@pytest.fixture(params=NAMES)
def environment(request):
    environment = make_environment(request.param)
    yield environment
    environment.close()


def _run(environment, seed: int, num_steps: int = 5):
    """The observation at the start, and after a few random steps from there."""
    start = environment.reset(seed)
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        push = random.normal(0, 0.1, environment.action_dim)
        state = start["state"] if environment.robot_type == "aloha" else 0
        environment.step(state + push)
    return start, environment.observe()


def _assert_same(one, other):
    assert one["prompt"] == other["prompt"]
    np.testing.assert_array_equal(one["state"], other["state"])
    for camera, image in one["images"].items():
        np.testing.assert_array_equal(image, other["images"][camera])


def test_a_seed_means_a_start_whatever_happened_before(environment):
    first = _run(environment, seed=7)
    began = environment.initial_state()
    _run(environment, seed=8)
    again = _run(environment, seed=7)
    fresh = make_environment(environment.name)
    for one, two, three in zip(first, again, _run(fresh, seed=7)):
        _assert_same(one, two)
        _assert_same(one, three)
    assert began == environment.initial_state() == fresh.initial_state()
    fresh.close()


def test_other_seeds_are_other_starts(environment):
    starts = []
    for seed in range(0, 30, 5):  # the same task in the mixture of five
        image = next(iter(environment.reset(seed)["images"].values()))
        starts.append((image.tobytes(), json.dumps(environment.initial_state())))
    assert len({image for image, _ in starts}) == len({state for _, state in starts}) == 6


def test_observations_are_what_the_environment_declares(environment):
    observation = environment.reset(seed=0)
    assert set(observation) == {"images", "state", "prompt"}
    assert set(observation["images"]) == set(environment.cameras)
    for image in observation["images"].values():
        assert image.dtype == np.uint8
        assert image.shape == (environment.pixels, environment.pixels, 3)
        assert image.flags.c_contiguous
    assert observation["state"].dtype == np.float32
    assert observation["state"].shape == (environment.state_dim,)
    assert len(environment.state_names) == environment.state_dim
    assert len(environment.action_names) == environment.action_dim
    assert observation["prompt"] == environment.prompt


def test_two_environments_side_by_side_do_not_disturb_each_other(environment):
    alone = _run(environment, seed=3)
    other = make_environment(environment.name)
    mine, theirs = environment.reset(3), other.reset(13)
    random = np.random.default_rng(0)
    for _ in range(5):
        push = random.normal(0, 0.1, environment.action_dim)
        aloha = environment.robot_type == "aloha"
        environment.step((mine["state"] if aloha else 0) + push)
        other.step((theirs["state"] if aloha else 0) - push)
        other.observe()
    _assert_same(environment.observe(), alone[1])
    other.close()


def test_episodes_end_and_say_so():
    environment = make_environment("metaworld:drawer-open-halfway", pixels=8)
    with pytest.raises(ValueError, match=r"Call reset\(seed\)"):
        environment.step(np.zeros(4))
    environment.reset(seed=0)
    results = [environment.step(np.zeros(4)) for _ in range(environment.max_steps)]
    assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
    assert not environment.ever_succeeded
    with pytest.raises(ValueError, match="the episode is over"):
        environment.step(np.zeros(4))
    environment.reset(seed=1)
    assert not environment.done
    environment.close()


def test_bad_actions_are_refused(environment):
    environment.reset(seed=0)
    with pytest.raises(ValueError, match=rf"expected \({environment.action_dim},\)"):
        environment.step(np.zeros(environment.action_dim + 1))
    with pytest.raises(ValueError, match="NaN"):
        environment.step(np.full(environment.action_dim, np.nan))
    assert environment.steps == 0


def test_a_flicker_does_not_end_success(monkeypatch):
    environment = make_environment("aloha_transfer_cube", pixels=8)
    environment.reset(seed=0)
    outcomes = iter([True, False, *[False] * 9])
    monkeypatch.setattr(environment, "_step", lambda _: (0.0, next(outcomes), False))
    environment.step(np.zeros(14))
    assert environment.success
    assert environment.held
    environment.step(np.zeros(14))
    assert not environment.success
    assert environment.held
    for _ in range(9):
        environment.step(np.zeros(14))
    assert not environment.held
    assert environment.ever_succeeded
    environment.reset(seed=0)
    assert not environment.ever_succeeded


def test_pixels_are_the_users():
    assert make_environment("aloha_insertion", pixels=40).reset(0)["images"]["cam_high"].shape == (
        40,
        40,
        3,
    )
    with pytest.raises(ValueError, match="pixels=0"):
        make_environment("aloha_insertion", pixels=0)


@pytest.mark.parametrize("make", [make_environment, make_expert])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("aloha_transfer_cub", "aloha_transfer_cube"),
        ("metaworld:draweropen", "metaworld:drawer-open"),
        ("metaworld:drawer-open,window-opn", "metaworld:window-open"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(make, name, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        make(name)


def test_a_task_cannot_be_mixed_with_itself():
    with pytest.raises(ValueError, match="twice"):
        make_environment("metaworld:drawer-open,drawer-open-v3")


def test_every_listed_name_is_unique():
    names = environment_names()
    assert len(set(names)) == len(names) > 50


def test_without_the_simulators_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "piston.sim.aloha", raising=False)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'piston\[sim\]'"):
        make_environment("aloha_insertion")


def test_evaluation_may_not_use_what_was_recorded():
    check_evaluation_seeds(range(50))
    with pytest.raises(ValueError, match="a policy may have been trained on them"):
        check_evaluation_seeds([0, RECORDING_SEEDS])
    with pytest.raises(ValueError, match="found -1"):
        check_evaluation_seeds([-1])
    with pytest.raises(ValueError, match="expected 0 or more"):
        make_environment("aloha_insertion").reset(-1)
