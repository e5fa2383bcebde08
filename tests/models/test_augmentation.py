"""Augmentation: what changes, what must not, and that every sample draws for itself."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from piston.models import augmentation
from piston.models.augmentation import augment, draw
from piston.observation import Observation

BASE, WRIST = "base_0_rgb", "left_wrist_0_rgb"


def observe(image: torch.Tensor, base_present=None) -> Observation:
    batch = len(image)
    present = torch.ones(batch, dtype=torch.bool)
    return Observation(
        images={BASE: image, WRIST: image},
        image_masks={BASE: present if base_present is None else base_present, WRIST: present},
        state=torch.zeros(batch, 3),
    )


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def viewed(observation: Observation, seed=0) -> Observation:
    return augment(observation, draw(observation.batch_size, len(observation.images), seeded(seed)))


@pytest.fixture
def photo() -> torch.Tensor:
    coarse = torch.rand(1, 3, 5, 5, generator=seeded())
    smooth = torch.nn.functional.interpolate(coarse, (40, 56), mode="bicubic").clamp(0, 1)
    return (smooth.movedim(1, -1) * 255).byte().repeat(6, 1, 1, 1)


@pytest.fixture
def no_colour(monkeypatch):
    for name in ("_BRIGHTNESS", "_CONTRAST", "_SATURATION"):
        monkeypatch.setattr(augmentation, name, 0.0)


def test_gives_floats_in_range_of_the_same_shape_and_is_reproducible(photo):
    observation = observe(photo)
    first, again, other = (viewed(observation, s) for s in (0, 0, 1))
    for camera in (BASE, WRIST):
        image = first.images[camera]
        assert image.shape == photo.shape
        assert image.dtype == torch.float32
        assert -1 <= image.min() < image.max() <= 1
        assert torch.equal(image, again.images[camera])
        assert not torch.equal(image, other.images[camera])
    assert observation.images[BASE].dtype == torch.uint8


def test_every_sample_draws_its_own_numbers(photo):
    augmented = viewed(observe(photo))
    for camera in (BASE, WRIST):
        flat = augmented.images[camera].flatten(1)
        assert torch.cdist(flat, flat).fill_diagonal_(1e9).min() > 1


@pytest.mark.usefixtures("no_colour")
def test_wrist_cameras_keep_their_geometry(photo):
    augmented = viewed(observe(photo))
    expected = photo.float() / 127.5 - 1
    assert_close(augmented.images[WRIST], expected, atol=1e-5, rtol=0)
    assert (augmented.images[BASE] - expected).abs().mean() > 0.01


@pytest.mark.usefixtures("no_colour")
def test_crop_and_rotation_are_as_large_as_they_should_be():
    """Coordinates as colours: each output pixel tells where it was taken from."""
    size = 41
    axis = torch.linspace(0, 1, size)
    image = torch.stack(
        (axis[:, None].expand(size, size), axis.expand(size, size), torch.full((size, size), 0.5)),
        dim=-1,
    )
    image = (image * 2 - 1)[None].repeat(64, 1, 1, 1)
    augmented = viewed(observe(image), 3).images[BASE] / 2 + 0.5
    centre = augmented[:, size // 2, size // 2, :2]
    # The crop's centre moves by up to 2.5 % of the image, and by all of that.
    scale = size / (size - 1)
    assert (centre - 0.5).abs().max() <= 0.025 * scale + 1e-4
    assert (centre - 0.5).abs().max() > 0.02
    across = augmented[:, size // 2, 10:31, :2]
    direction = across[:, -1] - across[:, 0]  # (dy, dx) along a row
    assert_close(
        direction.norm(dim=-1), torch.full((64,), 0.95 * 20 / (size - 1)), atol=1e-3, rtol=0
    )
    angle = torch.atan2(direction[:, 0], direction[:, 1]).rad2deg()
    assert angle.abs().max() <= 5.01
    assert angle.abs().max() > 4
    assert angle.min() < 0 < angle.max()
    corners = augmented[angle.abs() > 3][:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert not corners.any()  # black comes in from outside


def test_colour_jitter_stays_in_its_ranges():
    grey = torch.full((400, 4, 4, 3), 0.0)  # 0.5 in [0, 1]; no contrast, no saturation
    image = viewed(observe(grey)).images[WRIST] / 2 + 0.5
    assert image.std(dim=(1, 2, 3)).max() < 1e-6
    level = image[:, 0, 0, 0]
    assert 0.35 - 1e-4 <= level.min() < 0.37
    assert 0.63 < level.max() <= 0.65 + 1e-4


def test_absent_cameras_are_not_worked_on_and_do_not_break(photo):
    present = torch.tensor([True, False, True, False, False, True])
    augmented = viewed(observe(photo, present))
    assert not augmented.images[BASE][~present].any()
    assert (augmented.images[BASE][present].flatten(1).std(1) > 0.05).all()
    nothing = viewed(observe(photo, torch.zeros(6, dtype=torch.bool)))
    assert not nothing.images[BASE].any()


def test_a_part_of_a_batch_is_changed_as_in_the_whole(photo):
    """So that several processes see what one would."""
    views = draw(6, 2, seeded())
    whole = augment(observe(photo), views)
    part = augment(observe(photo[4:]), views[4:])
    for camera in (BASE, WRIST):
        assert_close(part.images[camera], whole.images[camera][4:])
