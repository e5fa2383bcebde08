"""The integrator, one step at a time: from noise to actions, with everything between kept."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float

from piston.models.flow import Pi0
from piston.observation import Observation


@torch.no_grad()
def denoise(
    model: Pi0, observation: Observation, noise: Float[np.ndarray, "h a"], num_steps: int = 10
) -> Float[np.ndarray, "n h a"]:
    """The noisy actions at times 1, 1 − 1/num_steps, …, 0, of an observation of batch 1.

    The last is what `sample_actions` gives for this noise.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, is {num_steps}.")
    cache = model.prefill(observation)
    actions = torch.from_numpy(noise)[None].to(observation.device)
    passed = [actions]
    for step in range(num_steps):
        time = torch.full((1,), 1 - step / num_steps, device=actions.device)
        actions = actions - model.velocity(actions, time, cache) / num_steps
        passed.append(actions)
    return torch.cat(passed).float().cpu().numpy()
