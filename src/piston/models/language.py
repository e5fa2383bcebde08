"""What a VLM writes: the loss of the next token, and the generation of tokens.

    [ images, prompt ][ response text · end ][ FAST tokens ]      one row of tokens per sample

    images, prompt   one block: all attend to all
    text, FAST       each token attends to all before it; the action expert attends to the text
                     before its end, and to nothing behind it

π0-FAST has no response text, and no action expert.

Dims: b batch, l length of the padded prompt, s packed tokens, m predicted tokens, n written tokens,
d width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from piston.models import masks
from piston.models.gemma import Expert, KVCache, Mask, Rope, Tokens
from piston.models.precision import linear_in_float32
from piston.observation import Observation, send

PADDING_ID = 0
END_ID = 1


def causal_mask(packing: masks.Packing, starts_block: Int[Tensor, "b l"] | None) -> Mask:
    """Return the mask of a prompt with causal tokens; None if the prompt is one block."""
    if starts_block is None or not bool(starts_block.any()):
        return None
    num_images = packing.valid.shape[1] - starts_block.shape[1]
    padded = send(nn.functional.pad(starts_block, (num_images, 0)), packing.valid.device)
    valid = packing.pack(packing.valid)
    # Padding attends to everything, so that its unused output is finite.
    return masks.block_mask(valid, packing.pack(padded)) | ~valid[:, :, None]


def next_token_loss(
    vlm: Expert, output: Tokens, packing: masks.Packing, observation: Observation
) -> Float[Tensor, " b"]:
    """Return the cross-entropy of each sample, averaged over the tokens of its `token_loss_mask`.

    A sample without such a token has the loss 0.
    """
    words, loss_mask = observation.tokenized_prompt, observation.token_loss_mask
    if words is None or loss_mask is None:
        raise ValueError(
            "The loss of written tokens needs tokenized_prompt and token_loss_mask; the "
            "observation lacks one. Tokenize what is to be written together with the prompt."
        )
    row, word = (send(index, words.device) for index in loss_mask[:, 1:].nonzero().T)
    num_images = packing.valid.shape[1] - words.shape[1]
    before = masks.positions(packing.valid)[row, num_images + word]
    losses = nn.functional.cross_entropy(
        token_logits(vlm, output[row, before]), words[row, word + 1].long(), reduction="none"
    )
    total = losses.new_zeros(len(words)).index_add(0, row, losses)
    counts = send(loss_mask[:, 1:].sum(1).clamp(min=1), words.device)
    return total / counts


def token_loss_weights(batch: Mapping[str, Any]) -> Float[Tensor, " b"]:
    """Return 1 for the samples that `next_token_loss` has tokens of, 0 for the others."""
    learned = batch.get("token_loss_mask")
    if learned is None:
        return torch.zeros(len(batch["state"]))
    return learned[:, 1:].any(1).float()


def token_logits(vlm: Expert, output: Float[Tensor, "m d"]) -> Float[Tensor, "m v"]:
    """Return the products with the embedding table, in float32: bfloat16 would give ties."""
    return linear_in_float32(output, vlm.embedding.weight)


class Written(NamedTuple):
    """Tokens that a VLM wrote behind its prompts."""

    # A row that has ended, which its end token belongs to, is filled up with zeros.
    tokens: Int[Tensor, "b n"]
    caches: list[KVCache]
    # Which columns of the caches each row may be read from: its own prompt and text, without end.
    visible: Bool[Tensor, "b s"]


def last_outputs(output: Tokens, packing: masks.Packing) -> Float[Tensor, "b d"]:
    """Return the output of the last token of every packed row."""
    lengths = packing.valid.sum(1)
    return output[torch.arange(len(lengths), device=lengths.device), lengths.clamp(min=1) - 1]


@torch.no_grad()
def write(
    vlm: Expert,
    output: Float[Tensor, "b d"],
    caches: list[KVCache],
    packing: masks.Packing,
    limit: int,
    *,
    dtype: torch.dtype,
    ended: Bool[Tensor, " b"] | None = None,
    position_gap: int = 0,
    choose: Callable[[Float[Tensor, "b v"]], Int[Tensor, " b"]] = lambda logits: logits.argmax(-1),
) -> Written:
    """Continue every row until its end token, all rows have ended, or `limit` tokens are written.

    `output` is that of the last token of each row, `caches` have room for the new tokens, which
    are computed in `dtype`. Rows that have `ended` already write nothing. New positions follow the
    row's own tokens, after a gap.
    """
    lengths, size = packing.valid.sum(1), packing.size
    prompt = masks.left_aligned(lengths, size)
    ended = torch.zeros_like(lengths, dtype=torch.bool) if ended is None else ended
    tokens: list[Int[Tensor, " b"]] = []
    is_text: list[Bool[Tensor, " b"]] = []  # of the tokens in the caches
    while len(tokens) < limit:
        token = choose(token_logits(vlm, output)).masked_fill(ended, PADDING_ID)
        tokens.append(token)
        ended = ended | (token == END_ID)
        if bool(ended.all()):
            break
        is_text.append(~ended)
        step = len(tokens)
        rope = Rope.at((lengths + (position_gap + step - 1))[:, None], vlm.size.head_dim)
        # A new token attends to its row's prompt and to all that has been written. Rows that have
        # ended do so too; nobody reads what they compute.
        seen = None
        if packing.lengths is not None:
            seen = torch.cat((prompt, prompt.new_ones(len(prompt), step)), dim=1)[:, None]
        words, caches = vlm(vlm.embed(token[:, None], dtype), caches, rope, seen)
        output = words[:, 0]
    visible = torch.cat((prompt, *(column[:, None] for column in is_text)), dim=1)
    return Written(torch.stack(tokens, dim=1), caches, visible)
