"""Compiled layers compute what plain ones do."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from piston.training.loop import train_loop

from .running import losses, state, tiny
from .tiny_presets import GEMMA, PI0


@pytest.mark.slow
def test_compiled_training_equals_plain(tmp_path):
    # One layer of each kind: compiling is what takes long.
    one = dataclasses.replace(GEMMA, depth=1)
    model = dataclasses.replace(PI0, vlm=one, action_expert=one)
    plain = train_loop(tiny(tmp_path, exp_name="plain", model=model, num_train_steps=2))
    try:
        compiled = train_loop(
            tiny(tmp_path, exp_name="compiled", model=model, compile=True, num_train_steps=2)
        )
    finally:
        torch.compiler.reset()
    assert losses(compiled.parent) == pytest.approx(losses(plain.parent), rel=1e-3)
    ours, theirs = state(compiled), state(plain)
    assert ours.keys() == theirs.keys()  # names stay as they are
    name = "model/action_expert.layers.0.mlp.up.weight"
    assert_close(ours[name], theirs[name], atol=1e-3, rtol=1e-2)
