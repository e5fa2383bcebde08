"""The prefix: images and prompt become one row of tokens per sample, without anything absent.

A padded row holds every camera slot and the whole prompt; a packed row holds the valid tokens,
moved to the left. Only packed tokens enter the network:

    padded   [ base ][ absent ][ wrist ][ prompt ····· ]     packed   [ base ][ wrist ][ prompt ]
    padded   [ base ][ absent ][ absent ][ prompt ···· ]              [ base ][ prompt ] ········

Dims: b batch, c cameras, i images present, t tokens per image, l padded length, s packed length,
d width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from piston.models.siglip import to_unit_range
from piston.observation import Image, Observation, send


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each token of the padded rows is in the packed ones."""

    valid: Bool[Tensor, "b l"]
    # The padded position of each packed token; padding points at some token that is not valid.
    source: Int[Tensor, "b s"]
    # Tokens in each packed row; None when all rows are full, and nothing needs a mask.
    lengths: Int[Tensor, " b"] | None

    @classmethod
    def of(cls, valid: Bool[Tensor, "b l"]) -> Packing:
        lengths = valid.sum(1)
        shortest, longest = torch.stack((lengths.min(), lengths.max())).tolist()
        if longest == 0:
            raise ValueError(
                "The observation has no camera and no prompt in any sample: every image mask and "
                "every prompt mask is False. Give at least one."
            )
        order = valid.byte().argsort(dim=1, descending=True, stable=True)
        source = order[:, :longest]
        return cls(valid, source, None if shortest == longest else lengths)

    def to(self, device: torch.device) -> Packing:
        lengths = None if self.lengths is None else send(self.lengths, device)
        return Packing(send(self.valid, device), send(self.source, device), lengths)

    @property
    def size(self) -> int:
        """Tokens in the longest packed row."""
        return self.source.shape[1]

    def pack(self, padded: Tensor) -> Tensor:
        """(b, l) → (b, s)"""
        return padded.gather(1, self.source)

    def unpack(self, packed: Float[Tensor, "b s d"]) -> Float[Tensor, "b l d"]:
        """Back to padded rows, with zeros where no token is valid."""
        padded = packed.new_zeros(*self.valid.shape, packed.shape[-1])
        padded[self.valid] = packed[self.pack(self.valid)]
        return padded


@dataclasses.dataclass(frozen=True)
class Prefix:
    tokens: Float[Tensor, "b s d"]
    packing: Packing


def index_of_valid(valid: Bool[Tensor, "b l"], num_images: int) -> Int[Tensor, "b l"]:
    """Return each valid token's index among all valid image tokens, then all valid words."""
    images, words = valid[:, :num_images], valid[:, num_images:]
    order = torch.cat((images.flatten(), words.flatten())).long().cumsum(0) - 1
    image_order, word_order = order.split((images.numel(), words.numel()))
    index = torch.cat((image_order.view(images.shape), word_order.view(words.shape)), dim=1)
    return index.where(valid, 0)


def present_images(
    observation: Observation, cameras: Sequence[str]
) -> tuple[Bool[Tensor, "b c"], Image]:
    """Return which sample has which camera, and the present images, sample by sample."""
    if set(observation.images) != set(cameras):
        raise ValueError(
            f"The model has the cameras {list(cameras)}; the observation has "
            f"{sorted(observation.images)}. Give every slot an image, with mask False if absent."
        )
    present = torch.stack([observation.image_masks[camera] for camera in cameras], dim=1)
    images = [observation.images[camera] for camera in cameras]
    if len({image.dtype for image in images}) > 1:
        images = [to_unit_range(image) for image in images]  # the ranges of bytes and floats differ
    index = send(present.flatten().nonzero()[:, 0], observation.device)
    return present, torch.stack(images, dim=1).flatten(0, 1)[index]


def prompt_of(
    observation: Observation,
) -> tuple[Int[Tensor, "b l"], Bool[Tensor, "b l"]]:
    """Return the token ids and which are valid; of length zero without a prompt."""
    prompt, mask = observation.tokenized_prompt, observation.tokenized_prompt_mask
    if prompt is None:
        prompt = torch.zeros(
            (observation.batch_size, 0), dtype=torch.long, device=observation.device
        )
        return prompt, prompt.bool()
    if mask is None:
        raise ValueError("The observation has a tokenized_prompt but no tokenized_prompt_mask.")
    return prompt, mask
