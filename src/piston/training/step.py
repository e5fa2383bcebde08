"""One step: a batch in, weights moved.

All randomness is a function of the run's seed and the step, drawn for the whole batch of all
processes: a step is the same on one process and on many, and after a resume.

Dims: b batch of this process, n draws, h horizon, a action dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from piston.config import TrainConfig
from piston.models import augmentation
from piston.models.model import Model
from piston.observation import Observation
from piston.training.distributed import (
    Processes,
    gradients_exchanged,
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
        model: Model,
        processes: Processes,
        robot_action_dim: int | None = None,
    ) -> None:
        """`robot_action_dim` is for --mask-padded-dims: how many dimensions are not padding."""
        self.config, self.model, self.processes = config, model, processes
        self._robot_action_dim = robot_action_dim if config.mask_padded_dims else None
        model.set_gradient_checkpointing(config.gradient_checkpointing)
        freeze_parameters(model, config.freeze)
        if config.compile:
            # Layer by layer: quick, as all layers of a kind share what is compiled.
            for layer in model.layers():
                layer.compile()
        self._losses = shard(model, config.sharding)
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
        losses, finite = [], []
        parts = self._parts(len(weights))
        for part in parts:
            with gradients_exchanged(self._losses, now=part == parts[-1]):
                named = self._part_losses(batch, part, draws)
                each = [self._weighted(one, weights[part], scale) for one in named.values()]
                loss = torch.stack(each).sum()
                loss.backward()
            losses.append(loss.detach())
            finite.append(_finite_samples(named.values()))
        norm = clip_gradients(self.parameters.values(), self.config.optimizer.clip_gradient_norm)
        mean_loss = self.processes.sum(torch.stack(losses).sum().item()) / self.processes.world_size
        result = StepResult(mean_loss, norm.item(), self.config.lr_schedule(step))
        if result.skipped:
            return dataclasses.replace(result, bad_samples=_places(~torch.cat(finite)))
        set_learning_rate(self.optimizer, result.learning_rate)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        return result

    @contextmanager
    def served_weights(self) -> Iterator[Model]:
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
        """Return this process's share of the step's random numbers."""
        generator = torch.Generator().manual_seed(_mix(self.config.seed, step))
        rank, total = self.processes.rank, size * self.processes.world_size
        drawn = self.model.draw(total, self.config.noise_draws, generator)
        if self.config.augmentation and self.model.config.uses_augmentation:
            cameras = self.model.config.cameras
            drawn["views"] = augmentation.draw(total, len(cameras), generator)
        mine = slice(rank * size, (rank + 1) * size)
        return {name: values[mine] for name, values in drawn.items()}

    def _part_losses(
        self, batch: Mapping[str, Any], part: slice, draws: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        device = self.processes.device
        observation = Observation.from_dict(_cut(batch, part)).to(device, non_blocking=True)
        mine = {name: values[part].to(device) for name, values in draws.items()}
        if "views" in mine:
            observation = augmentation.augment(observation, mine.pop("views"))
        actions = batch.get("actions")
        actions = None if actions is None else actions[part].to(device, torch.float32)
        return self._losses(observation, actions, mine)

    def _weights(self, batch: Mapping[str, Any]) -> Float[Tensor, " b"] | Float[Tensor, "b h a"]:
        """Return how much each loss counts: 1, or 0 where the masks leave something out."""
        if not self.model.config.denoises:
            return torch.ones(len(batch["state"]))
        weights = torch.ones(batch["actions"].shape)
        if self.config.mask_padded_steps:
            padded: Bool[Tensor, "b h"] = batch["action_is_pad"]
            weights.masked_fill_(padded[..., None], 0)
        if self._robot_action_dim is not None:
            weights[..., self._robot_action_dim :] = 0
        return weights

    def _weighted(self, loss: Tensor, weights: Tensor, scale: float) -> Tensor:
        return (loss * weights.to(loss.device)).sum() * scale


def _cut(batch: Mapping[str, Any], part: slice) -> dict[str, Any]:
    return {
        name: _cut(value, part) if isinstance(value, Mapping) else value[part]
        for name, value in batch.items()
    }


def _finite_samples(losses: Iterable[Tensor]) -> Bool[Tensor, " b"]:
    """Return which samples have finite losses."""
    each = [loss.detach().isfinite().reshape(len(loss), -1).all(1) for loss in losses]
    return torch.stack(each).all(0)


def _places(flags: Bool[Tensor, " b"]) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())


def _mix(seed: int, step: int) -> int:
    """A different seed for every step of every run."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 1) % 2**63
