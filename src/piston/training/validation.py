"""How good a model is on episodes it was not trained on.

The flow loss says how well noise is told from actions; the error of sampled actions, which is more
telling, says how far the robot would have been from what was recorded, per dimension, in units of
the normalised actions. Noise and times are the same at every validation.

Dims: b batch, h horizon, a action dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piston.data.batches import collate
from piston.data.subsets import Samples
from piston.models.autoregressive import Pi0FAST
from piston.models.flow import Pi0, sample_time, standard_normal
from piston.observation import Observation
from piston.training.distributed import Processes
from piston.training.trackers import Numbers

_NUM_SAMPLES = 64
_BATCH = 8
_SEED = 0


class Validation:
    """A fixed set of frames, spread evenly over the held-out episodes."""

    def __init__(self, samples: Samples, processes: Processes, robot_dim: int | None) -> None:
        self._samples, self._processes, self._robot_dim = samples, processes, robot_dim
        frames = np.linspace(0, len(samples) - 1, min(_NUM_SAMPLES, len(samples))).astype(int)
        # Every process takes a part; all of them work through the same number of batches.
        per_round = _BATCH * processes.world_size
        self._frames = np.resize(frames, -(-len(frames) // per_round) * per_round)

    @torch.no_grad()
    def run(self, model: Pi0 | Pi0FAST) -> Numbers:
        rank, size = self._processes.rank, self._processes.world_size
        losses, errors = [], []
        for index, frames in enumerate(np.split(self._frames, len(self._frames) // _BATCH)):
            if index % size == rank:
                loss, error = self._batch(model, frames.tolist(), index)
                losses.append(loss)
                errors.append(error)
        count = self._processes.sum(len(losses))
        numbers: dict[str, float | Sequence[float]] = {
            "validation/loss": self._processes.sum(sum(losses)) / count
        }
        if errors[0] is not None:
            total = np.sum([error for error in errors if error is not None], axis=0)
            mean = [self._processes.sum(float(value)) / count for value in total]
            numbers["validation/action_error"] = float(np.mean(mean))
            numbers["validation/action_error_per_dim"] = mean
        return numbers

    def _batch(
        self, model: Pi0 | Pi0FAST, frames: list[int], seed: int
    ) -> tuple[float, np.ndarray | None]:
        batch: dict[str, Any] = collate([self._samples[frame] for frame in frames])
        observation = Observation.from_dict(batch).to(self._processes.device)
        if isinstance(model, Pi0FAST):
            return model.loss(observation).mean().item(), None
        actions = batch["actions"].to(self._processes.device)
        generator = torch.Generator().manual_seed(_SEED + seed)
        cpu = torch.device("cpu")
        noise = standard_normal(tuple(actions.shape), cpu, generator).to(actions.device)
        times = sample_time((len(actions),), cpu, generator).to(actions.device)
        loss = model.velocity_error(observation, actions, noise, times).mean().item()
        sampled = model.sample_actions(observation, noise)
        return loss, self._error(sampled, actions, batch["action_is_pad"])

    def _error(self, sampled: Tensor, actions: Tensor, padded: Tensor) -> np.ndarray:
        """Mean distance per dimension over the steps that were recorded."""
        real = ~padded.to(actions.device)
        distance = (sampled - actions).abs()[real].mean(0)
        return distance[: self._robot_dim].double().cpu().numpy()
