"""π0-FAST: actions as words. One expert reads images and prompt and writes FAST tokens.

    images, prompt   one block, everyone sees everyone        Action: … | EOS   each sees the past

Knows token ids; knows nothing of what they decode to.

Dims: b batch, l prompt length, s packed tokens, m predicted words, d width, v vocabulary.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from piston.models import joint, masks
from piston.models.configs import Pi0FASTConfig
from piston.models.gemma import Memory, Rope
from piston.models.precision import linear_in_float32
from piston.models.prefix import Packing, Prefix, PrefixReader
from piston.observation import Observation

_PADDING_ID = 0
_END_ID = 1


class Pi0FAST(PrefixReader):
    config: Pi0FASTConfig

    def __init__(self, config: Pi0FASTConfig) -> None:
        super().__init__(config)

    def loss(self, observation: Observation) -> Float[Tensor, " b"]:
        """Cross-entropy of the next token, averaged over each sample's `token_loss_mask`."""
        words, loss_mask = observation.tokenized_prompt, observation.token_loss_mask
        if words is None or loss_mask is None:
            raise ValueError(
                "The loss of π0-FAST needs tokenized_prompt and token_loss_mask; the observation "
                "lacks one. Tokenize the actions together with the prompt."
            )
        prefix = self.embed_prefix(observation)
        # Here, unlike in decoding, positions count padding and absent cameras too.
        output, _ = self._read(prefix, observation, prefix.packing.source, capacity=0)

        row, word = loss_mask[:, 1:].nonzero(as_tuple=True)
        num_images = prefix.packing.valid.shape[1] - words.shape[1]
        before = masks.positions(prefix.packing.valid)[row, num_images + word]
        logits = self.logits(output[row, before])
        losses = nn.functional.cross_entropy(logits, words[row, word + 1].long(), reduction="none")
        total = losses.new_zeros(len(words)).index_add(0, row, losses)
        return total / loss_mask[:, 1:].sum(1).clamp(min=1)

    @torch.no_grad()
    def generate_tokens(
        self,
        observation: Observation,
        max_steps: int | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "b steps"]:
        """Continue each prompt until its end token; then the row goes on with zeros.

        Stops when every row has ended, or after `max_steps` (from the configuration if not given).
        Temperature 0 takes the likeliest token.
        """
        max_steps = self.config.max_decoding_steps if max_steps is None else max_steps
        if max_steps < 1 or not 0 <= temperature < math.inf:
            raise ValueError(
                f"max_steps must be at least 1 and temperature a number of at least 0, found "
                f"{max_steps} and {temperature}."
            )
        prefix = self.embed_prefix(observation)
        packing = prefix.packing
        capacity = packing.size + max_steps
        count = torch.arange(packing.size, device=observation.device)[None]
        output, memories = self._read(prefix, observation, count, capacity)
        lengths = packing.valid.sum(1)
        rows = torch.arange(len(lengths), device=lengths.device)
        output = output[rows, lengths.clamp(min=1) - 1]
        sees = self._decoding_mask(packing, max_steps)

        tokens: list[Int[Tensor, " b"]] = []
        ended = torch.zeros_like(lengths, dtype=torch.bool)
        while True:
            token = choose(self.logits(output), temperature, generator)
            tokens.append(token.masked_fill(ended, _PADDING_ID))
            ended = ended | (token == _END_ID)
            step = len(tokens)
            if step == max_steps or bool(ended.all()):
                return torch.stack(tokens, dim=1)
            # The released weights were trained to decode with one position left out.
            rope = Rope.at((lengths + step)[:, None], self.config.vlm.head_dim)
            mask = None if sees is None else sees[:, :, : packing.size + step]
            words = self.vlm.embed(tokens[-1][:, None], self.compute_dtype)
            output, memories = joint.read(self.vlm, words, memories, rope, mask)
            output = output[:, 0]

    def logits(self, output: Float[Tensor, "m d"]) -> Float[Tensor, "m v"]:
        """The embedding table is the output head too. Rounded to bfloat16, many words would tie."""
        return linear_in_float32(output, self.vlm.embedding.weight)

    def _read(
        self,
        prefix: Prefix,
        observation: Observation,
        positions: Int[Tensor, "#b s"],
        capacity: int,
    ) -> tuple[Float[Tensor, "b s d"], list[Memory]]:
        packing = prefix.packing
        return joint.read(
            self.vlm,
            prefix.tokens,
            joint.empty_memories(self.vlm, len(prefix.tokens), capacity, prefix.tokens),
            Rope.at(positions, self.config.vlm.head_dim),
            _reading_mask(packing, observation.token_ar_mask),
            gradient_checkpointing=self.gradient_checkpointing,
        )

    def _decoding_mask(self, packing: Packing, max_steps: int) -> Bool[Tensor, "b 1 t"] | None:
        """New words see their row's prefix and one another."""
        if packing.lengths is None:
            return None
        seen = masks.left_aligned(packing.lengths, packing.size)
        return torch.cat((seen, seen.new_ones(len(seen), max_steps)), dim=1)[:, None]


def _reading_mask(
    packing: Packing, starts_block: Int[Tensor, "b l"] | None
) -> Bool[Tensor, "b s s"] | Bool[Tensor, "b 1 s"] | None:
    if starts_block is None or not bool(starts_block.any()):
        return masks.padding_mask(packing.lengths, packing.size)
    num_images = packing.valid.shape[1] - starts_block.shape[1]
    padded = nn.functional.pad(starts_block, (num_images, 0))
    valid = packing.pack(packing.valid)
    # Padding sees everything, so that its unused result is finite.
    return masks.block_mask(valid, packing.pack(padded)) | ~valid[:, :, None]


def choose(
    logits: Float[Tensor, "b v"], temperature: float, generator: torch.Generator | None
) -> Int[Tensor, " b"]:
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
