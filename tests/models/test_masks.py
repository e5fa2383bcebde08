"""Masks and positions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from piston.models import masks
from piston.models.masks import Packing, TokenGroup

rows = st.integers(1, 9).flatmap(
    lambda size: st.lists(
        st.lists(st.booleans(), min_size=size, max_size=size), min_size=1, max_size=4
    )
)


@given(valid=rows, data=st.data())
def test_block_mask_by_its_definition(valid, data):
    size = len(valid[0])
    starts = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    mask = masks.block_mask(torch.tensor(valid), torch.tensor([starts]))
    for row, found in zip(valid, mask.tolist()):
        for i in range(size):
            for j in range(size):
                not_after = sum(starts[: j + 1]) <= sum(starts[: i + 1])
                assert found[i][j] == (not_after and row[i] and row[j])


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), suffix=st.integers(1, 4))
def test_suffix_mask_is_the_tail_of_the_block_mask(lengths, suffix):
    starts = torch.arange(suffix) < 2
    found = masks.suffix_mask(masks.left_aligned(torch.tensor(lengths), 5), starts)
    valid = [[i < n for i in range(5)] + [True] * suffix for n in lengths]
    whole = masks.block_mask(
        torch.tensor(valid), torch.cat((torch.zeros(5, dtype=torch.bool), starts))[None]
    )
    assert torch.equal(found, whole[:, 5:])


@given(valid=rows.filter(lambda rows: any(map(any, rows))))
def test_packing_keeps_valid_tokens_in_order_and_unpacks_them(valid):
    valid = torch.tensor(valid)
    values = torch.arange(1, valid.numel() + 1).view(valid.shape)
    packing = Packing.of(valid)
    packed = packing.pack(values)
    for row, found in zip(values * valid, packed):
        kept = row[row > 0]
        assert torch.equal(found[: len(kept)], kept)
    counts = valid.sum(1)
    assert packing.size == counts.max()
    assert (packing.lengths is None) == bool((counts == counts.max()).all())
    unpacked = packing.unpack(packed[..., None].float())[..., 0]
    assert torch.equal(unpacked, (values * valid).float())


def test_drawing():
    groups = [TokenGroup(name) for name in ("images", "prompt")]
    groups += [TokenGroup(name, starts_block=True) for name in ("state", "actions")]
    assert masks.draw(groups) == (
        "        images prompt state actions\n"
        "images    ■      ■      ·      ·\n"
        "prompt    ■      ■      ·      ·\n"
        "state     ■      ■      ■      ·\n"
        "actions   ■      ■      ■      ■"
    )
    words = TokenGroup("words", starts_block=True, is_causal=True)
    assert "◣" in masks.draw([TokenGroup("prompt"), words])
