"""What LIBERO alone has: fewer actions than state dimensions."""

import numpy as np

from piston.robots.libero import LiberoInputs, LiberoOutputs, make_libero_example


def test_images_reach_their_slots_unturned():
    example = make_libero_example()
    images = LiberoInputs()(example)["image"]
    np.testing.assert_array_equal(images["base_0_rgb"], example["observation/image"])
    np.testing.assert_array_equal(images["left_wrist_0_rgb"], example["observation/wrist_image"])


def test_seven_actions_of_an_eight_dimensional_state():
    seen = LiberoInputs()({**make_libero_example(), "actions": np.zeros((10, 7))})
    assert seen["state"].shape == (8,)
    assert seen["actions"].shape == (10, 7)
    assert LiberoOutputs()({"actions": np.zeros((10, 32))})["actions"].shape == (10, 7)
