"""Packed rows of tokens, attention masks and positions.

A padded row holds every camera slot and the whole prompt; a packed row holds the valid tokens,
moved to the left. Only packed tokens enter the network:

    padded   [ base ][ absent ][ wrist ][ prompt ····· ]     packed   [ base ][ wrist ][ prompt ]
    padded   [ base ][ absent ][ absent ][ prompt ···· ]              [ base ][ prompt ] ········

A token may start a block. Token i attends to token j if j's block is not after i's and both are
valid. π0, with one token per group:

              images prompt state actions
    images       ■      ■     ·      ·      one block: images and prompt
    prompt       ■      ■     ·      ·
    state        ■      ■     ■      ·      the state starts a block
    actions      ■      ■     ■      ■      the first action starts another

Dims: b batch, l padded length, p packed length, t tokens, s suffix tokens, d width.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from piston.observation import send


class Lengths(NamedTuple):
    """How many of the first tokens of each row count."""

    longest: int
    # None when all rows are as long as the longest, and nothing needs a mask.
    each: Int[Tensor, " b"] | None

    @classmethod
    def of(cls, valid: Bool[Tensor, "b l"]) -> Lengths:
        each = valid.sum(1)
        shortest, longest = torch.stack((each.min(), each.max())).tolist()
        return cls(longest, None if shortest == longest else each)

    def to(self, device: torch.device) -> Lengths:
        return Lengths(self.longest, None if self.each is None else send(self.each, device))

    def mask(self) -> Bool[Tensor, "b t"] | None:
        """Return the tokens that count; None if these are all."""
        return None if self.each is None else left_aligned(self.each, self.longest)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each token of the padded rows is in the packed ones."""

    valid: Bool[Tensor, "b l"]
    # The padded position of each packed token; padding points at some token that is not valid.
    source: Int[Tensor, "b p"]
    # Tokens in each packed row; None when all rows are full, and nothing needs a mask.
    lengths: Int[Tensor, " b"] | None

    @classmethod
    def of(cls, valid: Bool[Tensor, "b l"]) -> Packing:
        longest, lengths = Lengths.of(valid)
        if longest == 0:
            raise ValueError(
                "The observation has no camera and no prompt in any sample: every image mask and "
                "every prompt mask is False. Give at least one."
            )
        order = valid.byte().argsort(dim=1, descending=True, stable=True)
        return cls(valid, order[:, :longest], lengths)

    @classmethod
    def aligned(cls, lengths: Int[Tensor, " b"], size: int) -> Packing:
        """Return rows of a given size whose valid tokens are on the left already."""
        valid = left_aligned(lengths, size)
        return cls(valid, torch.arange(size, device=lengths.device).expand_as(valid), lengths)

    def to(self, device: torch.device) -> Packing:
        lengths = None if self.lengths is None else send(self.lengths, device)
        return Packing(send(self.valid, device), send(self.source, device), lengths)

    @property
    def size(self) -> int:
        """Tokens in the longest packed row."""
        return self.source.shape[1]

    def pack(self, padded: Shaped[Tensor, "b l"]) -> Shaped[Tensor, "b p"]:
        return padded.gather(1, self.source)

    def unpack(self, packed: Float[Tensor, "b p d"]) -> Float[Tensor, "b l d"]:
        """Back to padded rows, with zeros where no token is valid."""
        padded = packed.new_zeros(*self.valid.shape, packed.shape[-1])
        padded[self.valid] = packed[self.pack(self.valid)]
        return padded


def block_mask(
    valid: Bool[Tensor, "b t"], starts_block: Bool[Tensor, "#b t"] | Int[Tensor, "#b t"]
) -> Bool[Tensor, "b t t"]:
    """Return mask[b, i, j]: whether token i attends to token j."""
    block = starts_block.long().cumsum(-1)
    earlier = block[:, None, :] <= block[:, :, None]
    return earlier & valid[:, None, :] & valid[:, :, None]


def positions(valid: Bool[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Return the number of valid tokens before each token; meaningless where it is not valid."""
    return valid.long().cumsum(-1) - 1


def left_aligned(lengths: Int[Tensor, " b"], size: int) -> Bool[Tensor, "b t"]:
    """Return True for the first `lengths[b]` of `size` tokens."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def suffix_mask(
    prefix: Bool[Tensor, "b p"], starts_block: Bool[Tensor, " s"]
) -> Bool[Tensor, "b s t"]:
    """Return what suffix tokens attend to: which tokens of the prefix, and among themselves."""
    size = len(starts_block)
    block = starts_block.cumsum(0)
    # Not `len(prefix)`, which is a constant in an exported graph.
    among = (block <= block[:, None]).expand(prefix.shape[0], -1, -1)
    return torch.cat((prefix[:, None].expand(-1, size, -1), among), dim=2)


class TokenGroup(NamedTuple):
    """Consecutive tokens of one kind, for descriptions of a model."""

    name: str
    # At most this many tokens; None: they are part of the prompt.
    size: int | None = None
    source: str = ""
    # Whether the first token starts a block of the attention mask, and whether each one does.
    starts_block: bool = False
    is_causal: bool = False


def draw(groups: Sequence[TokenGroup]) -> str:
    """Return the mask as text, one row and column per group of tokens.

    ■ attends, · does not, ◣ attends to itself and to what came before it in a causal group.
    """
    blocks = list(itertools.accumulate(group.starts_block for group in groups))
    margin = max(len(group.name) for group in groups)
    lines = [" ".join((" " * margin, *(group.name for group in groups)))]
    for i, row in enumerate(groups):
        cells = ["■" if block <= blocks[i] else "·" for block in blocks]
        cells[i] = "◣" if row.is_causal else "■"
        columns = (cell.center(len(group.name)) for cell, group in zip(cells, groups))
        lines.append(" ".join((row.name.ljust(margin), *columns)).rstrip())
    return "\n".join(lines)
