"""The prefix: images and prompt become one row of tokens per sample, without anything absent.

A padded row holds every camera slot and the whole prompt; a packed row holds the valid tokens,
moved to the left. Only packed tokens enter the network:

    padded   [ base ][ absent ][ wrist ][ prompt ····· ]     packed   [ base ][ wrist ][ prompt ]
    padded   [ base ][ absent ][ absent ][ prompt ···· ]              [ base ][ prompt ] ········

Knows which tokens are there; who sees whom is `masks`' matter, and what follows is the model's.

Dims: b batch, c cameras, i images present, t tokens per image, l padded length, s packed length,
d width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from piston.models.configs import ModelConfig
from piston.models.gemma import Expert
from piston.models.precision import torch_dtype
from piston.models.siglip import VisionTower, to_unit_range
from piston.observation import Image, Observation


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each token of the padded rows went in the packed ones."""

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


class PrefixReader(nn.Module):
    """What all models begin with: the vision tower and the expert that reads images and words."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch_dtype(config.dtype)
        self.gradient_checkpointing = False
        self.vision = VisionTower(config.vision, config.image_size, config.vlm.width)
        self.vlm = Expert(config.vlm, vocab_size=config.vocab_size)

    def embed_prefix(self, observation: Observation) -> Prefix:
        """The tokens that the VLM reads: those of present images and valid words alone."""
        present, images = present_images(observation, self.config.cameras)
        prompt, prompt_mask = prompt_of(observation)
        image_mask = present.repeat_interleave(self.vision.num_tokens, 1)
        valid = torch.cat((image_mask, prompt_mask), dim=1)
        packing = Packing.of(valid)

        dtype = self.compute_dtype
        tokens = [self.vlm.embed(prompt[prompt_mask], dtype)]
        if len(images):
            seen = self.vision(images, dtype, self.gradient_checkpointing)
            tokens.insert(0, seen.flatten(0, 1))
        index = _index_of_valid(valid, image_mask.shape[1])
        return Prefix(torch.cat(tokens)[packing.pack(index)], packing)


def _index_of_valid(valid: Bool[Tensor, "b l"], num_images: int) -> Int[Tensor, "b l"]:
    """Each valid token's place in the list of all valid image tokens, then all valid words."""
    images, words = valid[:, :num_images], valid[:, num_images:]
    order = torch.cat((images.flatten(), words.flatten())).long().cumsum(0) - 1
    image_order, word_order = order.split((images.numel(), words.numel()))
    index = torch.cat((image_order.view(images.shape), word_order.view(words.shape)), dim=1)
    return index.where(valid, 0)


def present_images(
    observation: Observation, cameras: Sequence[str]
) -> tuple[Bool[Tensor, "b c"], Image]:
    """Which sample has which camera, and the images that are there, sample by sample."""
    if set(observation.images) != set(cameras):
        raise ValueError(
            f"The model has the cameras {list(cameras)}; the observation has "
            f"{sorted(observation.images)}. Give every slot an image, with mask False if absent."
        )
    present = torch.stack([observation.image_masks[camera] for camera in cameras], dim=1)
    images = [observation.images[camera] for camera in cameras]
    if len({image.dtype for image in images}) > 1:
        images = [to_unit_range(image) for image in images]  # bytes mean other numbers than floats
    return present, torch.stack(images, dim=1)[present]


def prompt_of(
    observation: Observation,
) -> tuple[Int[Tensor, "b l"], Bool[Tensor, "b l"]]:
    """Token ids and which are valid; of length zero without a prompt."""
    prompt, mask = observation.tokenized_prompt, observation.tokenized_prompt_mask
    if prompt is None:
        prompt = torch.zeros(
            (observation.batch_size, 0), dtype=torch.long, device=observation.device
        )
        return prompt, prompt.bool()
    if mask is None:
        raise ValueError("The observation has a tokenized_prompt but no tokenized_prompt_mask.")
    return prompt, mask
