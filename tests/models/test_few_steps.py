"""Committed actions and shortcuts: losses, gradients and samples equal the plain computation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from piston.models.configs import Pi0Config
from piston.models.integrator import Committed, Guidance
from piston.models.model import ActOptions

from . import plain, tiny

FAMILIES = pytest.mark.parametrize("pi05", [False, True], ids=["pi0", "pi05"])
ALL = [True] * 3
MAX_DELAY = 3


def observe(model):
    return tiny.observe(model, [ALL, [False, True, False], ALL], [2, 7, 4])


def plain_velocity(model, observation, noisy, time, delay, target=None):
    """Time per action, written out: 0 for the first `delay` of a row."""
    is_clean = torch.arange(model.config.action_horizon) < delay[:, None]
    each = torch.where(is_clean, 0.0, time[:, None])
    goal = None if target is None else torch.where(is_clean, 0.0, target[:, None])
    return plain.velocity(model, observation, noisy, each, goal), is_clean[..., None]


@FAMILIES
def test_losses_with_delays_equal_the_plain_computation(pi05):
    """Each draw has its own delay; the steps before it are clean and out of the loss."""
    model = tiny.flow(pi05=pi05, max_delay=MAX_DELAY)
    observation, actions, noise = observe(model), tiny.chunk(model, 3), tiny.chunk(model, 3, 2)
    time, delay = torch.rand(3, 2), torch.tensor([[0, 3], [1, 2], [3, 0]])
    draws = {"noise": noise, "time": time, "delay": delay}
    found = model.training_losses(observation, actions, draws)["velocity"]
    expected = []
    for draw in range(2):
        t = time[:, draw, None, None]
        noisy = t * noise[:, draw] + (1 - t) * actions
        is_clean = (torch.arange(4) < delay[:, draw, None])[..., None]
        noisy = torch.where(is_clean, actions, noisy)
        velocity, _ = plain_velocity(model, observation, noisy, time[:, draw], delay[:, draw])
        error = (velocity - (noise[:, draw] - actions)).square()
        # 4 actions, of which 1.5 are clean on average.
        expected.append(torch.where(is_clean, 0.0, error) * 4 / 2.5)
    expected = torch.stack(expected).mean(0)
    assert_close(found, expected, atol=2e-5, rtol=2e-5)
    names = [name for name, _ in model.named_parameters() if name not in model.unused_parameters()]
    parameters = [dict(model.named_parameters())[name] for name in names]
    ours = torch.autograd.grad(found.sum(), parameters)
    theirs = torch.autograd.grad(expected.sum(), parameters)
    for name, one, other in zip(names, ours, theirs):
        assert_close(one, other, atol=1e-4, rtol=1e-3, msg=name)


def test_delays_are_drawn_uniformly_and_only_if_asked_for():
    delay = tiny.flow(max_delay=MAX_DELAY).draw(4000, 2, torch.Generator().manual_seed(0))["delay"]
    share = delay.flatten().bincount() / delay.numel()
    assert share.shape == (MAX_DELAY + 1,)
    assert_close(share, torch.full((4,), 0.25), atol=0.02, rtol=0)
    # Without the option the random numbers are what they were.
    plain_draws = tiny.flow().draw(5, 2, torch.Generator().manual_seed(3))
    assert plain_draws.keys() == {"noise", "time"}
    with_delay = tiny.flow(max_delay=1).draw(5, 2, torch.Generator().manual_seed(3))
    assert torch.equal(plain_draws["time"], with_delay["time"])


def test_the_loss_does_not_grow_or_shrink_with_delays_on_average():
    """With an error of 1 everywhere, the mean over many draws is 1."""
    model = tiny.flow(max_delay=MAX_DELAY)
    delay = model.draw(4000, 1, torch.Generator().manual_seed(0))["delay"]
    clean = Committed(torch.zeros(4000, 4, 5), torch.arange(4) < delay)
    error = model._squared_error(torch.ones(4000, 4, 5), torch.zeros(4000, 4, 5), clean)
    assert error.mean().item() == pytest.approx(1, abs=0.02)


@FAMILIES
@pytest.mark.parametrize("num_steps", [1, 3])
def test_sampling_with_committed_actions_equals_the_plain_computation(pi05, num_steps):
    model = tiny.flow(pi05=pi05, max_delay=MAX_DELAY)
    observation, noise, previous = (
        observe(model),
        tiny.chunk(model, 3),
        tiny.chunk(model, 3, seed=9),
    )
    delay = torch.tensor([0, 2, 3])
    is_clean = torch.arange(4) < delay[:, None]
    committed = Committed(previous, is_clean)
    found = model.act(observation, noise, num_steps=num_steps, committed=committed)
    x = torch.where(is_clean[..., None], previous, noise)
    with torch.no_grad():
        for step in range(num_steps):
            time = torch.full((3,), 1 - step / num_steps)
            velocity, _ = plain_velocity(model, observation, x, time, delay)
            x = torch.where(is_clean[..., None], previous, x - velocity / num_steps)
    assert_close(found, x, atol=2e-5, rtol=2e-5)
    assert torch.equal(found[1, :2], previous[1, :2])
    assert torch.equal(found[2, :3], previous[2, :3])


@FAMILIES
def test_a_row_without_committed_actions_is_plain_beside_others(pi05):
    model = tiny.flow(pi05=pi05, max_delay=MAX_DELAY)
    observation, noise = observe(model), tiny.chunk(model, 3)
    committed = Committed(
        tiny.chunk(model, 3, seed=9), torch.arange(4) < torch.tensor([[0], [2], [3]])
    )
    together = model.act(observation, noise, committed=committed)
    alone = model.act(observation, noise)
    assert_close(together[0], alone[0], atol=1e-6, rtol=1e-6)
    assert (together[1:] - alone[1:]).abs().max() > 0.01
    candidates = model.act(observation, torch.stack((noise, -noise), 1), committed=committed)
    assert_close(candidates[:, 0], together, atol=1e-5, rtol=1e-5)


def test_committed_actions_need_a_model_that_was_trained_for_them():
    model = tiny.flow()
    committed = Committed(tiny.chunk(model, 3), torch.zeros(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"without --max-delay.*Use guidance"):
        model.act(observe(model), tiny.chunk(model, 3), committed=committed)


@pytest.mark.parametrize("delay", [-1, 4])
def test_a_delay_has_to_leave_an_action_free(delay):
    with pytest.raises(ValueError, match=f"--max-delay is {delay}; expected 0 to 3"):
        dataclasses.replace(tiny.flow().config, max_delay=delay)


@FAMILIES
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("with_delay", [False, True])
def test_shortcuts_equal_the_plain_computation(pi05, num_steps, with_delay):
    """The first half of the draws is ordinary, the second for shortcuts: ten steps in a chunk."""
    changes = {"max_delay": MAX_DELAY} if with_delay else {}
    model = tiny.flow(pi05=pi05, distilled_steps=num_steps, **changes)
    observation, actions, noise = observe(model), tiny.chunk(model, 3), tiny.chunk(model, 3, 2)
    time = torch.tensor([[0.1, 0.2], [0.9, 0.8], [0.4, 0.5001]])
    delay = torch.tensor([[0, 3], [1, 2], [3, 0]])
    draws = {"noise": noise, "time": time} | ({"delay": delay} if with_delay else {})
    losses = model.training_losses(observation, actions, draws)
    first = {name: values[:, :1] for name, values in draws.items()}
    cache = model.prefill(observation)
    assert_close(losses["velocity"], model.velocity_error(cache, actions, **first)[:, 0])

    late = delay[:, 1] if with_delay else torch.zeros(3, dtype=torch.long)
    start = torch.ones(3) if num_steps == 1 else torch.tensor([0.5, 1.0, 1.0])
    size, t = 1 / num_steps, start[:, None, None]
    is_clean = (torch.arange(4) < late[:, None])[..., None]
    noisy = torch.where(is_clean, actions, t * noise[:, 1] + (1 - t) * actions)
    x = noisy
    with torch.no_grad():
        for step in range(10 // num_steps):
            velocity, _ = plain_velocity(model, observation, x, start - step / 10, late)
            x = torch.where(is_clean, actions, x - velocity / 10)
    # Clean actions have no target time.
    predicted, _ = plain_velocity(model, observation, noisy, start, late, start - size)
    error = torch.where(is_clean, 0.0, (predicted - (noisy - x) / size).square())
    assert_close(losses["shortcut"], error * (4 / 2.5 if with_delay else 1), atol=2e-5, rtol=2e-5)
    target = model.suffix.time.target.weight
    (gradient,) = torch.autograd.grad(losses["shortcut"].sum(), target)
    assert gradient.abs().max() > 0


@FAMILIES
def test_a_distilled_model_takes_its_steps_at_once_and_others_as_before(pi05):
    model = tiny.flow(pi05=pi05, distilled_steps=1)
    observation, noise = observe(model), tiny.chunk(model, 3)
    with torch.no_grad():
        one, zero = torch.ones(3), torch.zeros(3)
        jump = noise - plain.velocity(model, observation, noise, one, zero)
        expected = plain.sample(model, observation, noise, 10)
    assert_close(model.act(observation, noise), jump, atol=2e-5, rtol=2e-5)
    assert_close(model.act(observation, noise, num_steps=10), expected, atol=2e-5, rtol=2e-5)
    with torch.no_grad():
        assert model.act_with(observation, ActOptions(noise)).path.shape == (2, 3, 4, 5)


@FAMILIES
def test_what_is_new_in_a_distilled_model_starts_as_zero(pi05):
    config = dataclasses.replace(tiny.flow(pi05=pi05).config, distilled_steps=1)
    assert isinstance(config, Pi0Config)
    model = type(tiny.flow())(config)
    assert not model.suffix.time.target.weight.any()
    times = torch.tensor([1.0, 0.5])
    ordinary, shortcut = model.condition(times), model.condition(times, times - 0.5)
    assert torch.equal(ordinary.vector, shortcut.vector)
    # And stays without effect where the target is the time itself.
    tiny.randomized(model)
    assert_close(model.condition(times, times).vector, model.condition(times).vector)
    assert (model.condition(times, times - 0.5).vector - model.condition(times).vector).any()


def test_target_times_need_a_distilled_model():
    with pytest.raises(ValueError, match="piston distill"):
        tiny.flow().condition(torch.ones(1), torch.zeros(1))


def test_guidance_still_works_for_a_model_trained_with_delays():
    model = tiny.flow(max_delay=MAX_DELAY)
    observation, noise = observe(model), tiny.chunk(model, 3)
    guidance = Guidance(tiny.chunk(model, 3, seed=9), torch.zeros(3, 4))
    assert_close(model.act(observation, noise, guidance=guidance), model.act(observation, noise))
