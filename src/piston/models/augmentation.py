"""Random changes of the images for training; every sample draws its own numbers.

Cameras that look at the scene are cropped to 95 % (and resized back) and rotated by up to 5°; wrist
cameras move with the arm and keep their geometry. Brightness, contrast and saturation change for
all. Runs on the observation's device, on whole batches.

Dims: b batch, c cameras, h height, w width.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from piston.models.siglip import to_unit_range
from piston.observation import Image, Observation, send

_CROP = 0.95
_MAX_ANGLE = math.radians(5)
_BRIGHTNESS, _CONTRAST, _SATURATION = 0.3, 0.4, 0.5
_LUMA = (0.299, 0.587, 0.114)

Pixels = Float[Tensor, "b h w 3"]


# Per camera: angle, shift down, shift right, brightness, contrast, saturation, each in [−1, 1).
Views = Float[Tensor, "b c 6"]


def draw(batch_size: int, num_cameras: int, generator: torch.Generator | None = None) -> Views:
    """Draw the numbers of one batch. They do not depend on which cameras are present."""
    return 2 * torch.rand(batch_size, num_cameras, 6, generator=generator) - 1


def augment(observation: Observation, views: Views) -> Observation:
    """Return it with changed float images in [−1, 1]; the images of absent cameras are grey."""
    images = {}
    # By name, so that the order in which a batch names its cameras does not matter.
    for place, camera in enumerate(sorted(observation.images)):
        image, present = observation.images[camera], observation.image_masks[camera]
        index = send(present.nonzero()[:, 0], image.device)
        numbers = views[:, place].to(image.device)[index]
        changed = _augment_camera(image[index], numbers, moves="wrist" not in camera)
        images[camera] = changed.new_zeros(image.shape).index_copy(0, index, changed)
    return dataclasses.replace(observation, images=images)


def _augment_camera(image: Image, numbers: Float[Tensor, "b 6"], moves: bool) -> Pixels:
    # In [0, 1]: black is zero there, which is what comes in from outside a turned image.
    pixels = to_unit_range(image) / 2 + 0.5
    if moves:
        pixels = _crop_and_turn(pixels, numbers[:, :3])
    return _jitter_colour(pixels, numbers[:, 3:]) * 2 - 1


def _crop_and_turn(pixels: Pixels, numbers: Float[Tensor, "b 3"]) -> Pixels:
    """Do both in one resampling. Coordinates are in pixels from the centre of the image."""
    height, width = pixels.shape[1:3]
    angle, shift_y, shift_x = numbers.T[..., None, None]
    cos, sin = (angle * _MAX_ANGLE).cos(), (angle * _MAX_ANGLE).sin()
    y = torch.arange(height, device=pixels.device)[:, None] - (height - 1) / 2
    x = torch.arange(width, device=pixels.device) - (width - 1) / 2
    # Where each pixel of the turned image was before turning, in units of half the image.
    turned_y, turned_x = (cos * y - sin * x) * 2 / height, (sin * y + cos * x) * 2 / width
    inside = (turned_y.abs() <= 1) & (turned_x.abs() <= 1)
    source_y = _CROP * turned_y + (1 - _CROP) * shift_y
    source_x = _CROP * turned_x + (1 - _CROP) * shift_x
    sampled = nn.functional.grid_sample(
        pixels.movedim(-1, 1),
        torch.stack((source_x, source_y), dim=-1),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    return sampled.movedim(1, -1) * inside[..., None]


def _jitter_colour(pixels: Pixels, numbers: Float[Tensor, "b 3"]) -> Pixels:
    brightness, contrast, saturation = numbers.T[..., None, None, None]
    pixels = pixels * (1 + _BRIGHTNESS * brightness)
    mean = pixels.mean(dim=(1, 2, 3), keepdim=True)
    pixels = torch.lerp(mean, pixels, 1 + _CONTRAST * contrast)
    luma = torch.stack([pixels.new_full((), share) for share in _LUMA])
    grey = (pixels @ luma)[..., None]
    return torch.lerp(grey, pixels, 1 + _SATURATION * saturation).clamp(0, 1)
