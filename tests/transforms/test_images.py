"""Layout, size and cameras of images."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piston.transforms.images import FillCameras, ResizeImages, resize_with_pad, to_uint8_hwc

# A busy machine is no failure.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

ALL_VALUES = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)


def test_resize_meets_the_reference_exactly(small_reference):
    with np.load(small_reference / "transforms.npz") as cases:
        names = {key.split("/")[1] for key in cases if key.startswith("resize/")}
        assert names
        for name in names:
            expected = cases[f"resize/{name}/out"]
            found = resize_with_pad(cases[f"resize/{name}/in"], *expected.shape[:2])
            np.testing.assert_array_equal(found, expected, err_msg=name)


@RELAXED
@given(
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=2),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_resize_of_a_batch_is_that_of_each(leading, height, width):
    images = np.random.default_rng(0).integers(256, size=(*leading, height, width, 3))
    images = images.astype(np.uint8)
    resized = resize_with_pad(images, 12, 16)
    assert resized.shape == (*leading, 12, 16, 3)
    for index in np.ndindex(*leading):
        np.testing.assert_array_equal(resized[index], resize_with_pad(images[index], 12, 16))


@pytest.mark.parametrize("size", [(1, 500), (500, 1)])
def test_extreme_shapes_keep_a_line(size):
    assert resize_with_pad(np.full((*size, 3), 255, np.uint8), 8, 8).any()


def test_letterbox_is_black_and_centred():
    resized = resize_with_pad(np.full((10, 20, 3), 200, np.uint8), 8, 8)
    np.testing.assert_array_equal(resized[:, 0, 0], [0, 0, 200, 200, 200, 200, 0, 0])


def test_resize_refuses_other_than_uint8():
    with pytest.raises(ValueError, match=r"float64 of shape \(4, 4, 3\); expected uint8"):
        resize_with_pad(np.zeros((4, 4, 3)), 8, 8)
    with pytest.raises(ValueError, match=r"(?s)found float32 .*in image 'base'"):
        ResizeImages(8, 8)({"image": {"base": np.zeros((4, 4, 3), np.float32)}})


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("leading", [(), (1,), (2, 3)])
def test_every_layout_gives_the_same_pixels(dtype, channels_first, leading):
    expected = np.broadcast_to(ALL_VALUES, (*leading, *ALL_VALUES.shape))
    image = expected if dtype == np.uint8 else (expected / 255).astype(dtype)
    if channels_first:
        image = np.moveaxis(image, -1, -3)
    found = to_uint8_hwc(image, "cam")
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.full((4, 4, 3), 200.0), r"'cam' is float64 with values from 200 to 200; .* \[0, 1\]"),
        (np.full((4, 4, 3), -1.0), "values from -1 to -1"),
        (np.full((4, 4, 3), np.nan), "values from nan"),
        (np.zeros((4, 4), np.uint8), r"'cam' has shape \(4, 4\); expected \(…, height, width, 3\)"),
        (np.zeros((4, 5, 4), np.uint8), r"shape \(4, 5, 4\)"),
        (np.zeros((4, 4, 3), np.int64), "dtype int64; expected uint8, or float"),
    ],
)
def test_other_images_are_refused(image, message):
    with pytest.raises(ValueError, match=message):
        to_uint8_hwc(image, "cam")


def test_rounding_errors_of_interpolation_are_taken():
    image = np.array([1.0000002, -1e-7, 0.5]).reshape(1, 1, 3)
    np.testing.assert_array_equal(to_uint8_hwc(image, "cam"), [[[255, 0, 128]]])


def observation(leading, *cameras):
    return {
        "image": {name: np.full((*leading, 4, 6, 3), 9, np.uint8) for name in cameras},
        "image_mask": {name: np.ones(leading, bool) for name in cameras},
        "state": np.zeros((*leading, 3)),
    }


@pytest.mark.parametrize("leading", [(), (2,)])
@pytest.mark.parametrize("mask_absent", [True, False])
@pytest.mark.parametrize("present", [(), ("wrist",), ("wrist", "base")])
def test_absent_cameras_are_black(leading, mask_absent, present):
    fill = FillCameras(("base", "other", "wrist"), mask_absent, 4, 6)
    filled = fill(observation(leading, *present))
    assert list(filled["image"]) == list(filled["image_mask"]) == ["base", "other", "wrist"]
    for name in ("base", "other", "wrist"):
        there = name in present
        assert filled["image"][name].shape == (*leading, 4, 6, 3)
        assert np.all(filled["image"][name] == (9 if there else 0))
        assert filled["image_mask"][name].shape == leading
        assert np.all(filled["image_mask"][name] == (there or not mask_absent))


def test_camera_that_the_model_lacks_is_refused():
    fill = FillCameras(("base", "wrist"), True, 4, 6)
    with pytest.raises(ValueError, match="camera 'belly' is not one of the model's; it has 'base'"):
        fill(observation((), "base", "belly"))


def test_image_without_mask_is_refused():
    data = {**observation((), "base"), "image_mask": {}}
    with pytest.raises(KeyError, match="'image_mask': key 'base' is missing"):
        FillCameras(("base",), True, 4, 6)(data)
    data = {**observation((), "base"), "image": {}}
    with pytest.raises(ValueError, match="'base' without image"):
        FillCameras(("base",), True, 4, 6)(data)
