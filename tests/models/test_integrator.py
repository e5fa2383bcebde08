"""Guided denoising: the published formulas, plain sampling when nothing is committed."""

import math

import pytest
import torch

from piston.models.configs import GemmaSize, Pi0Config, VisionSize
from piston.models.flow import Pi0
from piston.models.integrator import Guidance, guidance_weights
from piston.observation import Observation

HORIZON, DELAY, EXECUTE, BETA = 12, 3, 2, 5.0


@pytest.fixture(scope="module", params=[False, True], ids=["pi0", "pi05"])
def model(request):
    torch.manual_seed(0)
    size = GemmaSize(width=16, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
    config = Pi0Config(
        action_dim=4,
        action_horizon=HORIZON,
        max_token_len=6,
        dtype="float32",
        vision=VisionSize(width=16, depth=1, mlp_dim=16, num_heads=2, patch=16),
        vlm=size,
        action_expert=size,
        vocab_size=300,
        image_size=32,
        cameras=("base_0_rgb",),
        tokenizer="bytes",
        pi05=request.param,
    )
    model = Pi0(config).eval()
    # Norms of π0.5 start at zero, which would make the network ignore time.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def observation():
    random = torch.Generator().manual_seed(1)
    return Observation(
        images={"base_0_rgb": torch.randint(0, 256, (2, 32, 32, 3), generator=random).byte()},
        image_masks={"base_0_rgb": torch.ones(2, dtype=torch.bool)},
        state=torch.randn(2, 4, generator=random),
        tokenized_prompt=torch.randint(3, 200, (2, 6), generator=random),
        tokenized_prompt_mask=torch.ones(2, 6, dtype=torch.bool),
    )


def _noise():
    return torch.randn(2, HORIZON, 4, generator=torch.Generator().manual_seed(2))


def test_weights_follow_the_published_formula():
    weights = guidance_weights(horizon=10, delay=2, execute_horizon=3)
    assert weights[:2].tolist() == [1, 1]
    assert weights[7:].tolist() == [0, 0, 0]
    for step in range(2, 7):
        c = (10 - 3 - step) / (10 - 3 - 2 + 1)
        assert weights[step].item() == pytest.approx(c * (math.e**c - 1) / (math.e - 1), abs=1e-6)


@pytest.mark.parametrize(("delay", "execute"), [(8, 3), (-1, 3), (0, 0)])
def test_a_delay_that_does_not_fit_is_refused(delay, execute):
    with pytest.raises(ValueError, match="Ask sooner"):
        guidance_weights(horizon=10, delay=delay, execute_horizon=execute)


@pytest.mark.parametrize("jacobian", ["full", "identity"])
def test_nothing_committed_equals_plain_sampling(model, observation, jacobian):
    guidance = Guidance(torch.randn(2, HORIZON, 4), torch.zeros(2, HORIZON), jacobian)
    guided = model.act(observation, _noise(), num_steps=5, guidance=guidance)
    plain = model.act(observation, _noise(), num_steps=5)
    assert torch.equal(guided, plain) or torch.allclose(guided, plain, atol=1e-6)


@pytest.mark.parametrize("jacobian", ["full", "identity"])
def test_committed_steps_come_out_near_the_previous_chunk(model, observation, jacobian):
    """The previous chunk is another sample of the same model, as on a robot."""
    previous = model.act(observation, -_noise(), num_steps=10)
    weights = guidance_weights(HORIZON, delay=4, execute_horizon=4).expand(2, -1)
    guidance = Guidance(previous, weights, jacobian)
    guided = model.act(observation, _noise(), num_steps=10, guidance=guidance)
    plain = model.act(observation, _noise(), num_steps=10)
    before = (plain - previous)[:, :4].abs().mean()
    after = (guided - previous)[:, :4].abs().mean()
    assert after < 0.35 * before


def test_the_full_jacobian_goes_through_the_network(model, observation):
    previous = model.act(observation, -_noise(), num_steps=10)
    weights = guidance_weights(HORIZON, delay=4, execute_horizon=4).expand(2, -1)
    results = [
        model.act(observation, _noise(), guidance=Guidance(previous, weights, jacobian))
        for jacobian in ("full", "identity")
    ]
    assert not torch.allclose(*results, atol=1e-4)
    assert not any(p.grad is not None for p in model.parameters())


def _weight(i: int) -> float:
    if i < DELAY:
        return 1.0
    if i >= HORIZON - EXECUTE:
        return 0.0
    c = (HORIZON - EXECUTE - i) / (HORIZON - EXECUTE - DELAY + 1)
    return c * (math.e**c - 1) / (math.e - 1)


def _as_published(model, observation, noise, previous, num_steps, jacobian):
    """From τ = 0 (noise) to 1 (actions), with the velocity in the direction of the data."""
    with torch.no_grad():
        cache = model.prefill(observation)
    weights = torch.tensor([_weight(i) for i in range(HORIZON)])[None, :, None]
    x = noise
    for step in range(num_steps):
        tau = step / num_steps

        def clean(x, tau=tau):
            return x - (1 - tau) * model.velocity(x, torch.full((2,), 1 - tau), cache)

        error = weights * (previous - clean(x).detach())
        correction = torch.autograd.functional.vjp(clean, x, error)[1]
        if jacobian == "identity":
            correction = error
        gain = BETA
        if tau > 0:
            r_squared = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
            gain = min(BETA, (1 - tau) / (tau * r_squared))
        to_data = -model.velocity(x, torch.full((2,), 1 - tau), cache).detach()
        x = x + (to_data + gain * correction) / num_steps
    return x


@pytest.mark.parametrize("jacobian", ["full", "identity"])
def test_guided_denoising_is_the_published_one(model, observation, jacobian):
    random = torch.Generator().manual_seed(2)
    noise, previous = torch.randn(2, 2, HORIZON, 4, generator=random)
    weights = guidance_weights(HORIZON, DELAY, EXECUTE).expand(2, -1)
    guidance = Guidance(previous, weights, jacobian)
    found = model.act(observation, noise, num_steps=6, guidance=guidance)
    expected = _as_published(model, observation, noise, previous, 6, jacobian)
    assert torch.allclose(found, expected, atol=1e-5)
