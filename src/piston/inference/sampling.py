"""Real-time chunking: a chunk that continues the actions the robot is already committed to.

While a chunk executes, the next is computed. The first `delay` steps of the new chunk will have
passed when it arrives, so they must equal what the old chunk says; the steps after them should
change gradually. Denoising is guided towards the old chunk Y with weights that fall from 1 to 0:

    weight 1 ────────┐
                      ╲__                          step   0 … delay      committed
           0             ╲_____________                   delay … H − s  soft
             delay      H − s        H                    H − s … H      free

Knows the flow model's velocity; knows nothing of robots or servers.

Dims: b batch, h horizon, a action dim.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from piston.models.flow import Pi0
from piston.observation import Actions, Observation

Jacobian = Literal["full", "identity"]


@dataclasses.dataclass(frozen=True)
class Guidance:
    """What a new chunk is to continue, in the model's space."""

    # The old chunk from now on; what lies beyond its end has weight zero.
    previous: Float[Tensor, "b h a"]
    weights: Float[Tensor, "b h"]
    # `full` goes through the network; `identity` leaves it out: cheaper, less exact.
    jacobian: Jacobian = "full"
    # No correction is larger than this times the error.
    max_weight: float = 5.0


def guidance_weights(horizon: int, delay: int, execute_horizon: int) -> Float[Tensor, " h"]:
    """1 for committed steps, 0 for the last `execute_horizon`, falling in between."""
    if not 0 <= delay <= horizon - execute_horizon or execute_horizon < 1:
        raise ValueError(
            f"Real-time chunking needs 0 ≤ delay ≤ horizon − execute_horizon: the delay is {delay} "
            f"steps, a chunk has {horizon} and is replaced every {execute_horizon}. Ask sooner, "
            "execute fewer steps per chunk, or make inference faster."
        )
    end = horizon - execute_horizon
    weights = torch.zeros(horizon)
    weights[:delay] = 1.0
    steps = torch.arange(delay, end)
    fraction = (end - steps) / (end - delay + 1)
    weights[delay:end] = fraction * torch.expm1(fraction) / (math.e - 1)
    return weights


def sample_guided(
    model: Pi0,
    observation: Observation,
    noise: Float[Tensor, "b h a"],
    num_steps: int,
    guidance: Guidance,
) -> Actions:
    """Euler steps from noise to actions, each corrected towards the previous chunk."""
    with torch.no_grad():
        cache = model.prefill(observation)
        condition = model.condition(1 - torch.arange(num_steps, device=noise.device) / num_steps)
    weights = guidance.weights[..., None]
    actions = noise.float()
    for step in range(num_steps):
        time = 1 - step / num_steps
        through_network = guidance.jacobian == "full"
        start = actions.detach().requires_grad_(through_network)
        with torch.set_grad_enabled(through_network):
            velocity = model.velocity(start, condition.at(step), cache)
            clean = start - time * velocity
        error = weights * (guidance.previous - clean.detach())
        correction = torch.autograd.grad(clean, start, error)[0] if through_network else error
        strength = _strength(time, guidance.max_weight)
        actions = start.detach() - (velocity.detach() - strength * correction) / num_steps
    return actions


def _strength(time: float, max_weight: float) -> float:
    """(1 − τ) / (τ · r²) with τ = 1 − time, bounded; at the first step τ is 0."""
    progress = 1 - time
    if progress == 0:
        return max_weight
    spread = time**2 / (progress**2 + time**2)
    return min(max_weight, time / (progress * spread))
