"""One training step: a batch in, weights moved.

All random numbers are a function of the run's seed and the step, drawn for the whole batch of all
processes: a step is the same on one process and on many, and after a resume. A step never waits for
the device: whether its loss and gradients are finite is decided there, and what it measured is read
later, for many steps at once.

Dims: b batch of this process, n noise draws, h horizon, a action dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from piston.config import TrainConfig
from piston.extras import require_compiler
from piston.models import augmentation
from piston.models.model import Model
from piston.observation import Observation, send
from piston.training.distributed import Processes, gradients_exchanged, reshard, shard
from piston.training.optimizer import (
    EMA,
    clip_gradients,
    freeze_parameters,
    optimizer_step,
)

# How much each value of a loss counts, by the loss's name: see `Model.loss_weights`.
LossWeights = Mapping[str, Tensor]


class StepOutput(NamedTuple):
    """What a step measured, on the device; `Trainer.read` turns it into numbers."""

    # This process's part of each loss by name; the mean over all processes is that of the batch.
    losses: dict[str, Float[Tensor, ""]]
    # Of the gradients of all processes; not finite if any process's loss is not.
    gradient_norm: Float[Tensor, ""]
    has_finite_loss: Bool[Tensor, " b"]
    learning_rate: float
    # The losses that no sample of any process has a part in.
    without_samples: frozenset[str] = frozenset()


class StepResult(NamedTuple):
    """What a step measured over all processes. A skipped step moved nothing."""

    # By name, of those that samples have a part in; what is minimised is their sum.
    losses: dict[str, float]
    gradient_norm: float
    learning_rate: float
    # The samples of this process whose own loss is not finite.
    bad_samples: tuple[int, ...] = ()

    @property
    def loss(self) -> float:
        return sum(self.losses.values())

    @property
    def skipped(self) -> bool:
        """Whether the loss of any process, or the gradients, were not finite."""
        return not math.isfinite(self.gradient_norm)


class Trainer:
    """The model with all that moves its weights."""

    def __init__(self, config: TrainConfig, model: Model, processes: Processes) -> None:
        self.config, self.model, self.processes = config, model, processes
        model.set_gradient_checkpointing(config.gradient_checkpointing)
        freeze_parameters(model, config.freeze)
        if config.compile:
            require_compiler("--compile")
            # Layer by layer: quick, as all layers of a kind share what is compiled.
            for layer in model.layers():
                layer.compile()
        self._losses = shard(model, config.sharding)
        # Only now, because sharding replaces the parameters.
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = config.optimizer.build(self.parameters.items())
        self.ema = EMA(self.parameters, config.ema_decay) if config.ema_decay else None

    def step(
        self,
        batch: Mapping[str, Any],
        step: int,
        weights: LossWeights | None = None,
        totals: Mapping[str, float] | None = None,
    ) -> StepOutput:
        """Train on `batch`, which is this process's part of the step's batch.

        `weights` are its `loss_weights`, and `totals` their sums over all processes; by default
        they are computed, for this process alone. A step whose loss or gradients are not finite
        moves nothing.
        """
        self.optimizer.zero_grad(set_to_none=True)
        size = len(batch["state"])
        draws = self._draw(size, step)
        weights = self.loss_weights(batch) if weights is None else weights
        totals = self.totals(weights) if totals is None else totals
        # Each process divides by what counts on all, and gradients are averaged over processes.
        scales = {name: self.processes.world_size / (total or 1) for name, total in totals.items()}
        losses: dict[str, list[Tensor]] = {}
        finite = []
        part_size = size // self.config.gradient_accumulation
        for start in range(0, size, part_size):
            part = slice(start, start + part_size)
            with gradients_exchanged(self._losses, now=part.stop >= size):
                named = self._named_losses(batch, part, draws)
                sums = {
                    name: (values * send(weights[name][part], values.device)).sum() * scales[name]
                    for name, values in named.items()
                }
                loss = torch.stack([*sums.values()]).sum()
                # A loss that is not finite spoils all gradients, and so those of all processes.
                loss.backward(torch.where(loss.detach().isfinite(), 1.0, torch.nan))
            for name, total in sums.items():
                losses.setdefault(name, []).append(total.detach())
            is_finite = [values.detach().isfinite() for values in named.values()]
            each = [values.reshape(len(values), -1).all(1) for values in is_finite]
            finite.append(torch.stack(each).all(0))
        norm = clip_gradients(self.parameters.values(), self.config.optimizer.clip_gradient_norm)
        learning_rate = self.config.lr_schedule(step)
        optimizer_step(self.optimizer, learning_rate, norm.isfinite())
        if self.ema is not None:
            self.ema.update(norm.isfinite())
        means = {name: torch.stack(parts).sum() for name, parts in losses.items()}
        empty = frozenset(name for name in named if not totals[name])
        return StepOutput(means, norm, torch.cat(finite), learning_rate, empty)

    def read(self, outputs: Sequence[StepOutput]) -> list[StepResult]:
        """Read what steps measured: one transfer from the device, one sum over processes."""
        names = list(outputs[0].losses)
        measured = torch.stack(
            [torch.stack((*one.losses.values(), one.gradient_norm)) for one in outputs]
        )
        *losses, norms = measured.double().T.tolist()
        size = self.processes.world_size
        losses = [[total / size for total in self.processes.sum(*one)] for one in losses]
        results = []
        for output, norm, *each in zip(outputs, norms, *losses):
            bad = () if math.isfinite(norm) else (~output.has_finite_loss).nonzero()[:, 0].tolist()
            named = dict(zip(names, each, strict=True))
            named = {
                name: loss for name, loss in named.items() if name not in output.without_samples
            }
            results.append(StepResult(named, norm, output.learning_rate, tuple(bad)))
        return results

    def loss_weights(self, batch: Mapping[str, Any]) -> LossWeights:
        """Return how much each value of each loss counts, without what is masked as padding."""
        return self.model.loss_weights(batch, self._action_weights(batch))

    def totals(self, weights: LossWeights) -> dict[str, float]:
        """Return the sum of each loss's weights; zeros if there are no weights."""
        return {
            name: weights[name].sum(dtype=torch.float64).item() if weights else 0.0
            for name in self.model.loss_names
        }

    @contextmanager
    def served_weights(self) -> Iterator[Model]:
        """Give the model as it would be served, with the moving average of its weights."""
        self.model.eval()
        try:
            with nullcontext() if self.ema is None else self.ema.applied():
                yield self.model
                reshard(self.model)
        finally:
            self.model.train()

    def _draw(self, size: int, step: int) -> dict[str, Tensor]:
        """Return this process's share of the step's random numbers."""
        generator = torch.Generator().manual_seed(_mix(self.config.seed, step))
        rank, total = self.processes.rank, size * self.processes.world_size
        drawn = self.model.draw(total, self.config.noise_draws, generator)
        if self.config.augmentation and self.model.config.uses_augmentation:
            cameras = self.model.config.cameras
            drawn["views"] = augmentation.draw(total, len(cameras), generator)
        mine = slice(rank * size, (rank + 1) * size)
        return {name: values[mine] for name, values in drawn.items()}

    def _named_losses(
        self, batch: Mapping[str, Any], part: slice, draws: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        device = self.processes.device
        observation = Observation.from_dict(_cut(batch, part)).to(device)
        mine = {name: send(values[part], device) for name, values in draws.items()}
        if "views" in mine:
            observation = augmentation.augment(observation, mine.pop("views"))
        actions = batch.get("actions")
        actions = None if actions is None else send(actions[part].float(), device)
        return self._losses(observation, actions, mine)

    def _action_weights(self, batch: Mapping[str, Any]) -> Float[Tensor, "b h a"]:
        """Return 1 for every number of the actions that counts, 0 for those left out."""
        config = self.model.config
        weights = torch.ones(len(batch["state"]), config.action_horizon, config.action_dim)
        if self.config.mask_padded_steps:
            padded: Bool[Tensor, "b h"] = batch["action_is_pad"]
            weights.masked_fill_(padded[..., None], 0)
        # Pictures with questions have no dimension, and so no actions to learn.
        dims = batch["action_dims"]
        dims = dims if self.config.mask_padded_dims else dims.clamp(max=1) * config.action_dim
        is_padding = torch.arange(config.action_dim) >= dims[:, None]
        return weights.masked_fill_(is_padding[:, None], 0)


def _cut(batch: Mapping[str, Any], part: slice) -> dict[str, Any]:
    return {
        name: _cut(value, part) if isinstance(value, Mapping) else value[part]
        for name, value in batch.items()
    }


def _mix(seed: int, step: int) -> int:
    """Return a different seed for every step of every run."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 1) % 2**63
