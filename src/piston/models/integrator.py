"""The integrator: from noise to actions along a flow model's velocity.

Real-time chunking continues the actions that the robot is already committed to. While a chunk
executes, the next is computed. The first `delay` steps of the new chunk will have passed when it
arrives, so they must equal the old chunk, and the steps after them must follow on smoothly.

A model that was trained for it (`Committed`) reads the committed steps as they are, at time 0, and
denoises the others. Any other model is guided (`Guidance`): a correction towards the old chunk is
added to its velocity, with weights that fall from 1 to 0:

    weight 1 ────────┐
                      ╲__                          step   0 … delay      committed
           0             ╲_____________                   delay … H − s  soft
             delay      H − s        H                    H − s … H      free

Dims: b batch, h horizon, a action dim, k times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from piston.observation import Actions

Jacobian = Literal["full", "identity"]
# The velocity of noisy actions at the given step of the integrator.
Velocity = Callable[[Actions, int], Actions]


@dataclasses.dataclass(frozen=True)
class Committed:
    """The first steps of a chunk that are known already, in the model's space.

    For a model that was trained with `max_delay`.
    """

    # The old chunk from now on.
    previous: Float[Tensor, "b h a"]
    # The steps of it that are executed before the new chunk arrives.
    steps: Bool[Tensor, "b h"]

    def keep(self, actions: Actions) -> Actions:
        """Return the actions with the committed steps in place."""
        return torch.where(self.steps[..., None], self.previous, actions)

    def repeat(self, times: int) -> Committed:
        """Return the same for every sample repeated `times` in a row."""
        return Committed(
            self.previous.repeat_interleave(times, 0), self.steps.repeat_interleave(times, 0)
        )


@dataclasses.dataclass(frozen=True)
class Guidance:
    """The chunk that a new one continues, in the model's space."""

    # The old chunk from now on; steps beyond its end have weight zero.
    previous: Float[Tensor, "b h a"]
    weights: Float[Tensor, "b h"]
    # `full` differentiates through the network; `identity` leaves it out: cheaper, less exact.
    jacobian: Jacobian = "full"
    # Upper bound of the factor between the error and the correction.
    max_weight: float = 5.0

    def repeat(self, times: int) -> Guidance:
        """Return guidance for every sample repeated `times` in a row."""
        return dataclasses.replace(
            self,
            previous=self.previous.repeat_interleave(times, 0),
            weights=self.weights.repeat_interleave(times, 0),
        )


def guidance_weights(horizon: int, delay: int, execute_horizon: int) -> Float[Tensor, " h"]:
    """Return 1 for committed steps, 0 for the last `execute_horizon`, falling in between."""
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


@torch.no_grad()
def integrate(
    velocity: Velocity,
    noise: Float[Tensor, "b h a"],
    num_steps: int,
    guidance: Guidance | None = None,
    committed: Committed | None = None,
) -> Float[Tensor, "k b h a"]:
    """Integrate from noise (time 1) to actions (time 0) in equal Euler steps.

    Return the noisy actions at times 1, 1 − 1/num_steps, …, 0: the last are the result.
    """
    keep = (lambda actions: actions) if committed is None else committed.keep
    path = [keep(noise.float())]
    for step in range(num_steps):
        actions = path[-1]
        if guidance is None:
            direction = velocity(actions, step)
        else:
            direction = _guided_velocity(velocity, actions, step, num_steps, guidance)
        path.append(keep(torch.sub(actions, direction, alpha=1 / num_steps)))
    return torch.stack(path)


def _guided_velocity(
    velocity: Velocity, actions: Actions, step: int, num_steps: int, guidance: Guidance
) -> Actions:
    """Return the velocity, corrected towards the previous chunk."""
    time = 1 - step / num_steps
    through_network = guidance.jacobian == "full"
    start = actions.detach().requires_grad_(through_network)
    with torch.set_grad_enabled(through_network):
        plain = velocity(start, step)
        clean = start - time * plain
    error = guidance.weights[..., None] * (guidance.previous - clean.detach())
    correction = torch.autograd.grad(clean, start, error)[0] if through_network else error
    # (1 − τ) / (τ · r²) with τ = 1 − time, bounded; at the first step τ is 0.
    progress = 1 - time
    strength = guidance.max_weight
    if progress > 0:
        spread = time**2 / (progress**2 + time**2)
        strength = min(strength, time / (progress * spread))
    return plain.detach() - strength * correction
