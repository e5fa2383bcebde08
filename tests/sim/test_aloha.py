"""ALOHA against dm_control and gym-aloha itself, and its experts."""

import logging
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("gym_aloha", reason="needs the extra `sim`")

from gym_aloha.constants import ASSETS_DIR

from piston.sim import make_environment, make_expert, rendering
from piston.sim.aloha import _TOP
from piston.sim.aloha_experts import (
    CLOSED,
    LEFT,
    OPEN,
    Row,
    _plan,
    plan_insertion,
    plan_transfer,
)
from piston.sim.environment import StepResult
from piston.sim.recording import demonstrate

TASKS = ("aloha_transfer_cube", "aloha_insertion")


@pytest.fixture
def dm_control():
    """The simulator of gym-aloha's own environments."""
    reason = "needs dm_control, which requires labmaze: no wheel for Python 3.13 and newer"
    return pytest.importorskip("dm_control.mujoco", reason=reason)


def _take_with_the_left_hand(poses):
    """Lift the cube with the wrong hand: the only way to a reward of 3."""
    x, y, _ = poses["cube"][:3]
    ahead, aside, _ = LEFT.local((x, y, 0))
    down = {"yaw": float(np.arctan2(aside, ahead)) / 2, "pitch": np.radians(72)}
    hand = [
        Row(34, (x, y, 0.12), OPEN, down),
        Row(58, (x, y, 0.025), OPEN, down),
        Row(66, (x, y, 0.025), CLOSED, down),
        Row(80, (x, y, 0.025), CLOSED, down),
        Row(120, (0, 0.5, 0.2), CLOSED, down),
    ]
    return _plan(hand, [Row(40, (0.3, 0.5, 0.3), OPEN, {}, "stay away")])


# Seed 9 puts the cube within reach of the left hand.
@pytest.mark.parametrize(
    ("name", "seed", "make_plan", "rewards"),
    [
        (TASKS[0], 0, plan_transfer, {0, 1, 2, 4}),
        (TASKS[0], 9, _take_with_the_left_hand, {0, 3, 4}),
        (TASKS[1], 0, plan_insertion, {0, 1, 2, 3, 4}),
        (TASKS[1], 1_000_001, plan_insertion, {0, 1, 2, 4}),
    ],
)
def test_states_rewards_and_pictures_are_bit_equal_to_dm_controls(
    dm_control, name, seed, make_plan, rewards
):
    from gym_aloha.tasks import sim as tasks

    environment = make_environment(name)
    environment.reset(seed)
    source, _, ours = environment._current()
    physics = dm_control.Physics.from_xml_path(str(ASSETS_DIR / source))
    task = tasks.TransferCubeTask() if name == TASKS[0] else tasks.InsertionTask()
    tasks.BOX_POSE[0] = environment.task.poses(seed)
    with physics.reset_context():
        task.initialize_episode(physics)
    theirs, world = physics.data, rendering.World("dm_control", physics.model.ptr, physics.data.ptr)

    def assert_equal():
        for array in ("qpos", "qvel", "ctrl", "qacc_warmstart", "geom_xpos"):
            np.testing.assert_array_equal(getattr(ours, array), getattr(theirs, array))
        np.testing.assert_array_equal(environment._state(), task.get_qpos(physics))

    assert_equal()
    expert = make_plan(environment.initial_state()["objects"]).actions
    random = expert[-1] + np.random.default_rng(seed).normal(0, 0.3, (60, 14))
    seen = set()
    for step, action in enumerate(np.concatenate([expert, random])):
        result = environment.step(action)
        task.before_step(action, physics)
        physics.step(round(1 / environment.control_hz / physics.timestep()))
        reward = task.get_reward(physics)
        assert (result.reward, result.success) == (reward, reward == task.max_reward)
        seen.add(reward)
        assert_equal()
        if step % 50 == 0:
            image = rendering._thread.submit(rendering._draw, world, _TOP, 96, 96).result()
            np.testing.assert_array_equal(environment.observe()["images"]["cam_high"], image)
    assert seen >= rewards


def test_dm_control_is_needed_only_for_the_stock_environments(tmp_path):
    program = """
import sys
sys.modules["dm_control"] = sys.modules["labmaze"] = None
from piston.sim import make_environment, make_expert
environment, expert = make_environment("aloha_transfer_cube"), make_expert("aloha_transfer_cube")
assert environment.reset(0)["images"]["cam_high"].any()
expert.start(environment)
while (step := expert.act()) is not None:
    environment.step(step.executed)
assert environment.held
assert environment.observe()["state"].shape == (14,)
environment.reset(1)
environment._current().data.qvel[:] = 1e12
assert environment.step([0] * 14).done
make_environment("aloha_transfer_cube_stock")
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: aloha_transfer_cube_stock needs dm_control"), last
    assert "-m pip install" in last
    assert "The simulation is unstable" in result.stderr
    assert not list(tmp_path.iterdir())  # MuJoCo's own log file


def test_an_episode_ends_where_the_simulation_diverges(caplog):
    environment = make_environment("aloha_transfer_cube", pixels=8)
    start = environment.reset(4)["state"]
    environment._current().data.qvel[:] = 1e12
    with caplog.at_level(logging.WARNING):
        result = environment.step(start)
    assert result == StepResult(reward=0.0, success=False, done=True)
    assert "seed 4: the episode ends here. " in caplog.text
    assert "mjWARN_BADQVEL" in caplog.text
    np.testing.assert_array_equal(environment.reset(4)["state"], start)
    assert not environment.step(start).done


@pytest.mark.usefixtures("dm_control")
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


@pytest.mark.usefixtures("dm_control")
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
    limits = environment._current().model.jnt_range
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
