"""How good a model is on episodes that it was not trained on.

Measured are the training loss and, for models that denoise, the mean distance of sampled actions
from the recorded ones, per dimension, in units of the normalised actions: for π0 one standard
deviation of the training data, for other models half the distance between the 1 % and 99 %
quantiles. A model that writes text is given the recorded one. Noise and times are the same at every
validation, and for any number of processes.

Dims: n sums: of each loss of the model and the samples that have a part in it, then per action
dimension the recorded steps and their distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from piston.data.protocol import Samples
from piston.models.model import Model
from piston.observation import Observation, stack_samples
from piston.training.step import Trainer
from piston.training.trackers import Metrics

ERROR_PER_DIM = "validation/action_error_per_dim"
_NUM_SAMPLES = 64
_BATCH = 8


@torch.no_grad()
def validate(trainer: Trainer, samples: Samples, names: Sequence[str]) -> Metrics:
    """Measure the weights that would be served, on frames spread evenly over the samples.

    `names` are those of the robot's action dimensions; the model's others are padding.
    """
    frames = np.linspace(0, len(samples) - 1, min(_NUM_SAMPLES, len(samples))).astype(int)
    batches = [frames[i : i + _BATCH].tolist() for i in range(0, len(frames), _BATCH)]
    rank, size = trainer.processes.rank, trainer.processes.world_size
    num_losses = len(trainer.model.loss_names)
    sums = np.zeros(2 * num_losses + 2 * len(names))
    with trainer.served_weights() as model:
        # Each process takes its share of the batches. All run equally often, as sharded models
        # require; a batch that a process runs only for that is not counted.
        for turn in range(0, len(batches), size):
            number = min(turn + rank, len(batches) - 1)
            batch = stack_samples([samples[frame] for frame in batches[number]])
            found = _measure(trainer, model, batch, seed=number, dim=len(names))
            sums += found if number == turn + rank else 0
    measured = trainer.processes.sum(*sums.tolist())
    totals, counts = measured[:num_losses], measured[num_losses : 2 * num_losses]
    each = measured[2 * num_losses :]
    losses = {
        name: total / count
        for name, total, count in zip(trainer.model.loss_names, totals, counts)
        if count
    }
    metrics: dict[str, float | Mapping[str, float] | None] = {
        "validation/loss": sum(losses.values())
    }
    if len(losses) > 1:
        metrics |= {f"validation/loss/{name}": loss for name, loss in losses.items()}
    if model.config.denoises:
        distances = zip(names, each[: len(names)], each[len(names) :], strict=True)
        # Of several robots, the frames above may show none that has the last dimensions.
        mean = {name: distance / steps for name, steps, distance in distances if steps}
        metrics["validation/action_error"] = float(np.mean([*mean.values()]))
        metrics[ERROR_PER_DIM] = mean
    return metrics


def _measure(
    trainer: Trainer, model: Model, batch: Mapping[str, Any], seed: int, dim: int
) -> Float[np.ndarray, " n"]:
    """Return the sums of one batch."""
    device = trainer.processes.device
    observation = Observation.from_dict(batch).to(device)
    actions = batch["actions"].to(device) if "actions" in batch else None
    draws = model.draw(len(batch["state"]), generator=torch.Generator().manual_seed(seed))
    draws = {name: values.to(device) for name, values in draws.items()}
    losses = model.training_losses(observation, actions, draws)
    weights = trainer.loss_weights(batch)
    num_losses = len(model.loss_names)
    sums = np.zeros(2 * num_losses + 2 * dim)
    for place, name in enumerate(model.loss_names):
        if name in losses:
            weight = weights[name].to(device).reshape(len(observation.state), -1)
            numbers = weight.sum(1)
            means = (losses[name].reshape(weight.shape) * weight).sum(1) / numbers.clamp(min=1)
            sums[place] = means.sum().item()
            sums[num_losses + place] = (numbers > 0).sum().item()
    if actions is not None and model.config.denoises:
        sampled = model.act(observation, draws["noise"][:, 0])
        dims = torch.arange(actions.shape[-1]) < batch["action_dims"][:, None]
        recorded = (~batch["action_is_pad"][..., None] & dims[:, None]).to(device)
        distance = ((sampled - actions).abs().double() * recorded).sum((0, 1))
        sums[2 * num_losses :][:dim] = recorded.sum((0, 1))[:dim].cpu().numpy()
        sums[2 * num_losses + dim :] = distance[:dim].cpu().numpy()
    return sums
