"""One step: a batch in, weights moved.

All randomness is a function of the run's seed and the step, drawn for the whole batch of all
processes: a step is the same on one process and on many, and after a resume.

Dims: b batch of this process, n draws, h horizon, a action dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from piston.config import TrainConfig
from piston.models import augmentation
from piston.models.autoregressive import Pi0FAST
from piston.models.flow import Pi0, sample_time, standard_normal
from piston.observation import Observation
from piston.training.distributed import (
    Processes,
    gradients_exchanged,
    layers,
    let_go,
    shard,
)
from piston.training.ema import EMA
from piston.training.optimizer import (
    clip_gradients,
    freeze_parameters,
    make_optimizer,
    set_learning_rate,
)

# Of every sample, or of every number of its actions.
Errors = Float[Tensor, " b"] | Float[Tensor, "b h a"]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Over all processes. A step whose loss or gradient is not finite moves nothing."""

    loss: float
    gradient_norm: float
    learning_rate: float
    # Of this process's samples, those whose own loss is not finite.
    bad_samples: tuple[int, ...] = ()

    @property
    def skipped(self) -> bool:
        return not (math.isfinite(self.loss) and math.isfinite(self.gradient_norm))


class Trainer:
    """The model with all that moves its weights."""

    def __init__(
        self,
        config: TrainConfig,
        model: Pi0 | Pi0FAST,
        processes: Processes,
        robot_action_dim: int | None = None,
    ) -> None:
        """`robot_action_dim` is for --mask-padded-dims: how many dimensions are not padding."""
        self.config, self.model, self.processes = config, model, processes
        self._robot_action_dim = robot_action_dim if config.mask_padded_dims else None
        model.gradient_checkpointing = config.gradient_checkpointing
        freeze_parameters(model, config.freeze)
        if config.compile:
            # Layer by layer: quick, as all layers of a kind share what is compiled.
            for layer in layers(model):
                layer.compile()
        method = "loss" if isinstance(model, Pi0FAST) else "velocity_error"
        self._forward = shard(model, method, config.sharding)
        # Asked for only now: sharding puts other tensors in their place.
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.parameters.values(), config.optimizer)
        self.ema = EMA(self.parameters, config.ema_decay) if config.ema_decay else None

    def step(self, batch: Mapping[str, Any], step: int) -> StepResult:
        """`batch` is this process's part of the step's batch."""
        self.optimizer.zero_grad(set_to_none=True)
        draws = self._draw(len(batch["state"]), step)
        weights = self._weights(batch)
        # Each process divides by the weight of all, and gradients are averaged over processes.
        scale = self.processes.world_size / self.processes.sum(weights.sum().item())
        losses, errors = [], []
        parts = self._parts(len(weights))
        for part in parts:
            with gradients_exchanged(self._forward, now=part == parts[-1]):
                part_errors = self._errors(batch, part, draws)
                loss = (part_errors * weights[part].to(part_errors.device)).sum() * scale
                loss.backward()
            losses.append(loss.detach())
            errors.append(part_errors.detach())
        norm = clip_gradients(self.parameters.values(), self.config.optimizer.clip_gradient_norm)
        mean_loss = self.processes.sum(torch.stack(losses).sum().item()) / self.processes.world_size
        result = StepResult(mean_loss, norm.item(), self.config.lr_schedule(step))
        if result.skipped:
            return dataclasses.replace(result, bad_samples=_not_finite(torch.cat(errors)))
        set_learning_rate(self.optimizer, result.learning_rate)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        return result

    @contextmanager
    def served_weights(self) -> Iterator[Pi0 | Pi0FAST]:
        """The model as it would be served: inside, it computes with the mean of its weights."""
        self.model.eval()
        try:
            with nullcontext() if self.ema is None else self.ema.applied():
                yield self.model
                let_go(self.model)
        finally:
            self.model.train()

    def _parts(self, size: int) -> list[slice]:
        """Micro-batches; gradients add up over them."""
        part = size // self.config.gradient_accumulation
        return [slice(start, start + part) for start in range(0, size, part)]

    def _draw(self, size: int, step: int) -> dict[str, Tensor]:
        """This process's share of the step's random numbers."""
        if isinstance(self.model, Pi0FAST):
            return {}
        generator = torch.Generator().manual_seed(_mix(self.config.seed, step))
        rank, total = self.processes.rank, size * self.processes.world_size
        rows = (total, self.config.noise_draws)
        chunk = (self.model.config.action_horizon, self.model.config.action_dim)
        cpu = torch.device("cpu")
        drawn = {
            "noise": standard_normal((*rows, *chunk), cpu, generator),
            "time": sample_time(rows, cpu, generator),
            "views": augmentation.draw(total, len(self.model.config.cameras), generator),
        }
        mine = slice(rank * size, (rank + 1) * size)
        return {name: numbers[mine] for name, numbers in drawn.items()}

    def _errors(self, batch: Mapping[str, Any], part: slice, draws: Mapping[str, Tensor]) -> Errors:
        device = self.processes.device
        observation = Observation.from_dict(_cut(batch, part)).to(device, non_blocking=True)
        if isinstance(self.model, Pi0FAST):
            return self._forward(observation)
        mine = {name: numbers[part].to(device) for name, numbers in draws.items()}
        if self.config.augmentation:
            observation = augmentation.augment(observation, mine["views"])
        actions = batch["actions"][part].to(device, torch.float32)
        return self._forward(observation, actions, mine["noise"], mine["time"]).mean(1)

    def _weights(self, batch: Mapping[str, Any]) -> Errors:
        """How much each error counts: all the same, but for those that the masks leave out."""
        if isinstance(self.model, Pi0FAST):
            return torch.ones(len(batch["state"]))
        weights = torch.ones(batch["actions"].shape)
        if self.config.mask_padded_steps:
            padded: Bool[Tensor, "b h"] = batch["action_is_pad"]
            weights.masked_fill_(padded[..., None], 0)
        if self._robot_action_dim is not None:
            weights[..., self._robot_action_dim :] = 0
        return weights


def _cut(batch: Mapping[str, Any], part: slice) -> dict[str, Any]:
    return {
        name: _cut(value, part) if isinstance(value, Mapping) else value[part]
        for name, value in batch.items()
    }


def _not_finite(errors: Errors) -> tuple[int, ...]:
    finite = errors.flatten(1).isfinite().all(1) if errors.ndim > 1 else errors.isfinite()
    return tuple((~finite).nonzero().flatten().tolist())


def _mix(seed: int, step: int) -> int:
    """A different seed for every step of every run."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 1) % 2**63
