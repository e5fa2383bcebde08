"""ALOHA against gym-aloha itself, and its experts."""

import numpy as np
import pytest

pytest.importorskip("gym_aloha", reason="needs the extra `sim`")

from piston.sim import make_environment, make_expert
from piston.sim.recording import demonstrate

TASKS = ("aloha_transfer_cube", "aloha_insertion")


@pytest.mark.parametrize("name", TASKS)
def test_states_rewards_and_pictures_are_gym_alohas(name):
    ours, stock = make_environment(name), make_environment(f"{name}_stock")
    expert = make_expert(name)
    _assert_alike(ours.reset(3), stock.reset(3))
    assert ours.initial_state() == stock.initial_state()
    expert.start(ours)
    for _ in range(4):
        action = expert.act().executed
        one, other = ours.step(action), stock.step(action)
        assert one == other
    _assert_alike(ours.observe(), stock.observe())


def _assert_alike(ours, stock):
    np.testing.assert_array_equal(ours["state"], stock["state"])
    assert ours["prompt"] == stock["prompt"]
    mine = ours["images"]["cam_high"].astype(float)
    theirs = stock["images"]["cam_high"].astype(float)
    # What differs is mostly the shadows, which are dark on dark.
    assert np.abs(mine - theirs).mean() < 4
    # Red things stand out, and must stand in the same place.
    np.testing.assert_allclose(_red_centre(mine), _red_centre(theirs), atol=0.3)


def _red_centre(image):
    """In pixels; each counts as much as it is red, because an object is only a few pixels wide."""
    redness = np.maximum(image[..., 0] - image[..., 1], 0)
    assert redness.max() > 80
    rows, columns = np.indices(redness.shape)
    return (redness * rows).sum() / redness.sum(), (redness * columns).sum() / redness.sum()


def test_the_stock_environment_ends_at_the_first_success(monkeypatch):
    stock = make_environment("aloha_transfer_cube_stock", pixels=8)
    observation = stock.reset(0)
    monkeypatch.setattr(stock._gymnasium.unwrapped._env.task, "get_reward", lambda _: 4)
    result = stock.step(observation["state"])
    assert result.success
    assert result.done


@pytest.mark.parametrize(("name", "at_least"), [(TASKS[0], 10), (TASKS[1], 9)])
def test_the_expert_succeeds_and_holds_to_the_end(name, at_least, monkeypatch):
    environment, expert = make_environment(name), make_expert(name)
    # Nobody looks: drawing is most of the time.
    observation = environment.reset(0)
    monkeypatch.setattr(environment, "observe", lambda: observation)
    episodes = [demonstrate(environment, expert, seed) for seed in range(500, 510)]
    assert sum(episode.success for episode in episodes) >= at_least
    assert max(len(episode.frames) for episode in episodes) < environment.max_steps


@pytest.mark.parametrize("name", TASKS)
def test_plans_are_smooth_and_within_the_joints_limits(name):
    environment, expert = make_environment(name, pixels=8), make_expert(name)
    limits = environment._physics.model.jnt_range
    arms = [*range(6), *range(8, 14)]
    for seed in range(20):
        environment.reset(seed)
        expert.start(environment)
        plan = np.array([step.executed for step in iter(expert.act, None)])
        joints = plan[:, [*range(6), *range(7, 13)]]
        assert (joints > limits[arms, 0]).all()
        assert (joints < limits[arms, 1]).all()
        assert np.abs(np.diff(joints, axis=0)).max() < 0.1
        assert plan[:, [6, 13]].min() >= 0
        assert plan[:, [6, 13]].max() <= 1
