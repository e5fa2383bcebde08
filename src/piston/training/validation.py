"""How good a model is on episodes that it was not trained on.

Measured are the training loss and, for models that denoise, the mean distance of sampled actions
from the recorded ones, per dimension, in units of the normalised actions. Noise and times are the
same at every validation, and for any number of processes.

Dims: b batch, h horizon, a action dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from piston.data.mixture import Samples
from piston.models.model import Model
from piston.observation import Observation, stack_samples
from piston.training.distributed import Processes
from piston.training.step import Trainer
from piston.training.trackers import Metrics

_NUM_SAMPLES = 64
_BATCH = 8


@dataclasses.dataclass
class _Sums:
    """Sums over samples, and over those of their steps that were recorded."""

    loss: float = 0.0
    num_samples: int = 0
    # Of a flow model only.
    distance: Float[np.ndarray, " a"] | float = 0.0
    num_steps: int = 0

    def add(self, other: _Sums) -> None:
        self.loss += other.loss
        self.num_samples += other.num_samples
        self.distance = self.distance + other.distance
        self.num_steps += other.num_steps


class Validation:
    """A fixed set of frames, spread evenly over the held-out episodes."""

    def __init__(self, samples: Samples, processes: Processes, robot_dim: int | None) -> None:
        self._samples, self._processes, self._robot_dim = samples, processes, robot_dim
        frames = np.linspace(0, len(samples) - 1, min(_NUM_SAMPLES, len(samples))).astype(int)
        self._batches = [frames[i : i + _BATCH].tolist() for i in range(0, len(frames), _BATCH)]

    @torch.no_grad()
    def run(self, trainer: Trainer) -> Metrics:
        """Measure the weights that would be served."""
        with trainer.served_weights() as model:
            sums = self._sums(model)
        # A process without a batch of its own has no distance, but takes part in the sum.
        distance = np.broadcast_to(sums.distance, self._robot_dim or model.config.action_dim)
        loss, num_samples, num_steps, *distances = self._processes.sum(
            sums.loss, sums.num_samples, sums.num_steps, *map(float, distance)
        )
        metrics: dict[str, float | Sequence[float] | None] = {"validation/loss": loss / num_samples}
        if model.config.denoises:
            mean = [total / num_steps for total in distances]
            metrics["validation/action_error"] = float(np.mean(mean))
            metrics["validation/action_error_per_dim"] = mean
        return metrics

    def _sums(self, model: Model) -> _Sums:
        rank, size = self._processes.rank, self._processes.world_size
        sums = _Sums()
        # Each process takes its share of the batches. All run equally often, as sharded models
        # require; a batch that a process runs only for that is not counted.
        for turn in range(0, len(self._batches), size):
            number = min(turn + rank, len(self._batches) - 1)
            result = self._batch(model, self._batches[number], seed=number)
            if number == turn + rank:
                sums.add(result)
        return sums

    def _batch(self, model: Model, frames: list[int], seed: int) -> _Sums:
        batch: dict[str, Any] = stack_samples([self._samples[frame] for frame in frames])
        observation = Observation.from_dict(batch).to(self._processes.device)
        actions = batch["actions"].to(observation.device) if "actions" in batch else None
        draws = model.draw(len(frames), generator=torch.Generator().manual_seed(seed))
        draws = {name: values.to(observation.device) for name, values in draws.items()}
        losses = model.training_losses(observation, actions, draws).values()
        loss = torch.stack([loss.reshape(len(loss), -1).mean(1).sum() for loss in losses]).sum()
        if not model.config.denoises:
            return _Sums(loss.item(), len(frames))
        assert actions is not None
        sampled = model.act(observation, draws["noise"][:, 0])
        recorded = ~batch["action_is_pad"].to(actions.device)
        distance = self._distance(sampled[recorded], actions[recorded])
        return _Sums(loss.item(), len(frames), distance, int(recorded.sum()))

    def _distance(
        self, sampled: Float[Tensor, "n a"], actions: Float[Tensor, "n a"]
    ) -> Float[np.ndarray, " a"]:
        distance = (sampled - actions).abs().double().sum(0)
        return distance[: self._robot_dim].cpu().numpy()
