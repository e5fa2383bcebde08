"""Images: one layout (uint8, height × width × RGB), one size, one entry per camera of the model.

Pixels stay uint8 here; the model converts them to [−1, 1], on the device.

Dims: h height, w width; `*b` any leading batch axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from piston.transforms import Data, listed, require, require_mapping

# Interpolation may have left [0, 1] by a rounding error.
_RANGE_TOLERANCE = 1e-3

UInt8Images = UInt8[np.ndarray, "*b _ _ 3"]


def to_uint8_hwc(image: Any, key: str) -> UInt8Images:
    """Convert uint8 or float in [0, 1], channels last or first, with any leading batch axes.

    If the last axis is 3, it is taken for the channels. `key` names the image in messages.
    """
    array = np.asarray(image)
    if array.ndim >= 3 and array.shape[-1] != 3:
        array = np.moveaxis(array, -3, -1)
    if array.ndim < 3 or array.shape[-1] != 3:
        raise ValueError(
            f"Image {key!r} has shape {np.shape(image)}; expected (…, height, width, 3) or "
            "(…, 3, height, width), in RGB."
        )
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise ValueError(f"Image {key!r}: dtype {array.dtype}; expected uint8, or float in [0, 1].")
    low, high = array.min(initial=0.0), array.max(initial=0.0)
    # Written so that NaN fails as well.
    if not (low >= -_RANGE_TOLERANCE and high <= 1 + _RANGE_TOLERANCE):
        raise ValueError(
            f"Image {key!r} is {array.dtype} with values from {array.min():g} to {array.max():g}; "
            "float images must lie in [0, 1]. Give uint8 for 0 to 255."
        )
    return np.rint(np.clip(array, 0.0, 1.0).astype(np.float32) * 255.0).astype(np.uint8)


def resize_with_pad(images: UInt8Images, height: int, width: int) -> UInt8Images:
    """Fit the whole image, its aspect kept, into the middle of a black canvas of this size.

    The filter is Pillow's antialiased bilinear one on uint8, as for the released weights.
    """
    if images.dtype != np.uint8 or images.ndim < 3 or images.shape[-1] != 3:
        raise ValueError(
            f"resize_with_pad: found {images.dtype} of shape {images.shape}; expected uint8 "
            "(…, height, width, 3)."
        )
    old_height, old_width = images.shape[-3:-1]
    if min(old_height, old_width, height, width) < 1:
        sizes = f"from {old_height}×{old_width} to {height}×{width} pixels"
        raise ValueError(f"resize_with_pad: {sizes}; an image has at least one pixel.")
    if (old_height, old_width) == (height, width):
        return images
    ratio = max(old_width / width, old_height / height)
    new_height, new_width = (max(1, int(old / ratio)) for old in (old_height, old_width))
    top, left = (height - new_height) // 2, (width - new_width) // 2
    leading = images.shape[:-3]
    canvas = np.zeros((*leading, height, width, 3), np.uint8)
    for index in np.ndindex(*leading):
        small = Image.fromarray(np.ascontiguousarray(images[index])).resize(
            (new_width, new_height), resample=Image.Resampling.BILINEAR
        )
        canvas[index][top : top + new_height, left : left + new_width] = np.asarray(small)
    return canvas


@dataclasses.dataclass(frozen=True)
class ResizeImages:
    """Resize every camera's image to one size, with black borders."""

    height: int
    width: int

    def __call__(self, data: Data) -> Data:
        resized = {}
        for name, image in require_mapping(data, "image", "ResizeImages").items():
            try:
                resized[name] = resize_with_pad(np.asarray(image), self.height, self.width)
            except ValueError as error:
                error.add_note(f"in image {name!r}")
                raise
        return {**data, "image": resized}


@dataclasses.dataclass(frozen=True)
class FillCameras:
    """Return one image per camera slot of the model, in its order; absent cameras are black.

    With `mask_absent` (π0, π0.5) an absent camera is masked out; without (π0-FAST) the model sees
    the black image. Raise ValueError for a slot that the model does not have.
    """

    cameras: Sequence[str]
    mask_absent: bool
    height: int
    width: int

    def __call__(self, data: Data) -> Data:
        images = require_mapping(data, "image", "FillCameras")
        masks = require_mapping(data, "image_mask", "FillCameras")
        if unknown := images.keys() - set(self.cameras):
            raise ValueError(
                f"FillCameras: camera {listed(unknown)} is not one of the model's; it has "
                f"{listed(self.cameras)}. Map the robot's cameras to those."
            )
        for name in images:
            require(masks, name, "FillCameras, 'image_mask'")
        if surplus := masks.keys() - images.keys():
            raise ValueError(f"FillCameras: 'image_mask' names {listed(surplus)} without image.")
        leading = np.shape(require(data, "state", "FillCameras"))[:-1]
        black = np.zeros((*leading, self.height, self.width, 3), np.uint8)
        absent = np.full(leading, not self.mask_absent)
        return {
            **data,
            "image": {name: images.get(name, black) for name in self.cameras},
            "image_mask": {name: masks.get(name, absent) for name in self.cameras},
        }
