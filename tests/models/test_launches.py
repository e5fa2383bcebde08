"""Matrices joined for inference: the same actions from fewer operations."""

import importlib
from pathlib import Path

import pytest
import torch
from tests.models import tiny
from torch.testing import assert_close

from piston.inference.packing import join_for_inference, prepare_for_inference
from piston.models.configs import LoRA
from piston.models.integrator import Guidance
from piston.models.model import ActOptions
from piston.models.precision import cast_for_inference

FAMILIES = pytest.mark.parametrize("pi05", [False, True], ids=["pi0", "pi05"])
LAYOUT = ([[True, True, False], [True, False, True]], [5, 2])


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("launches")


@FAMILIES
def test_operations_of_a_model_of_full_depth(launches, pi05):
    model = launches.deep_model(pi05=pi05)
    join_for_inference(model)
    observation = launches.make_observation(model.config, 2, 16, 1)
    counts = launches.count_launches(model, observation)
    depth = model.config.action_expert.depth
    assert counts.step <= (31 if pi05 else 30) * depth
    assert counts.rest <= (1000 if pi05 else 850)
    assert counts.chunk <= (6_550 if pi05 else 6_200)


@FAMILIES
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_joined_matrices_compute_the_same(pi05, num_kv_heads):
    sizes = {"num_kv_heads": num_kv_heads}
    model = tiny.flow(pi05=pi05, vlm=tiny.gemma(**sizes), action_expert=tiny.gemma(14, **sizes))
    observation, noise = tiny.observe(model, *LAYOUT), tiny.chunk(model, 2)
    guidance = Guidance(tiny.chunk(model, 2, seed=5), torch.full((2, 4), 0.5))
    options = [ActOptions(noise), ActOptions(noise, guidance=guidance)]
    with torch.no_grad():
        before = [model.act_with(observation, one).actions for one in options]
        names = [name for name, _ in model.named_parameters()]
        join_for_inference(model)
        after = [model.act_with(observation, one).actions for one in options]
    assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert any("attention.query" in name for name in names)
    assert not any("attention.query" in name for name, _ in model.named_parameters())


def test_a_language_model_writes_the_same_tokens():
    model = tiny.fast()
    observation = tiny.observe(model, [[True, False], [True, True]], [4, 9])
    before = model.act(observation)
    join_for_inference(model)
    assert torch.equal(model.act(observation), before)


def test_adapted_matrices_stay_apart():
    lora = LoRA(rank=2, alpha=2.0, mlp=False)
    model = tiny.flow(vlm=tiny.gemma(lora=lora))
    observation, noise = tiny.observe(model, *LAYOUT), tiny.chunk(model, 2)
    before = model.act(observation, noise)
    join_for_inference(model)
    assert model.vlm.layers[0].attention.joined is None
    assert model.vlm.layers[0].mlp.joined is not None
    assert model.action_expert.layers[0].attention.joined is not None
    assert_close(model.act(observation, noise), before, atol=1e-5, rtol=1e-5)


@FAMILIES
def test_prepared_in_bfloat16(pi05):
    model = tiny.flow(pi05=pi05, dtype="bfloat16")
    cast_for_inference(model, torch.bfloat16)
    observation, noise = tiny.observe(model, *LAYOUT), tiny.chunk(model, 2)
    before = model.act(observation, noise)
    prepare_for_inference(model)
    assert_close(model.act(observation, noise), before, atol=0.03, rtol=0.03)
