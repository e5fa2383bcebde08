"""How fast and in which way weights move: learning-rate schedules and AdamW's numbers.

Plain functions of the step; knows nothing of tensors. `training` builds the optimizer from this.
"""

from __future__ import annotations

import abc
import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class LRSchedule(abc.ABC):
    """Learning rate as a function of the step, after a linear warm-up from peak/(warmup + 1)."""

    # Steps of linear warm-up.
    warmup_steps: int = 1_000
    # The learning rate reached after the warm-up.
    peak_lr: float = 2.5e-5

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or self.peak_lr <= 0:
            raise ValueError(
                f"A schedule needs warmup_steps ≥ 0 and peak_lr > 0, found {self.warmup_steps} "
                f"and {self.peak_lr}."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            first = self.peak_lr / (self.warmup_steps + 1)
            return first + (self.peak_lr - first) * step / self.warmup_steps
        return self.after_warmup(step - self.warmup_steps)

    @abc.abstractmethod
    def after_warmup(self, steps: int) -> float:
        """The learning rate this many steps after the end of the warm-up."""


@dataclasses.dataclass(frozen=True)
class CosineDecaySchedule(LRSchedule):
    """Half a cosine from the peak down to `decay_lr`, reached at step `decay_steps`."""

    # The step (counted from the start of training) at which decay_lr is reached.
    decay_steps: int = 30_000
    # The learning rate from then on.
    decay_lr: float = 2.5e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay_lr < 0:
            raise ValueError(f"decay_lr must not be negative, is {self.decay_lr}.")
        if self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps ({self.decay_steps}) counts from the start of training and must lie "
                f"after warmup_steps ({self.warmup_steps})."
            )

    def after_warmup(self, steps: int) -> float:
        progress = min(steps / (self.decay_steps - self.warmup_steps), 1.0)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.decay_lr + (self.peak_lr - self.decay_lr) * cosine


@dataclasses.dataclass(frozen=True)
class RsqrtDecaySchedule(LRSchedule):
    """Falls with the inverse square root of the step, without an end."""

    # The learning rate reached after the warm-up.
    peak_lr: float = 5e-5
    # Steps after which the rate has fallen to peak/√2.
    timescale: float = 10_000.0

    def after_warmup(self, steps: int) -> float:
        return self.peak_lr / math.sqrt((self.timescale + steps) / self.timescale)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW with gradients clipped to a global norm."""

    # Decay of the running mean of gradients.
    b1: float = 0.9
    # Decay of the running mean of squared gradients.
    b2: float = 0.95
    # Added to the denominator.
    eps: float = 1e-8
    # Decoupled weight decay. Not zero, as in the reference.
    weight_decay: float = 1e-10
    # Gradients whose global norm is larger are scaled down to it.
    clip_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
            raise ValueError(f"AdamW's b1 and b2 lie in [0, 1), found {self.b1} and {self.b2}.")
        if self.eps <= 0 or self.weight_decay < 0 or self.clip_gradient_norm <= 0:
            raise ValueError(
                "AdamW needs eps > 0, weight_decay ≥ 0 and clip_gradient_norm > 0, found "
                f"{self.eps}, {self.weight_decay} and {self.clip_gradient_norm}."
            )
