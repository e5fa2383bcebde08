"""Random views of the images, for training π0 and π0.5 only: every sample draws its own numbers.

Cameras that look at the scene are cropped to 95 % (and resized back) and turned by up to 5°; wrist
cameras move with the arm and keep their geometry. Brightness, contrast and saturation change for
all. Runs on the observation's device, on whole batches. Never used at inference or by π0-FAST.

Dims: b batch, h height, w width.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from piston.models.siglip import to_unit_range
from piston.observation import Image, Observation

_CROP = 0.95
_MAX_ANGLE = math.radians(5)
_BRIGHTNESS, _CONTRAST, _SATURATION = 0.3, 0.4, 0.5
_LUMA = (0.299, 0.587, 0.114)

Pixels = Float[Tensor, "b h w 3"]


def augment(observation: Observation, generator: torch.Generator | None = None) -> Observation:
    """The observation with changed float images in [−1, 1]; absent cameras' images are grey."""
    images = {}
    for camera, image in observation.images.items():
        present = observation.image_masks[camera]
        changed = _augment_camera(image[present], "wrist" not in camera, generator)
        images[camera] = changed.new_zeros(image.shape).masked_scatter(
            present[:, None, None, None], changed
        )
    return dataclasses.replace(observation, images=images)


def _augment_camera(image: Image, moves: bool, generator: torch.Generator | None) -> Pixels:
    # In [0, 1]: black is zero there, which is what comes in from outside a turned image.
    pixels = to_unit_range(image) / 2 + 0.5
    if moves:
        pixels = _crop_and_turn(pixels, generator)
    return _jitter_colour(pixels, generator) * 2 - 1


def _crop_and_turn(pixels: Pixels, generator: torch.Generator | None) -> Pixels:
    """Both in one resampling. Coordinates are in pixels from the centre of the image."""
    batch, height, width, _ = pixels.shape
    angle, shift_y, shift_x = _uniform((3, batch, 1, 1), pixels, generator)
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


def _jitter_colour(pixels: Pixels, generator: torch.Generator | None) -> Pixels:
    brightness, contrast, saturation = _uniform((3, len(pixels), 1, 1, 1), pixels, generator)
    pixels = pixels * (1 + _BRIGHTNESS * brightness)
    mean = pixels.mean(dim=(1, 2, 3), keepdim=True)
    pixels = torch.lerp(mean, pixels, 1 + _CONTRAST * contrast)
    grey = (pixels @ pixels.new_tensor(_LUMA))[..., None]
    return torch.lerp(grey, pixels, 1 + _SATURATION * saturation).clamp(0, 1)


def _uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Numbers in [−1, 1)."""
    return 2 * torch.rand(shape, device=like.device, generator=generator) - 1
