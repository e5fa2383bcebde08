"""Adapters: what they compute, what merging gives, what freezing reaches."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from piston.models.configs import LoRA, size_name
from piston.models.flow import Pi0
from piston.models.lora import (
    LoRALinear,
    freeze,
    matching_parameters,
    merge_adapters,
    without_adapters,
)

from . import tiny

ALL = [True] * 3


@given(
    groups=st.integers(1, 4), out=st.integers(1, 5), width=st.integers(1, 6), rank=st.integers(1, 3)
)
def test_each_group_has_its_own_pair(groups, out, width, rank):
    linear = tiny.randomized(LoRALinear(width, groups * out, LoRA(rank, 3.0), groups))
    x = torch.randn(2, width)
    expected = [
        linear.weight.view(groups, out, width)[g] @ x.T
        + 3.0 / rank * linear.lora_b[g] @ (linear.lora_a[g] @ x.T)
        for g in range(groups)
    ]
    assert_close(linear(x), torch.cat(expected).T, atol=1e-5, rtol=1e-4)


def adapted(pi05=False, **kinds) -> Pi0:
    vlm, expert = LoRA(2, 3.0, **kinds), LoRA(3, 3.0, **kinds)
    return tiny.flow(pi05=pi05, vlm=tiny.gemma(lora=vlm), action_expert=tiny.gemma(14, lora=expert))


def names_of_adapters(model: Pi0) -> set[str]:
    return {name for name in model.state_dict() if name.endswith((".lora_a", ".lora_b"))}


@pytest.mark.parametrize("pi05", [False, True])
def test_merging_gives_the_same_actions_in_a_plain_model(pi05):
    model = adapted(pi05)
    observation, noise = tiny.observe(model, [ALL], [4]), tiny.chunk(model, 1)
    expected = model.act(observation, noise)
    merge_adapters(model)
    assert not names_of_adapters(model)
    assert_close(model.act(observation, noise), expected, atol=2e-5, rtol=2e-5)
    plain = Pi0(without_adapters(model.config))
    plain.load_state_dict(model.state_dict())
    assert_close(plain.act(observation, noise), expected, atol=2e-5, rtol=2e-5)


def test_a_new_adapter_changes_nothing():
    base = tiny.flow()
    model = Pi0(adapted().config)
    missing = model.load_state_dict(base.state_dict(), strict=False).missing_keys
    assert all(".lora_" in name for name in missing)
    observation, noise = tiny.observe(model, [ALL], [4]), tiny.chunk(model, 1)
    expected = base.act(observation, noise)
    assert_close(model.act(observation, noise), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_adapters_per_kind_of_layer(kind):
    other = {"attention": "mlp", "mlp": "attention"}[kind]
    names = names_of_adapters(adapted(**{other: False}))
    assert names
    assert all(f".{kind}." in name for name in names)


def test_kinds_of_layers_are_in_the_text_form():
    for lora, text in (
        (LoRA(2, 4.0, mlp=False), "lora_rank=2,lora_alpha=4.0,lora_mlp=0"),
        (LoRA(2, 4.0, attention=False), "lora_rank=2,lora_alpha=4.0,lora_attention=0"),
        (LoRA(2, 4.0), "lora_rank=2,lora_alpha=4.0"),
    ):
        assert size_name(tiny.gemma(lora=lora)).endswith(f",{text}")


def test_training_adapters_alone_leaves_the_base_unchanged():
    model = adapted()
    frozen = freeze(model, ("vlm.*", "action_expert.*", "!*.lora_?"))
    assert "vlm.layers.0.attention.query.weight" in frozen
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    observation, actions = tiny.observe(model, [ALL], [4]), tiny.chunk(model, 1)
    noise, time = tiny.chunk(model, 1, seed=9), torch.tensor([0.5])
    tiny.loss(model, observation, actions, noise, time).sum().backward()
    optimizer.step()
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert not changed & set(frozen)
    adapters = names_of_adapters(model) - set(model.unused_parameters())
    assert adapters <= changed


def test_patterns():
    names = ["vlm.a.weight", "vlm.a.lora_a", "action_expert.b", "suffix.state.bias"]
    assert matching_parameters(names, ()) == []
    assert matching_parameters(names, ("vlm.*",)) == names[:2]
    assert matching_parameters(names, ("!*lora*", "vlm.*")) == names[:1]
    assert matching_parameters(names, ("*", "!vlm.*", "!suffix.*")) == ["action_expert.b"]
    with pytest.raises(ValueError, match=r"'vml\.\*' matches no parameter.*vlm\.a\.weight"):
        matching_parameters(names, ("vml.*",))
