"""Experts one after the other equal one attention over all their tokens."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from piston.models import masks
from piston.models.gemma import Expert, Rope

from . import plain, tiny

WIDTHS, COUNTS = (20, 14, 9), (5, 3, 4)


@pytest.mark.parametrize("room", [0, sum(COUNTS)])
def test_three_experts_of_different_widths(room):
    experts = [tiny.randomized(Expert(tiny.gemma(width)), seed=width) for width in WIDTHS]
    streams = [torch.randn(2, count, width) for count, width in zip(COUNTS, WIDTHS)]
    starts = torch.cat([torch.arange(count) == 0 for count in COUNTS])[None]
    valid = torch.ones(2, sum(COUNTS), dtype=torch.bool)
    mask = masks.block_mask(valid, starts)
    positions = masks.positions(valid)
    with torch.no_grad():
        expected = plain.transformer(experts, list(streams), [None] * 3, mask, positions)
        caches = experts[0].empty_caches(2, room, streams[0])
        begin = 0
        for expert, tokens, output in zip(experts, streams, expected):
            end = begin + tokens.shape[1]
            rope = Rope.at(positions[:, begin:end], expert.size.head_dim)
            rows = mask[:, begin:end, :end]
            shorter = expert.prefill(tokens, caches, rope, rows)
            found, caches = expert(tokens, caches, rope, rows)
            assert_close(found, output, atol=2e-5, rtol=2e-5)
            for one, other in zip(shorter, caches):
                assert_close(one.read(), other.read())
            begin = end


def test_cache_writes_in_place_only_with_room_and_without_gradients():
    keys = torch.randn(1, 2, 1, 6)
    (cache,) = Expert(tiny.gemma(depth=1, num_kv_heads=1)).empty_caches(1, 3, keys)
    first = cache.extend(keys, keys)
    assert first.keys.data_ptr() == cache.keys.data_ptr()
    assert_close(first.read()[0], keys.transpose(1, 2))
    longer = first.extend(keys, keys)  # four do not fit into three
    assert longer.keys.data_ptr() != cache.keys.data_ptr()
    assert_close(longer.read()[0], torch.cat((keys, keys), 1).transpose(1, 2))
    learning = first.extend(keys[:, :1].clone().requires_grad_(), keys[:, :1])
    assert learning.keys.data_ptr() != cache.keys.data_ptr()
    assert learning.keys.requires_grad
    assert not cache.keys.requires_grad
