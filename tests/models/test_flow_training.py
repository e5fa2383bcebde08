"""π0 and π0.5 in training: losses and gradients equal the plain computation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from piston.models.flow import Pi0, sample_time

from . import plain, tiny

FAMILIES = pytest.mark.parametrize("pi05", [False, True], ids=["pi0", "pi05"])
ALL = [True] * 3


def close(actual, expected):
    assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@FAMILIES
def test_loss_and_gradients_equal_the_plain_computation(pi05):
    model = tiny.flow(pi05=pi05)
    observation = tiny.observe(model, [ALL, [False, True, False]], [2, 7])
    actions, noise = tiny.chunk(model, 2), tiny.chunk(model, 2, seed=3)
    time = torch.tensor([0.3, 0.8])
    loss = tiny.loss(model, observation, actions, noise, time)
    found = gradients(model, loss)

    t = time[:, None, None]
    velocity = plain.velocity(model, observation, t * noise + (1 - t) * actions, time)
    expected = (velocity - (noise - actions)).square().mean(-1)
    close(loss, expected)
    assert loss.shape == (2, model.config.action_horizon)
    for name, gradient in gradients(model, expected).items():
        if name in model.unused_parameters():
            assert found[name] is None
            assert gradient is None or not gradient.any(), name
        else:
            assert_close(found[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


@FAMILIES
@pytest.mark.parametrize("frozen", [(), ("vision", "vlm")], ids=["all train", "expert trains"])
def test_gradient_checkpointing_changes_nothing(pi05, frozen):
    model = tiny.flow(pi05=pi05)
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    observation = tiny.observe(model, [ALL, [False, True, False]], [2, 7])
    arguments = (tiny.chunk(model, 2), tiny.chunk(model, 2, 3), torch.rand(2, 3))
    plainly = gradients(model, tiny.loss(model, observation, *arguments))
    model.set_gradient_checkpointing(True)
    again = gradients(model, tiny.loss(model, observation, *arguments))
    for name, gradient in plainly.items():
        if gradient is not None:
            assert_close(again[name], gradient, msg=name)


@FAMILIES
def test_draws_share_a_prefix_and_equal_separate_losses(pi05, monkeypatch):
    model = tiny.flow(pi05=pi05)
    observation = tiny.observe(model, [ALL, [False, True, False]], [2, 7])
    actions, noise, time = tiny.chunk(model, 2), tiny.chunk(model, 2, 3, seed=5), torch.rand(2, 3)
    separate = [tiny.loss(model, observation, actions, noise[:, i], time[:, i]) for i in range(3)]
    expected = torch.stack(separate, 1)
    expected_gradients = gradients(model, expected)
    calls = []
    tower = model.vision.forward
    monkeypatch.setattr(model.vision, "forward", lambda *a: calls.append(1) or tower(*a))
    together = tiny.loss(model, observation, actions, noise, time)
    assert len(calls) == 1
    close(together, expected)
    for name, gradient in gradients(model, together).items():
        if gradient is not None:
            assert_close(gradient, expected_gradients[name], atol=1e-5, rtol=1e-3, msg=name)
    error = model.velocity_error(model.prefill(observation), actions, noise, time)
    assert error.shape == noise.shape
    close(error.mean(-1), together)
    with torch.no_grad():
        close(tiny.loss(model, observation, actions, noise, time), expected)


def test_shapes_of_drawn_losses():
    model = tiny.flow()
    observation = tiny.observe(model, [ALL, ALL], [2, 2])
    actions = tiny.chunk(model, 2)

    def losses(num_draws=1, **changes):
        draws = model.draw(2, num_draws, seeded()) | changes
        return model.training_losses(observation, actions, draws)["velocity"]

    for num_draws in (1, 3):
        draws = model.draw(2, num_draws, seeded())
        error = model.velocity_error(
            model.prefill(observation), actions, draws["noise"], draws["time"]
        )
        assert error.shape == (2, num_draws, 4, 5)
        assert torch.equal(losses(num_draws), error.mean(1))
    assert torch.equal(losses(2), losses(2))
    with pytest.raises(ValueError, match=r"time has shape \(2, 2\), expected .*\(2, 3\)"):
        losses(3, time=torch.rand(2, 2))
    with pytest.raises(ValueError, match="noise has shape"):
        losses(noise=torch.zeros(2, 1, 4, 6))


def test_times_are_drawn_from_the_shifted_beta():
    time = sample_time((20_000,), seeded())
    assert time.min() >= 0.001
    assert time.max() <= 1
    assert time.mean().item() == pytest.approx(0.001 + 0.999 * 0.6, abs=0.005)
    beta = torch.distributions.Beta(1.5, 1.0)
    for quantile in (0.1, 0.5, 0.9):
        value = (time.quantile(quantile) - 0.001) / 0.999
        grid = torch.linspace(1e-4, 1 - 1e-4, 4000)
        cumulative = beta.log_prob(grid).exp().cumsum(0) / 4000
        assert cumulative[(grid - value).abs().argmin()].item() == pytest.approx(quantile, abs=0.02)


def test_bfloat16_training_has_float32_gradients_for_float32_masters():
    model = with_dtype(tiny.flow(), "bfloat16")
    observation = tiny.observe(model, [ALL, [True, False, False]], [2, 6])
    arguments = (tiny.chunk(model, 2), tiny.chunk(model, 2, seed=8), torch.tensor([0.3, 0.9]))
    low = gradients(model, tiny.loss(model, observation, *arguments))
    exact_model = with_dtype(model, "float32")
    exact = gradients(exact_model, tiny.loss(exact_model, observation, *arguments))
    for name, gradient in exact.items():
        # A bias of keys shifts all logits of a query alike: its gradient is nothing but rounding.
        if gradient is not None and not name.endswith("key.bias"):
            assert low[name].dtype == torch.float32
            assert (low[name] - gradient).norm() < 0.2 * gradient.norm() + 1e-3, name


def with_dtype(model, dtype):
    changed = Pi0(dataclasses.replace(model.config, dtype=dtype))
    changed.load_state_dict(model.state_dict())
    return changed


def gradients(model, loss):
    model.zero_grad()
    loss.sum().backward()
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)
