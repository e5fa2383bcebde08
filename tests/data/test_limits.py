"""Limits from training data: the range and the steps of what the robot is told."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from piston.config import DataConfigFactory
from piston.data import limits as module
from piston.data.limits import action_limits
from piston.data.pipeline import open_sources
from piston.data.protocol import Episode
from piston.data.statistics import TransformedColumns, compute_statistics
from piston.robots import RobotDataConfig, RobotInputs
from piston.robots.aloha import LeRobotAlohaDataConfig
from piston.robots.description import DescribedRobotDataConfig
from piston.robots.image_text import ImageTextDataConfig
from piston.robots.simple import (
    DroidDataConfig,
    FakeDataConfig,
    LeRobotDROIDDataConfig,
    LeRobotLiberoDataConfig,
    LeRobotMetaworldDataConfig,
    LeRobotUR5DataConfig,
    RLDSDroidDataConfig,
)
from piston.transforms import Group, compose
from piston.transforms.actions import AbsoluteActions, DeltaActions
from piston_client import Limits, Runtime

from .pipelines import MODEL, data_config, three_joints
from .synthetic import Folder

# In `synthetic`, the action is 100 + the number of the frame, + 0.1 and 0.2 in the others.
DELTA = Group([three_joints, DeltaActions((True, True, False))], [AbsoluteActions((True, True))])

IMAGES = {"observation.images.top": "image"}


def assert_limits(found, low, high, max_step):
    """`low`, `high` and `max_step` are those of the first dimension, before margins."""
    width = high - low
    others = np.array([0.0, 0.1, 0.2])
    np.testing.assert_allclose(found.low, low - 0.1 * width + others, atol=1e-4)
    np.testing.assert_allclose(found.high, high + 0.1 * width + others, atol=1e-4)
    np.testing.assert_allclose(found.max_step, max(1.5 * max_step, 0.05 * width), atol=1e-4)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_range_and_step_are_those_of_the_robot_s_actions(tmp_path, version, monkeypatch):
    """Not of the model's relative ones. Between two episodes there is no step."""
    Folder(tmp_path / "set", version, lengths=(12, 3, 9), cameras=IMAGES)
    config = data_config(tmp_path / "set", data_transforms=DELTA, episodes="0,2")
    sources = open_sources(config.each_set(), MODEL)
    assert_limits(action_limits(sources, config.each_set()), 100, 123, 1)
    # Also where a step is between two blocks of frames.
    monkeypatch.setattr(module, "BLOCK_VALUES", 3)
    assert_limits(action_limits(sources, config.each_set()), 100, 123, 1)


def test_several_sets_have_the_limits_of_all(tmp_path):
    far = Folder(tmp_path / "far", lengths=(4,), cameras=IMAGES)
    rows = [[value] * 3 for value in (np.array([0, 17, 3, 5]) - 50.0)]
    far.rewrite(0, action=rows)
    Folder(tmp_path / "near", "v3.0", lengths=(12, 9), cameras=IMAGES)
    config = data_config(tmp_path / "near", data_transforms=DELTA)
    config = dataclasses.replace(config, extra_datasets=(str(tmp_path / "far"),))
    found = action_limits(open_sources(config.each_set(), MODEL), config.each_set())
    np.testing.assert_allclose(found.low, -50 - 0.1 * (170.0 + np.array([0, 0.1, 0.2])), rtol=1e-5)
    np.testing.assert_allclose(found.max_step, 1.5 * 17)


class Memory:
    """A data set in memory, of random walks whose last dimension is a gripper that snaps shut."""

    root, texts = "memory", {}
    lengths = (24, 16)

    def __init__(self, dims, cameras=()):
        self.keys, self.cameras = tuple(dims), cameras
        stops = np.cumsum(self.lengths)
        self.episode_bounds = np.stack([stops - self.lengths, stops], axis=1)
        self.episodes = [Episode(i, length) for i, length in enumerate(self.lengths)]
        random = np.random.default_rng(0)
        self.columns = {}
        for key, dim in dims.items():
            values = 0.5 + np.cumsum(random.normal(0, 0.02, (stops[-1], dim)), axis=0)
            values[stops[0] :] += 0.4  # no step, since an episode begins here
            if dim > 1:
                values[:, -1] = random.integers(2, size=stops[-1])
            self.columns[key] = values.astype(np.float32)

    def __len__(self):
        return sum(self.lengths)

    def column(self, key):
        return self.columns[key]


NAMED = {"repo_id": "memory", "default_prompt": "do it"}
ALOHA = {"observation.state": 14, "action": 14}
DROID = {"joint_position": 7, "gripper_position": 1, "actions": 8}
RLDS = {"observation/joint_position": 7, "observation/gripper_position": 1, "actions": 8}
UR5 = {"joints": 6, "gripper": 1, "actions": 7}
LIBERO = {"state": 8, "actions": 7}
METAWORLD = {"observation.state": 4, "action": 4}
ARM = RobotInputs(
    name="arm",
    cameras={},
    state={"state": ("b", "gripper", "a")},
    actions={"action": ("a", "b", "gripper")},
    columns={},
    relative=("a", "b"),
    grippers={"gripper": (0.8, -0.1)},
)
ROBOTS = {
    "aloha": (LeRobotAlohaDataConfig(**NAMED), ALOHA),
    "aloha absolute": (LeRobotAlohaDataConfig(**NAMED, use_delta_joint_actions=False), ALOHA),
    "aloha plain": (LeRobotAlohaDataConfig(**NAMED, adapt_to_pi=False), ALOHA),
    "aloha noisy": (LeRobotAlohaDataConfig(**NAMED, state_noise=0.1), ALOHA),
    "aloha strided": (LeRobotAlohaDataConfig(**NAMED, action_stride=4), ALOHA),
    "droid": (LeRobotDROIDDataConfig(**NAMED), DROID),
    "rlds": (RLDSDroidDataConfig(**NAMED), RLDS),
    "ur5": (LeRobotUR5DataConfig(**NAMED), UR5),
    "libero": (LeRobotLiberoDataConfig(**NAMED), LIBERO),
    "libero delta": (LeRobotLiberoDataConfig(**NAMED, extra_delta_transform=True), LIBERO),
    "metaworld": (LeRobotMetaworldDataConfig(**NAMED), METAWORLD),
    "described": (DescribedRobotDataConfig(**NAMED, description=ARM), {"state": 3, "action": 3}),
}
WITHOUT_DATA = {FakeDataConfig, DroidDataConfig, ImageTextDataConfig}


def test_every_robot_is_tried_here():
    def below(cls):
        return {cls}.union(*map(below, cls.__subclasses__()))

    ours = {cls for cls in below(DataConfigFactory) if cls.__module__.startswith("piston.robots")}
    concrete = ours - {RobotDataConfig}
    assert concrete == {type(factory) for factory, _ in ROBOTS.values()} | WITHOUT_DATA


class Robot:
    """Does what it is told, until the agent has said everything."""

    def __init__(self):
        self.applied = []

    def reset(self):
        pass

    def get_observation(self):
        return {}

    def apply_action(self, action):
        self.applied.append(np.array(action))

    def is_done(self):
        return False


class Agent:
    def __init__(self, actions, limits):
        self.actions, self.metadata = iter(actions), {"action_limits": limits.as_metadata()}

    def infer(self, observation):  # noqa: ARG002
        return {"actions": next(self.actions)}

    def reset(self):
        pass


def drive(actions, limits):
    robot = Robot()
    summary = Runtime(robot, Agent(actions, limits), None, max_steps=len(actions)).run()
    return np.array(robot.applied), summary.num_clamped


@pytest.mark.parametrize("robot", ROBOTS.values(), ids=ROBOTS)
def test_a_perfect_policy_keeps_the_limits_and_others_do_not(robot):
    factory, dims = robot
    model = dataclasses.replace(MODEL, action_dim=16, action_horizon=8)
    config = factory.create(Path("assets"), model)
    dataset = Memory(dims)
    cameras = {key for key in _columns_of(config) if key not in dims}
    steps = config.steps_read(model.action_horizon)
    dataset.cameras = tuple(cameras)
    statistics = compute_statistics([TransformedColumns(dataset, config, steps)])
    stats = {key: found.norm_stats for key, found in statistics.items()}
    config = dataclasses.replace(config, norm_stats=stats)
    limits = action_limits([dataset], config.each_set())

    executed = 4 * config.action_stride
    to_model = compose(config.input_transforms(training=True))
    to_robot = compose(config.output_transforms())
    (sequence,) = config.action_sequence_keys
    for start, stop in dataset.episode_bounds:
        told = []
        for frame in range(start, stop, executed):
            item = {key: column[frame] for key, column in dataset.columns.items()}
            item |= {camera: np.zeros((4, 4, 3), np.uint8) for camera in cameras}
            rows = np.minimum(np.arange(frame, frame + steps), stop - 1)
            item[sequence] = dataset.columns[sequence][rows]
            seen = to_model(item)
            said = to_robot({"state": seen["state"], "actions": seen["actions"]})["actions"]
            told += [*said[:executed]]
        told = np.array(told[: stop - start])
        assert told.shape == (stop - start, dims[sequence])
        if config.action_stride == 1:
            expected = dataset.columns[sequence][start:stop]
            np.testing.assert_allclose(told, expected, atol=1e-5)
        applied, num_clamped = drive(told, limits)
        np.testing.assert_array_equal(applied, told)
        assert num_clamped == 0
    for dim in range(dims[sequence]):
        for sign in (-1, 1):
            wrong = told[:2].copy()
            wrong[1, dim] += sign * 100.0
            applied, num_clamped = drive(wrong, limits)
            assert num_clamped == 1
            assert abs(applied[1, dim] - applied[0, dim]) <= limits.max_step[dim] + 1e-5
            assert limits.low[dim] - 1e-5 <= applied[1, dim] <= limits.high[dim] + 1e-5


def _columns_of(config):
    (repack,) = config.repack_transforms.inputs

    def leaves(structure):
        for value in structure.values():
            yield from leaves(value) if isinstance(value, dict) else [value]

    return list(leaves(repack.structure))


def test_dimensions_that_never_move_may_move_a_little(tmp_path):
    folder = Folder(tmp_path / "set", lengths=(3,), cameras=IMAGES)
    folder.rewrite(0, action=[[5.0, 0.0, 0.0], [5.0, 0.001, 1.0], [5.0, 0.0, 0.0]])
    config = data_config(tmp_path / "set", data_transforms=Group([three_joints]))
    found = action_limits(open_sources(config.each_set(), MODEL), config.each_set())
    np.testing.assert_allclose(found.low, [4.99, -0.01, -0.1])
    np.testing.assert_allclose(found.high, [5.01, 0.011, 1.1])
    np.testing.assert_allclose(found.max_step, [0.005, 0.005, 1.5])


def test_a_dimension_that_moves_only_between_episodes_may_move_a_little(tmp_path):
    """MetaWorld's gripper is such a one: a limit of 0.01 would clamp most of a policy's actions."""
    folder = Folder(tmp_path / "set", lengths=(2, 2), cameras=IMAGES)
    for episode, gripper in enumerate((-1.0, 1.0)):
        folder.rewrite(episode, action=[[0.0, 0.0, gripper]] * 2)
    config = data_config(tmp_path / "set", data_transforms=Group([three_joints]))
    found = action_limits(open_sources(config.each_set(), MODEL), config.each_set())
    np.testing.assert_allclose(found.max_step, [0.005, 0.005, 0.1])


def test_output_transforms_that_take_no_batch_are_named(tmp_path):
    """On many frames at once, this one would choose frames or steps instead of dimensions."""

    def two_joints(data):
        return {"actions": data["actions"][:, :2]}

    Folder(tmp_path / "set", lengths=(3,), cameras=IMAGES)
    transforms = Group([three_joints], [two_joints])
    config = data_config(tmp_path / "set", data_transforms=transforms)
    with pytest.raises(ValueError, match=r"leading axes alike: write actions\[\.\.\., :7\]"):
        action_limits(open_sources(config.each_set(), MODEL), config.each_set())


def test_limits_can_be_widened():
    limits = Limits([-1, 0, -np.inf], [1, 0, 1], [0.5, 0, np.inf], on_violation="stop")
    wider = limits.widened()
    np.testing.assert_allclose(wider.low, [-1.2, -0.01, -np.inf])
    np.testing.assert_allclose(wider.high, [1.2, 0.01, 1.01])
    np.testing.assert_allclose(wider.max_step, [0.75, 0.005, np.inf])
    assert wider.on_violation == "stop"
    wider = limits.widened(0.5, 2.0, at_least=0.0)
    np.testing.assert_allclose(wider.high, [2, 0, 1])
    np.testing.assert_allclose(wider.max_step, [1, 0, np.inf])
