"""Sizes that make no model are refused where they are given."""

from __future__ import annotations

import math

import pytest

from piston.models.configs import (
    GemmaSize,
    LoRA,
    Pi0FASTConfig,
    VisionSize,
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LoRA(0, 1.0),
        lambda: LoRA(2, 0.0),
        lambda: LoRA(2, math.nan),
        lambda: LoRA(2, math.inf),
        lambda: LoRA(2, 2.0, attention=False, mlp=False),
        lambda: GemmaSize(8.0, 1, 4, 2, 1, 4),
        lambda: GemmaSize(0, 1, 4, 2, 1, 4),
        lambda: VisionSize(8, 1, 4, 2, 14.0),
        lambda: Pi0FASTConfig(max_decoding_steps=0),
    ],
)
def test_values_that_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()
