"""One step: a batch in, weights moved.

All randomness is a function of the run's seed and the step, drawn for the whole batch of all
processes: a step is the same on one process and on many, and after a resume.

Dims: b batch of this process, n draws, h horizon, a action dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from piston.config import TrainConfig
from piston.models import augmentation
from piston.models.autoregressive import Pi0FAST
from piston.models.flow import Pi0, sample_time, standard_normal
from piston.observation import Observation
from piston.training.distributed import Processes, gradients_exchanged, shard
from piston.training.ema import EMA
from piston.training.optimizer import clip_gradients, make_optimizer, set_learning_rate, trainable


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Over all processes. A step whose loss or gradient is not finite moves nothing."""

    loss: float
    gradient_norm: float
    learning_rate: float

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
        if config.mask_padded_dims and robot_action_dim is None:
            raise ValueError("--mask-padded-dims needs statistics, which tell the robot's dims.")
        self.config, self.model, self.processes = config, model, processes
        model.gradient_checkpointing = config.gradient_checkpointing
        trainable(model, config.freeze)
        method = "loss" if isinstance(model, Pi0FAST) else "velocity_error"
        self._forward = shard(model, method, config.sharding)
        if config.compile:
            self._forward = torch.compile(self._forward)
        # Asked for only now: sharding puts other tensors in their place.
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.parameters.values(), config.optimizer)
        self.ema = EMA(self.parameters, config.ema_decay) if config.ema_decay else None
        self._robot_action_dim = robot_action_dim if config.mask_padded_dims else None

    def step(self, batch: Mapping[str, Any], step: int) -> StepResult:
        """`batch` is this process's part of the step's batch."""
        rate = self.config.lr_schedule(step)
        self.optimizer.zero_grad(set_to_none=True)
        draws = self._draw(len(batch["state"]), step)
        weights = self._weights(batch)
        # Each process divides by the weight of all, and gradients are averaged over processes.
        scale = self.processes.world_size / self.processes.sum(weights.sum().item())
        loss = 0.0
        parts = self._parts(len(weights))
        for part in parts:
            with gradients_exchanged(self._forward, now=part == parts[-1]):
                errors = self._errors(batch, part, draws)
                part_loss = (errors * weights[part]).sum() * scale
                part_loss.backward()
            loss += part_loss.item()
        norm = clip_gradients(self.parameters.values(), self.config.optimizer.clip_gradient_norm)
        mean_loss = self.processes.sum(loss) / self.processes.world_size
        result = StepResult(mean_loss, norm.item(), rate)
        if not result.skipped:
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update()
        return result

    def _parts(self, size: int) -> list[slice]:
        """Micro-batches; gradients add up over them."""
        count = self.config.gradient_accumulation
        if size % count:
            raise ValueError(
                f"--gradient-accumulation {count} must divide the {size} samples that each process "
                "has of a batch."
            )
        return [slice(start, start + size // count) for start in range(0, size, size // count)]

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

    def _errors(
        self, batch: Mapping[str, Any], part: slice, draws: Mapping[str, Tensor]
    ) -> Float[Tensor, " b"] | Float[Tensor, "b h a"]:
        device = self.processes.device
        observation = Observation.from_dict(_cut(batch, part)).to(device, non_blocking=True)
        if isinstance(self.model, Pi0FAST):
            return self._forward(observation)
        mine = {name: numbers[part].to(device) for name, numbers in draws.items()}
        observation = augmentation.augment(observation, mine["views"])
        actions = batch["actions"][part].to(device, torch.float32)
        return self._forward(observation, actions, mine["noise"], mine["time"]).mean(1)

    def _weights(self, batch: Mapping[str, Any]) -> Float[Tensor, " b"] | Float[Tensor, "b h a"]:
        """How much each number counts: all the same, but for what the masks leave out."""
        size, device = len(batch["state"]), self.processes.device
        if isinstance(self.model, Pi0FAST):
            return torch.ones(size, device=device)
        weights = torch.ones(batch["actions"].shape, device=device)
        if self.config.mask_padded_steps:
            padded: Bool[Tensor, "b h"] = batch["action_is_pad"].to(device)
            weights.masked_fill_(padded[..., None], 0)
        if self._robot_action_dim is not None:
            weights[..., self._robot_action_dim :] = 0
        return weights

    def served_state(self) -> Mapping[str, Tensor]:
        """What gets served: the mean of the weights where there is one."""
        mean: Mapping[str, Tensor] = {} if self.ema is None else self.ema.mean
        return {name: mean.get(name, value) for name, value in self.model.state_dict().items()}


def _cut(batch: Mapping[str, Any], part: slice) -> dict[str, Any]:
    return {
        name: _cut(value, part) if isinstance(value, Mapping) else value[part]
        for name, value in batch.items()
    }


def _mix(seed: int, step: int) -> int:
    """A different seed for every step of every run."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 1) % 2**63
