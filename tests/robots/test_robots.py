"""What holds for every robot: inverses, batches, purity, errors that name the key."""

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piston.robots import RobotInputs
from piston.robots.aloha import AlohaInputs, AlohaOutputs, make_aloha_example
from piston.robots.simple import DROID, LIBERO, METAWORLD, UR5
from piston.transforms import Group, compose
from piston.transforms.actions import (
    AbsoluteActions,
    DeltaActions,
    PadStatesAndActions,
    make_bool_mask,
)
from piston.transforms.images import FillCameras, ResizeImages
from piston.transforms.normalize import Normalize, NormStats, Unnormalize

# A busy machine is no failure.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")

# Inputs, Outputs, an example, the state's and the actions' dimensions.
ROBOTS = {
    "aloha": (AlohaInputs(), AlohaOutputs(), make_aloha_example, 14, 14),
    "aloha_plain": (AlohaInputs(False), AlohaOutputs(False), make_aloha_example, 14, 14),
    "droid": (DROID, DROID.outputs, DROID.example, 8, 8),
    "libero": (LIBERO, LIBERO.outputs, LIBERO.example, 8, 7),
    "ur5": (UR5, UR5.outputs, UR5.example, 7, 7),
    "metaworld": (METAWORLD, METAWORLD.outputs, METAWORLD.example, 4, 4),
}


def name_of(inputs):
    return getattr(inputs, "name", "ALOHA")


each_robot = pytest.mark.parametrize("robot", ROBOTS.values(), ids=ROBOTS.keys())


def batch_of(example, leading, action_dim, horizon=4, dtype=np.float64, seed=0):
    """A sample in the example's keys, with these batch axes, random numbers and small images."""
    random = np.random.default_rng(seed)

    def fill(value):
        if isinstance(value, dict):
            return {name: fill(part) for name, part in value.items()}
        if isinstance(value, str):
            return np.full(leading, value) if leading else value
        if value.dtype == np.uint8:
            return random.integers(256, size=(*leading, 6, 8, 3), dtype=np.uint8)
        return random.uniform(0.05, 0.95, (*leading, *value.shape)).astype(dtype)

    actions = random.uniform(-2, 2, (*leading, horizon, action_dim)).astype(dtype)
    return {**fill(example), "actions": actions}


def pick(data, index):
    if isinstance(data, dict):
        return {name: pick(part, index) for name, part in data.items()}
    return np.asarray(data)[index]


leading_axes = hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)


@each_robot
@settings(RELAXED, max_examples=25)
@given(leading_axes, st.integers(1, 5), st.integers(0, 10), st.sampled_from(["f4", "f8"]))
def test_outputs_undo_inputs(robot, leading, horizon, padding, dtype):
    inputs, outputs, example, _, action_dim = robot
    data = batch_of(example(), leading, action_dim, horizon, dtype)
    seen = inputs(data)
    assert seen["actions"].dtype == np.dtype(dtype)
    padded = PadStatesAndActions(action_dim + padding + 1)(seen)
    found = outputs(padded)
    assert found.keys() == {"actions"}
    tolerance = 1e-12 if dtype == "f8" else 1e-5
    np.testing.assert_allclose(found["actions"], data["actions"], rtol=0, atol=tolerance)


def chain(robot):
    """Inputs → Delta → Normalize → cameras → Pad, and the way back."""
    inputs, outputs, _, state_dim, action_dim = robot
    random = np.random.default_rng(1)
    sizes = {"state": state_dim, "actions": action_dim}
    stats = {
        key: NormStats(random.normal(size=dim), random.uniform(0.1, 2.0, dim))
        for key, dim in sizes.items()
    }
    mask = make_bool_mask(action_dim - 1, -1)
    group = Group([inputs], [outputs]).push([DeltaActions(mask)], [AbsoluteActions(mask)])
    group = group.push([Normalize(stats)], [Unnormalize(stats)])
    group = group.push(
        [ResizeImages(8, 8), FillCameras(CAMERAS, True, 8, 8), PadStatesAndActions(32)]
    )
    return compose(group.inputs), compose(group.outputs)


@each_robot
@settings(RELAXED, max_examples=20)
@given(leading_axes, st.integers(0, 5))
def test_a_batch_passes_like_its_samples_one_by_one(robot, leading, seed):
    forward, backward = chain(robot)
    data = batch_of(robot[2](), leading, robot[4], seed=seed)
    together = forward(data)
    back = backward(together)
    np.testing.assert_allclose(back["actions"], data["actions"], atol=1e-9)
    for index in np.ndindex(*leading):
        alone = forward(pick(data, index))
        assert alone.keys() == together.keys()
        for key in ("image", "image_mask", "prompt"):
            np.testing.assert_equal(pick(together[key], index), pick(alone[key], ()))
        for key in ("state", "actions"):
            np.testing.assert_allclose(together[key][index], alone[key], rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(
            back["actions"][index], backward(alone)["actions"], rtol=1e-12, atol=1e-12
        )


@each_robot
@pytest.mark.parametrize("leading", [(), (3,)], ids=["one", "batch"])
def test_robots_are_pure(robot, leading):
    inputs, outputs, example, _, action_dim = robot
    data = batch_of(example(), leading, action_dim)
    before = copy.deepcopy(data)
    seen = inputs(data)
    np.testing.assert_equal(data, before)
    before = copy.deepcopy(seen)
    outputs(seen)
    np.testing.assert_equal(seen, before)


@each_robot
def test_example_becomes_what_the_model_transforms_expect(robot):
    inputs, _, example, state_dim, _ = robot
    seen = inputs(example())
    assert seen.keys() == {"image", "image_mask", "state", "prompt"}
    assert seen["state"].shape == (state_dim,)
    assert seen["state"].dtype == np.float32
    assert seen["image"].keys() <= set(CAMERAS)
    assert seen["image"].keys() == seen["image_mask"].keys()
    for image in seen["image"].values():
        assert image.shape == (224, 224, 3)
        assert image.dtype == np.uint8
    assert all(mask is np.True_ for mask in seen["image_mask"].values())


@each_robot
def test_every_key_but_the_prompt_is_needed(robot):
    inputs, _, example, _, _ = robot
    for key in example().keys() - {"prompt"}:
        data = example()
        del data[key]
        with pytest.raises(KeyError, match=f"{name_of(inputs)}: key '{key}' is missing"):
            inputs(data)
    data = example()
    del data["prompt"]
    assert "prompt" not in inputs(data)


@each_robot
def test_wrong_numbers_are_named(robot):
    inputs, _, example, _, action_dim = robot
    name, position = name_of(inputs), 0
    vectors = [key for key, value in example().items() if getattr(value, "dtype", None) == "f4"]
    for key in vectors:
        data = example()
        data[key][0] = np.nan
        with pytest.raises(ValueError, match=f"'state' holds NaN or infinity at {position} "):
            chain(robot)[0](data)
        position += len(data[key])
        data[key] = np.zeros(5)
        with pytest.raises(ValueError, match=rf"{name}: '{key}' has shape \(5,\); expected \(…, "):
            inputs(data)
    for actions in (np.zeros((4, action_dim + 1)), np.zeros(action_dim)):
        with pytest.raises(ValueError, match=f"{name}: 'actions' has shape"):
            inputs({**example(), "actions": actions})


@each_robot
def test_batch_axes_must_agree(robot):
    inputs, _, example, _, action_dim = robot
    actions = np.zeros((2, 4, action_dim))
    with pytest.raises(ValueError, match=r"'actions' has shape .*batch axes must agree"):
        inputs({**example(), "actions": actions})
    data = batch_of(example(), (2,), action_dim)
    images = data.get("images", data)
    name = next(key for key, value in images.items() if getattr(value, "dtype", None) == "u1")
    images[name] = images[name][0]
    message = rf"'{name}' has shape \(6, 8, 3\), the state \(2, .*batch axes must agree"
    with pytest.raises(ValueError, match=message):
        inputs(data)


@each_robot
def test_outputs_need_the_robots_dimensions(robot):
    _, outputs, _, _, action_dim = robot
    with pytest.raises(ValueError, match=f"expected at least {action_dim} dimensions"):
        outputs({"actions": np.zeros((4, action_dim - 1))})
    with pytest.raises(ValueError, match="'actions' holds NaN"):
        chain(robot)[1]({"state": np.zeros(32), "actions": np.full((4, 32), np.nan)})


def test_two_cameras_in_one_slot_are_refused():
    with pytest.raises(ValueError, match="two cameras are mapped to one slot"):
        RobotInputs("Arm", {"a": "s", "b": "s"}, {"state": 1}, {"actions": 1})


def test_padding_marks_are_passed_on():
    marks = np.array([False, True])
    seen = UR5({**UR5.example(), "action_is_pad": marks})
    np.testing.assert_array_equal(seen["action_is_pad"], marks)


@pytest.mark.parametrize("robot", ROBOTS)
def test_a_picture_from_a_camera_the_robot_does_not_have_is_refused(robot):
    inputs, _, make_example, *_ = ROBOTS[robot]
    data = make_example()
    picture = np.zeros((8, 8, 3), np.uint8)
    if "images" in data:
        data["images"] = {**data["images"], "cam_behind": picture}
    else:
        data["observation/image_behind"] = picture
    with pytest.raises(ValueError, match="behind' .*is not expected"):
        inputs(data)
