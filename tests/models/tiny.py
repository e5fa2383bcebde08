"""Tiny models and observations of every shape that tests ask for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from piston.models.autoregressive import Pi0FAST
from piston.models.configs import GemmaSize, Pi0Config, Pi0FASTConfig, VisionSize
from piston.models.flow import Pi0
from piston.observation import Observation

VISION = VisionSize(width=24, depth=2, mlp_dim=40, num_heads=3, patch=8)
IMAGE_SIZE = 16  # 4 tokens per camera


def gemma(width: int = 20, **changes) -> GemmaSize:
    numbers = {"depth": 2, "mlp_dim": 28, "num_heads": 4, "num_kv_heads": 1, "head_dim": 6}
    return GemmaSize(width=width, **(numbers | changes))


def flow(
    *, pi05: bool = False, num_cameras: int = 3, vlm: GemmaSize | None = None, **changes
) -> Pi0:
    settings = {
        "action_dim": 5,
        "action_horizon": 4,
        "max_token_len": 7,
        "dtype": "float32",
        "vision": VISION,
        "vlm": vlm or gemma(),
        "action_expert": gemma(14),
        "vocab_size": 50,
        "image_size": IMAGE_SIZE,
        "cameras": tuple(f"camera_{i}" for i in range(num_cameras)),
    }
    return randomized(Pi0(Pi0Config(**(settings | changes), pi05=pi05)))


def fast(**changes) -> Pi0FAST:
    settings = {
        "action_dim": 5,
        "max_token_len": 9,
        "dtype": "float32",
        "vision": VISION,
        "vlm": gemma(),
        "vocab_size": 50,
        "image_size": IMAGE_SIZE,
        "cameras": ("camera_0", "camera_1"),
    }
    return randomized(Pi0FAST(Pi0FASTConfig(**(settings | changes))))


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """No parameter keeps a value (zero, one) that would hide its absence."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(
                0.3 * noise * (parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 1)
            )
    return model


def observe(
    model: Pi0 | Pi0FAST,
    present: Sequence[Sequence[bool]],
    prompt_lengths: Sequence[int],
    seed: int = 1,
) -> Observation:
    """One row per sample: which cameras it has and how long its prompt is."""
    config, batch = model.config, len(present)
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    shape = (batch, config.image_size, config.image_size, 3)
    length = config.prompt_length
    return Observation(
        images={camera: integers(256, *shape).byte() for camera in config.cameras},
        image_masks={
            camera: torch.tensor([row[i] for row in present])
            for i, camera in enumerate(config.cameras)
        },
        state=torch.randn(batch, config.action_dim, generator=generator),
        tokenized_prompt=integers(config.vocab_size, batch, length),
        tokenized_prompt_mask=torch.arange(length) < torch.tensor(prompt_lengths)[:, None],
    )


def chunk(model: Pi0, batch: int, *draws: int, seed: int = 2) -> torch.Tensor:
    shape = (batch, *draws, model.config.action_horizon, model.config.action_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss(
    model: Pi0, observation: Observation, actions: Tensor, noise: Tensor, time: Tensor
) -> Tensor:
    """The mean squared error per sample (and draw, if time has that axis) and step."""
    if time.ndim == 1:
        error = model.velocity_error(
            model.prefill(observation), actions, noise[:, None], time[:, None]
        )[:, 0]
    else:
        error = model.velocity_error(model.prefill(observation), actions, noise, time)
    return error.mean(-1)
