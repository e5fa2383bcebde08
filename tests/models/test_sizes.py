"""Sizes that make no model are refused where they are given."""

from __future__ import annotations

import math

import pytest

from piston.models.configs import (
    GemmaSize,
    LoRA,
    Pi0FASTConfig,
    VisionSize,
    parse_gemma_size,
    parse_vision_size,
)

NUMBERS = "width=8,depth=1,mlp_dim=4,num_heads=2,num_kv_heads=1,head_dim=4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NUMBERS.replace("width=8", "width=8.9"), "width must be a whole number, is 8.9"),
        (NUMBERS.replace("width=8", "width=inf"), "width must be a whole number, is inf"),
        (NUMBERS.replace("width=8", "width=nan"), "width must be a whole number, is nan"),
        (NUMBERS.replace("width=8", "width=0"), "width must be a whole number of at least 1"),
        (NUMBERS + ",width=9", "gives a name twice"),
        (NUMBERS + ",lora_alpha=2", "has lora_alpha but no lora_rank"),
        (NUMBERS + ",lora_mlp=0", "has lora_mlp but no lora_rank"),
        (NUMBERS + ",lora_rank=0", "rank of adapters must be at least 1"),
        (NUMBERS + ",lora_rank=1.5", "lora_rank must be a whole number"),
        (NUMBERS + ",lora_rank=2,lora_alpha=inf", "alpha of adapters must be a positive number"),
        (NUMBERS + ",lora_rank=2,lora_alpha=nan", "alpha of adapters must be a positive number"),
        (NUMBERS + ",lora_rank=2,lora_mlp=2", "lora_mlp must be 0 or 1"),
        (NUMBERS + ",lora_rank=2,lora_mlp=0,lora_attention=0", "attention, mlp or both"),
    ],
)
def test_texts_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_gemma_size(text)


def test_texts_that_are_read():
    assert parse_gemma_size(NUMBERS) == GemmaSize(8, 1, 4, 2, 1, 4)
    expected = GemmaSize(8, 1, 4, 2, 1, 4, LoRA(2, 2.0, mlp=False))
    assert parse_gemma_size(NUMBERS + ",lora_rank=2,lora_mlp=0") == expected
    with pytest.raises(ValueError, match=r"patch must be a whole number, is 14\.5"):
        parse_vision_size("width=8,depth=1,mlp_dim=4,num_heads=2,patch=14.5")


@pytest.mark.parametrize(
    "make",
    [
        lambda: LoRA(0, 1.0),
        lambda: LoRA(2, 0.0),
        lambda: LoRA(2, math.nan),
        lambda: LoRA(2, 2.0, attention=False, mlp=False),
        lambda: GemmaSize(8.0, 1, 4, 2, 1, 4),
        lambda: VisionSize(8, 1, 4, 2, 14.0),
        lambda: Pi0FASTConfig(max_decoding_steps=0),
    ],
)
def test_values_that_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()
