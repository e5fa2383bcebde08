"""Guided denoising, step by step, against the published formulas written out a second time."""

import math

import pytest
import torch

from piston.inference.sampling import Guidance, guidance_weights, sample_guided
from piston.models.configs import Pi0Config
from piston.models.flow import Pi0
from piston.models.variants import GemmaSize, VisionSize
from piston.observation import Observation

HORIZON, DELAY, EXECUTE, BETA = 10, 3, 2, 5.0


@pytest.fixture(scope="module", params=[False, True], ids=["pi0", "pi05"])
def model(request):
    torch.manual_seed(0)
    size = GemmaSize(width=16, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
    config = Pi0Config(
        pi05=request.param,
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
    )
    model = Pi0(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def _observation() -> Observation:
    random = torch.Generator().manual_seed(1)
    return Observation(
        images={"base_0_rgb": torch.randint(0, 256, (1, 32, 32, 3), generator=random).byte()},
        image_masks={"base_0_rgb": torch.ones(1, dtype=torch.bool)},
        state=torch.randn(1, 4, generator=random),
        tokenized_prompt=torch.randint(3, 200, (1, 6), generator=random),
        tokenized_prompt_mask=torch.ones(1, 6, dtype=torch.bool),
    )


def _weight(i: int) -> float:
    if i < DELAY:
        return 1.0
    if i >= HORIZON - EXECUTE:
        return 0.0
    c = (HORIZON - EXECUTE - i) / (HORIZON - EXECUTE - DELAY + 1)
    return c * (math.e**c - 1) / (math.e - 1)


def _as_published(model, noise, previous, num_steps, jacobian):
    """From τ = 0 (noise) to 1 (actions), with the velocity in the direction of the data."""
    with torch.no_grad():
        cache = model.prefill(_observation())
    weights = torch.tensor([_weight(i) for i in range(HORIZON)])[None, :, None]
    x = noise
    for step in range(num_steps):
        tau = step / num_steps

        def clean(x, tau=tau):
            return x - (1 - tau) * model.velocity(x, torch.tensor([1 - tau]), cache)

        error = weights * (previous - clean(x).detach())
        correction = torch.autograd.functional.vjp(clean, x, error)[1]
        if jacobian == "identity":
            correction = error
        gain = BETA
        if tau > 0:
            r_squared = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
            gain = min(BETA, (1 - tau) / (tau * r_squared))
        to_data = -model.velocity(x, torch.tensor([1 - tau]), cache).detach()
        x = x + (to_data + gain * correction) / num_steps
    return x


@pytest.mark.parametrize("jacobian", ["full", "identity"])
def test_guided_denoising_is_the_published_one(model, jacobian):
    random = torch.Generator().manual_seed(2)
    noise, previous = torch.randn(2, 1, HORIZON, 4, generator=random)
    weights = guidance_weights(HORIZON, DELAY, EXECUTE)[None]
    guidance = Guidance(previous, weights, jacobian)
    found = sample_guided(model, _observation(), noise, 6, guidance)
    expected = _as_published(model, noise, previous, 6, jacobian)
    assert torch.allclose(found, expected, atol=1e-5)
