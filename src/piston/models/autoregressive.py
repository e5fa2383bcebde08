"""π0-FAST: actions as tokens. One expert reads images and prompt and writes FAST tokens.

    images, prompt   one block: all attend to all     Action: … | EOS   each attends to the past

What the tokens decode to is up to `piston.tokenizers.fast`.

Dims: b batch, l prompt length, s packed tokens, m predicted words, d width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from piston.models import masks
from piston.models.configs import Pi0FASTConfig
from piston.models.gemma import Mask, Rope
from piston.models.masks import TokenGroup
from piston.models.model import ActOptions, Model
from piston.models.precision import linear_in_float32
from piston.observation import Observation, send

_PADDING_ID = 0
_END_ID = 1


class Pi0FAST(Model):
    config: Pi0FASTConfig

    def training_losses(
        self,
        observation: Observation,
        actions: Tensor | None = None,  # noqa: ARG002
        draws: Mapping[str, Tensor] | None = None,  # noqa: ARG002
    ) -> dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]]:
        """Return `tokens`: cross-entropy of the next token, averaged over the `token_loss_mask`.

        The actions are part of the prompt, as tokens.
        """
        words, loss_mask = observation.tokenized_prompt, observation.token_loss_mask
        if words is None or loss_mask is None:
            raise ValueError(
                "The loss of π0-FAST needs tokenized_prompt and token_loss_mask; the observation "
                "lacks one. Tokenize the actions together with the prompt."
            )
        prefix = self.embed_prefix(observation)
        packing = prefix.packing
        # Here, unlike in decoding, positions count padding and absent cameras too.
        mask = _prompt_mask(packing, observation.token_ar_mask)
        output, _ = self.vlm(*self.vlm_inputs(prefix, 0, packing.source, mask))

        row, word = (send(index, words.device) for index in loss_mask[:, 1:].nonzero().T)
        num_images = packing.valid.shape[1] - words.shape[1]
        before = masks.positions(packing.valid)[row, num_images + word]
        logits = self.logits(output[row, before])
        losses = nn.functional.cross_entropy(logits, words[row, word + 1].long(), reduction="none")
        total = losses.new_zeros(len(words)).index_add(0, row, losses)
        counts = send(loss_mask[:, 1:].sum(1).clamp(min=1), words.device)
        return {"tokens": total / counts}

    def act_with(self, observation: Observation, options: ActOptions) -> Int[Tensor, "b steps"]:
        """Continue each prompt until its end token; the row is then filled up with zeros.

        Decoding ends when every row has ended, or after `num_steps` tokens (by default those of the
        configuration).
        """
        if not (options.noise is None and options.guidance is None):
            raise ValueError("π0-FAST does not denoise: it can use no noise or guidance.")
        num_steps = options.num_steps or self.config.max_decoding_steps
        prefix = self.embed_prefix(observation)
        packing = prefix.packing
        mask = _prompt_mask(packing, observation.token_ar_mask)
        output, caches = self.vlm(*self.vlm_inputs(prefix, packing.size + num_steps, mask=mask))
        lengths = packing.valid.sum(1)
        rows = torch.arange(len(lengths), device=lengths.device)
        output = output[rows, lengths.clamp(min=1) - 1]
        mask = None  # a new word attends to its row's prefix and the words before it
        if packing.lengths is not None:
            valid = masks.left_aligned(packing.lengths, packing.size)
            mask = torch.cat((valid, valid.new_ones(len(valid), num_steps)), dim=1)[:, None]

        tokens: list[Int[Tensor, " b"]] = []
        ended = torch.zeros_like(lengths, dtype=torch.bool)
        while True:
            logits = self.logits(output)
            if options.visit is not None:
                options.visit(logits)
            token = choose(logits, options.temperature, options.generator)
            tokens.append(token.masked_fill(ended, _PADDING_ID))
            ended = ended | (token == _END_ID)
            step = len(tokens)
            if step == num_steps or bool(ended.all()):
                return torch.stack(tokens, dim=1)
            # The released weights were trained to decode with one position left out.
            rope = Rope.at((lengths + step)[:, None], self.config.vlm.head_dim)
            seen = None if mask is None else mask[:, :, : packing.size + step]
            words = self.vlm.embed(tokens[-1][:, None], self.compute_dtype)
            output, caches = self.vlm(words, caches, rope, seen)
            output = output[:, 0]

    def logits(self, output: Float[Tensor, "m d"]) -> Float[Tensor, "m v"]:
        """Return the products with the embedding table, in float32: bfloat16 would give ties."""
        return linear_in_float32(output, self.vlm.embedding.weight)

    def token_groups(self) -> list[TokenGroup]:
        codes = TokenGroup("codes", None, "generated one by one", starts_block=True, is_causal=True)
        return [*super().token_groups(), codes]


def _prompt_mask(packing: masks.Packing, starts_block: Int[Tensor, "b l"] | None) -> Mask:
    """Return the mask of a prompt with causal tokens; None if the prompt is one block."""
    if starts_block is None or not bool(starts_block.any()):
        return None
    num_images = packing.valid.shape[1] - starts_block.shape[1]
    padded = send(nn.functional.pad(starts_block, (num_images, 0)), packing.valid.device)
    valid = packing.pack(packing.valid)
    # Padding attends to everything, so that its unused output is finite.
    return masks.block_mask(valid, packing.pack(padded)) | ~valid[:, :, None]


def choose(
    logits: Float[Tensor, "b v"], temperature: float, generator: torch.Generator | None
) -> Int[Tensor, " b"]:
    """Return the likeliest token (temperature 0), or one drawn from the softmax."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
