"""How good a model is on episodes that it was not trained on.

Measured are the training loss and, for models that denoise, the mean distance of sampled actions
from the recorded ones, per dimension, in units of the normalised actions. Noise and times are the
same at every validation, and for any number of processes.

Dims: n sums: loss, samples, recorded steps, and a distance per action dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from piston.data.mixture import Samples
from piston.models.model import Model
from piston.observation import Observation, stack_samples
from piston.training.distributed import Processes
from piston.training.step import Trainer
from piston.training.trackers import Metrics

_NUM_SAMPLES = 64
_BATCH = 8


class Validation:
    """A fixed set of frames, spread evenly over the held-out episodes."""

    def __init__(self, samples: Samples, processes: Processes, robot_dim: int | None) -> None:
        self._samples, self._processes, self._robot_dim = samples, processes, robot_dim
        frames = np.linspace(0, len(samples) - 1, min(_NUM_SAMPLES, len(samples))).astype(int)
        self._batches = [frames[i : i + _BATCH].tolist() for i in range(0, len(frames), _BATCH)]

    @torch.no_grad()
    def run(self, trainer: Trainer) -> Metrics:
        """Measure the weights that would be served."""
        rank, size = self._processes.rank, self._processes.world_size
        with trainer.served_weights() as model:
            sums = np.zeros(3 + (self._robot_dim or model.config.action_dim))
            # Each process takes its share of the batches. All run equally often, as sharded models
            # require; a batch that a process runs only for that is not counted.
            for turn in range(0, len(self._batches), size):
                number = min(turn + rank, len(self._batches) - 1)
                found = self._measure(model, self._batches[number], seed=number)
                sums += found if number == turn + rank else 0
        loss, num_samples, num_steps, *distances = self._processes.sum(*sums.tolist())
        metrics: dict[str, float | Sequence[float] | None] = {"validation/loss": loss / num_samples}
        if model.config.denoises:
            mean = [total / num_steps for total in distances]
            metrics["validation/action_error"] = float(np.mean(mean))
            metrics["validation/action_error_per_dim"] = mean
        return metrics

    def _measure(self, model: Model, frames: list[int], seed: int) -> Float[np.ndarray, " n"]:
        """Return the sum of losses, how many there are, recorded steps, and their distances."""
        batch: dict[str, Any] = stack_samples([self._samples[frame] for frame in frames])
        observation = Observation.from_dict(batch).to(self._processes.device)
        actions = batch["actions"].to(observation.device) if "actions" in batch else None
        draws = model.draw(len(frames), generator=torch.Generator().manual_seed(seed))
        draws = {name: values.to(observation.device) for name, values in draws.items()}
        losses = model.training_losses(observation, actions, draws).values()
        loss = torch.stack([loss.reshape(len(loss), -1).mean(1).sum() for loss in losses]).sum()
        sums = np.zeros(3 + (self._robot_dim or model.config.action_dim))
        sums[:2] = loss.item(), len(frames)
        if actions is not None and model.config.denoises:
            sampled = model.act(observation, draws["noise"][:, 0])
            recorded = ~batch["action_is_pad"].to(actions.device)
            distance = (sampled - actions)[recorded].abs().double().sum(0)
            sums[2], sums[3:] = int(recorded.sum()), distance[: self._robot_dim].cpu().numpy()
        return sums
