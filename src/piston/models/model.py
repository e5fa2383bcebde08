"""The interface of every model: losses for training, actions for a robot, layers to shard.

All models begin alike: a vision tower and an expert, the VLM, that processes images and prompt.

Dims: b batch, c cameras, n noise draws or candidates, h horizon, a action dim, s prefix tokens.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from piston.llvm import load_triton
from piston.models import masks
from piston.models.configs import ModelConfig
from piston.models.gemma import Expert, KVCache, Mask, Rope, Tokens
from piston.models.integrator import Committed, Guidance
from piston.models.masks import TokenGroup
from piston.models.siglip import VisionTower, to_unit_range
from piston.observation import Image, Observation, send

load_triton()  # building a model imports torch._dynamo


class Prefix(NamedTuple):
    """Images and prompt as one row of tokens per sample, without anything absent."""

    tokens: Tokens
    packing: masks.Packing
    # The first tokens of each row, which an action expert may attend to; None: all of a row.
    visible: masks.Lengths | None = None


class Response(NamedTuple):
    """What a model answers: actions, or the tokens that stand for them, and text if it wrote any.

    A row of text ends with its end token and is filled up with zeros.
    """

    actions: Tensor
    text: Int[Tensor, "b n"] | None = None
    # Of a model that denoises, the noisy actions at the times of the integrator, noise first: with
    # the axes of the actions behind the one of times.
    path: Float[Tensor, "k ..."] | None = None


@dataclasses.dataclass(frozen=True)
class ActOptions:
    """How actions are computed. A model refuses what it cannot use."""

    # Of a model that denoises, what to start from, (b, h, a); by default drawn with `generator`. As
    # (b, n, h, a) it gives n candidates, which share one prefix.
    noise: Tensor | None = None
    # Steps of the integrator, or at most so many decoded tokens; None is the model's usual number.
    num_steps: int | None = None
    generator: torch.Generator | None = None
    # Real-time chunking: towards the previous chunk, or with its first actions as they are.
    guidance: Guidance | None = None
    committed: Committed | None = None
    # Of a model that decodes tokens: is called with the logits (b, vocabulary) of each token.
    visit: Callable[[Tensor], object] | None = None

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, is {self.num_steps}.")


class Model(nn.Module, abc.ABC):
    """What every model has and can do. `config.denoises` says whether it starts from noise.

    Build models with `piston.models.build.build_model`, which chooses how this machine's CPU
    multiplies bfloat16. On a model built otherwise call `precision.use_fastest_products` before its
    first bfloat16 product: on virtual machines with broken matrix tiles PyTorch's own would crash.
    """

    config: ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype = getattr(torch, config.dtype)
        self.vision = VisionTower(config.vision, config.image_size, config.vlm.width)
        self.vlm = Expert(config.vlm, vocab_size=config.vocab_size)

    def draw(
        self,
        batch_size: int,  # noqa: ARG002
        num_draws: int = 1,  # noqa: ARG002
        generator: torch.Generator | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Draw the random numbers of `training_losses`, on the CPU; their first axis is the batch.

        A model that denoises takes `num_draws` per sample, which share one prefix.
        """
        return {}

    @abc.abstractmethod
    def training_losses(
        self, observation: Observation, actions: Tensor | None, draws: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]]:
        """Return the losses that are minimised together, by the names of `loss_weights`.

        A loss has a value per sample, or per number of the actions. `draws` are those of `draw`;
        losses are averaged over several of them.
        """

    @property
    @abc.abstractmethod
    def loss_names(self) -> tuple[str, ...]:
        """The names of all losses that `training_losses` can return."""

    @abc.abstractmethod
    def loss_weights(
        self, batch: Mapping[str, Any], action_weights: Float[Tensor, "b h a"]
    ) -> dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]]:
        """Return how much each value of each loss counts, on the CPU, before the forward pass.

        What is minimised is the sum of the losses, each the weighted mean of its values over the
        samples of all processes. `action_weights` is 1 for the numbers of the actions that count
        and 0 for padding.
        """

    @torch.no_grad()
    def act(self, observation: Observation, noise: Tensor | None = None, **options: Any) -> Tensor:
        """Return a chunk of actions per sample, or the tokens that stand for it.

        `options` are those of `ActOptions`. The result has the shape of the noise, or (b, steps).
        """
        return self.act_with(observation, ActOptions(noise, **options)).actions

    @abc.abstractmethod
    def act_with(self, observation: Observation, options: ActOptions) -> Response:
        """Compute what `act` returns, and the text that was written on the way."""

    @property
    def experts(self) -> dict[str, Expert]:
        """The experts in the order in which they run, by the names of their attributes."""
        return {name: getattr(self, name) for name in self.config.experts}

    def layers(self) -> list[nn.Module]:
        """Return the repeated layers, which hold almost all parameters: to shard or compile."""
        experts = self.experts.values()
        return [*self.vision.blocks, *(layer for expert in experts for layer in expert.layers)]

    def unused_parameters(self) -> list[str]:
        """Return the names of the parameters that have no part in any loss or action."""
        return []

    def token_groups(self) -> list[TokenGroup]:
        """Describe a sequence with all cameras and a full prompt."""
        size, prefix = self.config.tokens_per_camera, "prefix, if the camera is present"
        return [
            *(TokenGroup(camera, size, prefix) for camera in self.config.cameras),
            TokenGroup("prompt", self.config.prompt_length, "prefix, without padding"),
        ]

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Keep no activations within a layer for the backward pass, but compute them again."""
        self.vision.gradient_checkpointing = enabled
        for expert in self.experts.values():
            expert.gradient_checkpointing = enabled

    def embed_prefix(self, observation: Observation) -> Prefix:
        """Return the tokens that the VLM reads: those of present images and valid words alone."""
        device, prompt = observation.device, observation.tokenized_prompt
        words_mask = observation.tokenized_prompt_mask
        if prompt is None:
            prompt = torch.zeros((observation.batch_size, 0), dtype=torch.long, device=device)
            words_mask = prompt.bool()
        elif words_mask is None:
            raise ValueError("The observation has a tokenized_prompt but no tokenized_prompt_mask.")
        present, images = self._present_images(observation)
        image_mask = present.repeat_interleave(self.vision.num_tokens, 1)
        valid = torch.cat((image_mask, words_mask), dim=1)
        packing, visible = masks.Packing.of(valid), None
        if observation.token_hidden_mask is not None:
            shown = valid.clone()
            shown[:, image_mask.shape[1] :] &= ~observation.token_hidden_mask
            visible = masks.Lengths.of(shown).to(device)

        # Indices are computed where the masks are, so that nothing waits for the device.
        words = send(words_mask.flatten().nonzero()[:, 0], device)
        tokens = [self.vlm.embed(prompt.flatten()[words], self.compute_dtype)]
        if len(images):
            tokens.insert(0, self.vision(images, self.compute_dtype).flatten(0, 1))
        # Where each valid token is among all present images' tokens, then all valid words.
        order = torch.cat((image_mask.flatten(), words_mask.flatten())).long().cumsum(0) - 1
        of_images, of_words = order.split([image_mask.numel(), words_mask.numel()])
        places = torch.cat((of_images.view_as(image_mask), of_words.view_as(words_mask)), dim=1)
        index = send(packing.pack(places.where(valid, 0)), device)
        return Prefix(torch.cat(tokens)[index], packing.to(device), visible)

    def _present_images(self, observation: Observation) -> tuple[Bool[Tensor, "b c"], Image]:
        """Return which sample has which camera, and the present images, sample by sample."""
        cameras = self.config.cameras
        if set(observation.images) != set(cameras):
            raise ValueError(
                f"The model has the cameras {list(cameras)}; the observation has "
                f"{sorted(observation.images)}. Give every slot an image, with mask False if "
                "absent."
            )
        present = torch.stack([observation.image_masks[camera] for camera in cameras], dim=1)
        images = [observation.images[camera] for camera in cameras]
        if len({image.dtype for image in images}) > 1:
            images = [to_unit_range(image) for image in images]  # bytes and floats differ in range
        index = send(present.flatten().nonzero()[:, 0], observation.device)
        return present, torch.stack(images, dim=1).flatten(0, 1)[index]

    def vlm_inputs(
        self,
        prefix: Prefix,
        capacity: int,
        positions: Int[Tensor, "#b s"] | None = None,
        mask: Mask = None,
    ) -> tuple[Tokens, list[KVCache], Rope, Mask]:
        """Return what the VLM needs to process a prefix with caches of this capacity.

        By default the prefix is one block, and its valid tokens have the positions from 0 on.
        """
        tokens, packing = prefix.tokens, prefix.packing
        if positions is None:
            positions = torch.arange(packing.size, device=tokens.device)[None]
        if mask is None and packing.lengths is not None:
            # A row without any token attends to its first padding, so that its output is finite.
            mask = masks.left_aligned(packing.lengths.clamp(min=1), packing.size)[:, None]
        caches = self.vlm.empty_caches(tokens.shape[0], capacity, tokens)
        return tokens, caches, Rope.at(positions, self.config.vlm.head_dim), mask
