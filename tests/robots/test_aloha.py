"""ALOHA against the reference numbers, and its cameras."""

import logging

import numpy as np
import pytest

from piston.logs import forget_warnings
from piston.robots.aloha import AlohaInputs, AlohaOutputs, make_aloha_example
from piston.transforms import Group, compose
from piston.transforms.actions import AbsoluteActions, DeltaActions, make_bool_mask


@pytest.fixture(scope="module")
def cases(small_reference):
    with np.load(small_reference / "transforms.npz") as file:
        return {key: file[key] for key in file if key.startswith("aloha/")}


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("adapt", [False, True])
def test_meets_the_reference_both_ways(cases, adapt, delta):
    group = Group([AlohaInputs(adapt_to_pi=adapt)], [AlohaOutputs(adapt_to_pi=adapt)])
    if delta:
        mask = make_bool_mask(6, -1, 6, -1)
        group = group.push([DeltaActions(mask)], [AbsoluteActions(mask)])
    state, actions = cases["aloha/state"], cases["aloha/actions"]
    images = {"cam_high": np.zeros((*state.shape[:-1], 2, 2, 3), np.uint8)}

    seen = compose(group.inputs)({"images": images, "state": state, "actions": actions})
    back = compose(group.outputs)({"state": seen["state"], "actions": seen["actions"]})

    name = f"aloha/adapt_{adapt}/{'delta' if delta else 'plain'}"
    found = {
        "state": seen["state"],
        "model_actions": seen["actions"],
        "robot_actions": back["actions"],
    }
    for key, value in found.items():
        np.testing.assert_allclose(value, cases[f"{name}/{key}"], rtol=0, atol=1e-6, err_msg=key)


def test_gripper_opened_beyond_its_reach_stays_finite():
    data = {**make_aloha_example(), "state": np.full(14, 1.2)}
    assert np.all(np.isfinite(AlohaInputs()(data)["state"]))


def test_only_the_cameras_that_are_there_are_emitted(caplog):
    forget_warnings()
    example = make_aloha_example()
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            seen = AlohaInputs()(example)
    assert list(seen["image"]) == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    assert [record.getMessage() for record in caplog.records] == [
        "ALOHA's camera 'cam_low' has no slot in the model; it is not used. (This is logged once.)"
    ]
    for name in ("cam_low", "cam_left_wrist"):
        del example["images"][name]
    assert list(AlohaInputs()(example)["image"]) == ["base_0_rgb", "right_wrist_0_rgb"]


def test_slots_can_be_chosen():
    inputs = AlohaInputs(cameras={"cam_high": "base_0_rgb", "cam_low": "base_1_rgb"})
    example = make_aloha_example()
    example["images"] = {name: example["images"][name] for name in ("cam_high", "cam_low")}
    seen = inputs(example)
    expected = np.moveaxis(example["images"]["cam_low"], 0, -1)
    np.testing.assert_array_equal(seen["image"]["base_1_rgb"], expected)


def test_other_cameras_are_refused():
    example = make_aloha_example()
    example["images"]["cam_belly"] = example["images"].pop("cam_high")
    with pytest.raises(
        ValueError, match=r"ALOHA: camera 'cam_belly' .* not expected; .* has 'cam_hi"
    ):
        AlohaInputs()(example)
    del example["images"]["cam_belly"]
    with pytest.raises(KeyError, match="ALOHA: key 'cam_high' is missing"):
        AlohaInputs()(example)


def test_bad_image_is_named_as_the_robot_calls_it():
    example = make_aloha_example()
    example["images"]["cam_high"] = np.zeros((224, 224), np.uint8)
    with pytest.raises(ValueError, match=r"'cam_high' has shape \(224, 224\)"):
        AlohaInputs()(example)
