"""The models give the numbers that the public implementations gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from piston.models import masks

from . import tiny
from .cases import Case

FLOW = ("pi0", "pi05", "pi0_lora")


@pytest.fixture(scope="module", params=FLOW)
def case(request: pytest.FixtureRequest, reference: Path) -> Case:
    return Case.read(reference / "models" / request.param)


@pytest.fixture(scope="module")
def model(case: Case):
    return case.model()


def close(actual, expected, absolute=1e-4):
    assert_close(actual.detach(), expected, atol=absolute, rtol=0)


def test_velocity_and_the_outputs_before_it(case, model):
    observation, time = case.observation(), case.input("time")
    t = time[:, None, None]
    noisy = t * case.input("noise") + (1 - t) * case.input("actions")
    with torch.no_grad():
        cache = model.prefill(observation)
        close(model.suffix_output(noisy, time, cache), case.output("suffix_out"))
        close(model.velocity(noisy, time, cache), case.output("velocity"))


def test_sampled_actions(case, model):
    sampled = model.act(case.observation(), case.input("noise"), num_steps=case.facts["num_steps"])
    close(sampled, case.output("sampled_actions"))


def test_loss(case, model):
    loss = tiny.loss(
        model, case.observation(), case.input("actions"), case.input("noise"), case.input("time")
    )
    assert_close(loss.detach(), case.output("loss"), atol=0, rtol=1e-4)


def test_prefix_tokens_and_output_where_valid(case, model):
    prefix = model.embed_prefix(case.observation())
    valid = prefix.packing.valid
    tokens = prefix.packing.unpack(prefix.tokens)
    close(tokens[valid], case.output("prefix_tokens")[valid])
    close(model.prefix_output(case.observation())[valid], case.output("prefix_out")[valid])


def test_masks_and_positions_of_the_padded_sequence(case, model):
    packing = model.embed_prefix(case.observation()).packing
    starts = model.starts_block(torch.device("cpu"))
    batch, prefix_length = packing.valid.shape
    valid = torch.cat((packing.valid, torch.ones(batch, len(starts), dtype=torch.bool)), 1)
    starts = torch.cat((torch.zeros(prefix_length, dtype=torch.bool), starts))[None]
    assert torch.equal(masks.block_mask(valid, starts), case.output("attn_mask"))
    assert torch.equal(masks.positions(valid).int(), case.output("positions"))


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_gradients(name: str, reference: Path):
    case = Case.read(reference / "models" / name)
    facts = json.loads((case.folder / "training.json").read_text())
    model = case.model()
    arguments = (case.input("actions"), case.input("noise"), case.input("time"))
    loss = tiny.loss(model, case.observation(), *arguments).mean()
    loss.backward()
    assert loss.item() == pytest.approx(facts["losses_before_each_step"][0], rel=1e-4)
    norms = {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None}
    total = torch.stack(list(norms.values())).norm().item()
    assert total == pytest.approx(facts["grad_norms"][0], rel=1e-3)
    expected = facts["grad_l2"]
    for ours, theirs in {
        "vision.norm.bias": "PaliGemma/img/Transformer/encoder_norm/bias",
        "vision.patch_embedding.weight": "PaliGemma/img/embedding/kernel",
        "vlm.embedding.weight": "PaliGemma/llm/embedder/input_embedding",
        "suffix.action_in.weight": "action_in_proj/kernel",
    }.items():
        assert norms[ours].item() == pytest.approx(expected[theirs], rel=1e-3), ours
    stacked = [n for n in norms if n.startswith("vlm.layers") and "attention.query" in n]
    found = torch.stack([norms[n] for n in stacked]).norm().item()
    assert found == pytest.approx(expected["PaliGemma/llm/layers/attn/q_einsum/w"], rel=1e-3)
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert without == set(model.unused_parameters())


def test_fast_loss(reference: Path):
    case = Case.read(reference / "models" / "pi0_fast")
    loss = case.model().training_losses(case.observation(), None, {})["tokens"]
    assert_close(loss.detach(), case.output("loss"), atol=0, rtol=1e-4)


def test_fast_greedy_tokens(reference: Path):
    case = Case.read(reference / "models" / "pi0_fast")
    tokens = case.model().act(case.observation("decode_in"))
    assert torch.equal(tokens, case.output("greedy_tokens").long())
