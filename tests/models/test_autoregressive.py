"""π0-FAST: loss and decoding equal the plain computation; rows end where they should."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from piston.models import language, precision
from piston.models.precision import cast_for_inference

from . import plain, tiny

LAYOUTS = {
    "alike": ([[True, True]] * 2, [8, 8], [5, 5]),
    "lengths differ": ([[True, True]] * 3, [9, 4, 6], [5, 2, 1]),
    "a masked camera counts in positions": ([[False, True], [True, True]], [7, 6], [4, 3]),
    "batch of one": ([[True, True]], [9], [1]),
}


def observe(model, present, lengths, prefix_lengths):
    """A prompt whose tokens after `prefix_lengths` are causal and to be learned."""
    observation = tiny.observe(model, present, lengths)
    index = torch.arange(model.config.prompt_length)
    causal = index >= torch.tensor(prefix_lengths)[:, None]
    valid = observation.tokenized_prompt_mask
    return dataclasses.replace(
        observation, token_ar_mask=causal.int(), token_loss_mask=causal & valid
    )


def loss_of(model, observation):
    return model.training_losses(observation, None, {})["tokens"]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_equal_the_plain_computation(layout, checkpointing):
    model = tiny.fast()
    observation = observe(model, *layout)
    model.set_gradient_checkpointing(checkpointing)
    loss = loss_of(model, observation)
    expected = plain.fast_loss(model, observation)
    assert_close(loss, expected, atol=2e-5, rtol=2e-5)
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss.sum(), parameters)
    for gradient, reference in zip(found, torch.autograd.grad(expected.sum(), parameters)):
        assert_close(gradient, reference, atol=1e-5, rtol=1e-3)


def test_loss_without_any_word_to_learn_is_zero():
    model = tiny.fast()
    observation = observe(model, [[True, True]] * 2, [6, 6], [6, 2])
    loss = loss_of(model, observation)
    assert loss[0] == 0
    assert loss[1] > 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_greedy_decoding_equals_recomputing_everything(layout):
    model = tiny.fast()
    observation = observe(model, *layout)
    found = model.act(observation, num_steps=6)
    assert torch.equal(found, plain.fast_greedy(model, observation, 6)[:, : found.shape[1]])


def test_decoding_without_a_block_mask_reads_the_prompt_as_one_block():
    model = tiny.fast()
    observation = observe(model, [[True, True]] * 2, [9, 4], [9, 9])
    without = dataclasses.replace(observation, token_ar_mask=None, token_loss_mask=None)
    expected = plain.fast_greedy(model, observation, 5)
    assert torch.equal(model.act(without, num_steps=5), expected)


def test_a_row_that_ended_goes_on_with_zeros_and_all_ended_stops(monkeypatch):
    model = tiny.fast()
    observation = tiny.observe(model, [[True, True]] * 2, [5, 5])
    script = iter(torch.tensor([[7, 9], [1, 9], [8, 3], [4, 1], [5, 5]]))

    def scripted(*_):
        return torch.nn.functional.one_hot(next(script), model.config.vocab_size).float()

    monkeypatch.setattr(language, "token_logits", scripted)
    tokens = model.act(observation, num_steps=5)
    assert tokens.tolist() == [[7, 1, 0, 0], [9, 9, 3, 1]]


def test_the_configured_number_of_steps_is_the_default():
    model = tiny.fast(max_decoding_steps=3)
    observation = tiny.observe(model, [[True, True]], [5])
    assert model.act(observation).shape[1] <= 3
    with pytest.raises(ValueError, match="num_steps"):
        model.act(observation, num_steps=0)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_bfloat16_logits_are_not_rounded_to_bfloat16(held, monkeypatch):
    model = tiny.fast(dtype="bfloat16")
    cast_for_inference(model, held)
    monkeypatch.setattr(precision, "_MAX_CONVERTED_NUMBERS", 7 * 20)  # several pieces, one uneven
    output = torch.randn(3, model.config.vlm.width).bfloat16()
    found = language.token_logits(model.vlm, output)
    assert found.dtype == torch.float32
    exact = output.double() @ model.vlm.embedding.weight.double().T
    assert_close(found.double(), exact, atol=1e-6, rtol=1e-5)  # bfloat16 would be off by 2⁻⁹


def test_bfloat16_stays_close_and_decodes():
    model, exact = tiny.fast(dtype="bfloat16"), tiny.fast()
    exact.load_state_dict(model.state_dict())
    observation = observe(model, *LAYOUTS["lengths differ"])
    loss = loss_of(model, observation)
    assert loss.dtype == torch.float32
    assert_close(loss, loss_of(exact, observation), atol=0.05, rtol=0.05)
    loss.sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    cast_for_inference(model, torch.bfloat16)
    assert model.vlm.embedding.weight.dtype == torch.bfloat16
    tokens = model.act(observation, num_steps=4)
    assert tokens.shape[0] == 3
    with torch.no_grad():
        assert_close(loss_of(model, observation), loss_of(exact, observation), atol=0.05, rtol=0.05)


def test_loss_says_what_it_lacks():
    model = tiny.fast()
    with pytest.raises(ValueError, match="token_loss_mask"):
        loss_of(model, tiny.observe(model, [[True, True]], [5]))
