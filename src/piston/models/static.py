"""Prefill and denoising with static shapes: two modules that torch can compile as one graph each.

The model itself packs what is present, so that its shapes depend on the values of masks. Here all
shapes depend on the shapes of the inputs only, and nothing waits for the device. All samples have
the same number of cameras; prompts of different length are padded behind their words:

    row    [ base ][ wrist ][ prompt, 7 tokens ] ·········     length 2 · 256 + 7
    row    [ base ][ wrist ][ prompt, 11 tokens    ] ·····     length 2 · 256 + 11

A row's tokens have the positions from 0 on, no token attends to padding, and the suffix stands
behind each row's own length. This is what the packed rows of `Model.embed_prefix` look like, so
everything behind the embedding is the model's own code, and the results are equal to the packed
path's up to rounding. Each module uses only its own half of the weights.

Dims: b batch, c cameras, p pixels, l prompt length, s prefix tokens, k key heads, e head dim,
h horizon, a action dim, t times.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from piston.models import masks
from piston.models.flow import Pi0
from piston.models.gemma import KVCache
from piston.models.integrator import Committed
from piston.models.model import ActOptions, Prefix

# Keys and values of each layer in turn: keys 0, values 0, keys 1, …
KeysAndValues = list[Float[Tensor, "b k s e"]]


class StaticPrefill(nn.Module):
    """Images and prompt through the VLM: its keys and values in every layer."""

    def __init__(self, model: Pi0) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        images: Shaped[Tensor, "b c p p 3"],
        prompt: Int[Tensor, "b l"],
        lengths: Int[Tensor, " b"],
    ) -> KeysAndValues:
        """`lengths` are the valid tokens of each row: those of all images and of the prompt."""
        model, dtype = self.model, self.model.compute_dtype
        pictures = model.vision(images.flatten(0, 1), dtype)
        pictures = pictures.reshape(images.shape[0], -1, pictures.shape[-1])
        tokens = torch.cat((pictures, model.vlm.embed(prompt, dtype)), dim=1)
        prefix = Prefix(tokens, masks.Packing.aligned(lengths, tokens.shape[1]))
        # Without room in the caches nothing is written in place: they are the results themselves.
        caches = model.vlm.prefill(*model.vlm_inputs(prefix, capacity=0))
        return [part for cache in caches for part in (cache.keys, cache.values)]


class StaticDenoise(nn.Module):
    """All steps of the integrator, from noise to actions, behind prefixes that were prefilled."""

    def __init__(self, model: Pi0, num_steps: int) -> None:
        super().__init__()
        self.model = model
        self.options = ActOptions(num_steps=num_steps)

    def forward(
        self,
        keys_and_values: KeysAndValues,
        lengths: Int[Tensor, " b"],
        state: Float[Tensor, "b a"],
        noise: Float[Tensor, "b h a"],
        previous: Float[Tensor, "b h a"] | None = None,
        committed: Bool[Tensor, "b h"] | None = None,
    ) -> Float[Tensor, "t b h a"]:
        """Return the noisy actions at all times of the integrator; the last are the actions.

        A model that was trained with `max_delay` takes an old chunk and which steps of it are
        committed.
        """
        size = keys_and_values[0].shape[2]
        # Without room in the caches each step reads them together with its own keys and values, and
        # nothing is written in place.
        pairs = zip(keys_and_values[::2], keys_and_values[1::2])
        caches = [KVCache(keys, values, size) for keys, values in pairs]
        visible = masks.left_aligned(lengths, size)
        cache = self.model.suffix_inputs(caches, state, size, visible)
        options = self.options
        if previous is not None and committed is not None:
            known = Committed(previous, committed)
            options = dataclasses.replace(options, committed=known)
        return self.model.denoise(cache, noise, options)
