"""Configuration of training runs and data pipelines: frozen dataclasses without side effects.

Here is `TrainConfig`, a training run with its optimizer and schedule. A preset is a TrainConfig; a
checkpoint carries the one that it was trained with. `data` describes its pipeline.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from piston.config.data import AssetsConfig as AssetsConfig
from piston.config.data import DataConfig, DataSource
from piston.config.data import DataConfigFactory as DataConfigFactory
from piston.config.data import MixtureDataConfig as MixtureDataConfig
from piston.config.data import ModelTransformFactory as ModelTransformFactory
from piston.models.configs import ModelConfig, Pi0Config
from piston.serialization import register
from piston.suggestions import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

# The section of a checkpoint's config.json that makes it self-contained.
TRAIN_SECTION = "train"
# The key of a mixture's policy_metadata that holds those of each robot.
ROBOTS = "robots"

Tracker = Literal["tensorboard", "wandb"]
Sharding = Literal["none", "ddp", "fsdp"]


class UnknownRobot(ValueError):
    """A mixture does not have the robot that was asked for; the message lists those it has."""

    @classmethod
    def named(cls, name: Any, known: Iterable[str]) -> UnknownRobot:
        """Return the error for a name that is not one of those known."""
        names = list(known)
        return cls(
            f"There is no robot {repr(name)[:40]} here.{did_you_mean(str(name), names)} There is "
            f"{', '.join(names)}."
        )


@dataclasses.dataclass(frozen=True)
class LRSchedule(abc.ABC):
    """The learning rate of each step, with a linear warm-up from peak/(warmup + 1)."""

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
        """Return the learning rate this many steps after the end of the warm-up."""


@register("cosine_decay")
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


@register("rsqrt_decay")
@dataclasses.dataclass(frozen=True)
class RsqrtDecaySchedule(LRSchedule):
    """Decay with the inverse square root of the step, without an end."""

    # The learning rate reached after the warm-up.
    peak_lr: float = 5e-5
    # Steps after which the rate has fallen to peak/√2.
    timescale: float = 10_000.0

    def after_warmup(self, steps: int) -> float:
        return self.peak_lr / math.sqrt((self.timescale + steps) / self.timescale)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(abc.ABC):
    """How gradients move the weights: another optimizer is a subclass that is registered.

    Its state is saved in checkpoints and restored as `torch.optim.Optimizer.state` holds it.
    """

    # Gradients whose global norm is larger are scaled down to it.
    clip_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.clip_gradient_norm <= 0:
            raise ValueError(f"clip_gradient_norm must be > 0, is {self.clip_gradient_norm}.")

    @abc.abstractmethod
    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters; every step sets its learning rate."""


@register("adamw")
@dataclasses.dataclass(frozen=True)
class AdamW(OptimizerConfig):
    """AdamW with gradients clipped to a global norm."""

    # Decay of the running mean of gradients.
    b1: float = 0.9
    # Decay of the running mean of squared gradients.
    b2: float = 0.95
    # Added to the denominator.
    eps: float = 1e-8
    # Decoupled weight decay. Not zero, as in openpi.
    weight_decay: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
            raise ValueError(f"AdamW's b1 and b2 lie in [0, 1), found {self.b1} and {self.b2}.")
        if self.eps <= 0 or self.weight_decay < 0:
            raise ValueError(
                f"AdamW needs eps > 0 and weight_decay ≥ 0, found {self.eps} and "
                f"{self.weight_decay}."
            )

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
        import torch  # here, because configurations are read without it

        return torch.optim.AdamW(
            [parameter for _, parameter in named_parameters],
            lr=0.0,
            betas=(self.b1, self.b2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,  # a single pass over memory, and it skips a step without the host's help
        )


# The smallest value of a field.
_LEAST = {
    **dict.fromkeys(("batch_size", "num_train_steps", "noise_draws", "gradient_accumulation"), 1),
    **dict.fromkeys(("log_interval", "save_interval", "validation_interval", "keep_last"), 1),
    **dict.fromkeys(("keep_period", "start_weight"), 1),
    **dict.fromkeys(("num_workers", "seed", "validation_episodes", "start_frames"), 0),
}


@register("train")
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run: the model, the data, how it is trained and where it is stored."""

    # The preset's name.
    name: tyro.conf.Suppress[str]
    # The run's name; checkpoints go to <checkpoint_base_dir>/<name>/<exp_name>.
    exp_name: str = tyro.MISSING
    # The model and its sizes.
    model: ModelConfig = Pi0Config()
    # The data set and its robot, or a mixture of several.
    data: DataSource = tyro.MISSING
    # The checkpoint to start from (any known format); None: random weights.
    weights: str | None = None
    # Patterns of our parameter names that the checkpoint may lack, e.g. "*lora*".
    allow_missing: tuple[str, ...] = ()
    # Patterns of parameter names that do not train; "!" makes an exception, e.g. vlm.* !*lora*
    freeze: tuple[str, ...] = ()
    # The learning rate over the steps. A preset in Python may choose RsqrtDecaySchedule.
    lr_schedule: LRSchedule = CosineDecaySchedule()
    # The optimizer's numbers.
    optimizer: OptimizerConfig = AdamW()
    # Decay of the running mean of the weights, which is what is served; None: no mean.
    ema_decay: float | None = 0.99
    # Random crops, rotations and colours of the images (never for π0-FAST).
    augmentation: bool = True
    # Samples of noise and time per data sample; they share one pass over images and prompt.
    noise_draws: int = 1
    # This many frames at the start of every episode are drawn `start_weight` times as often: there
    # the robot does not yet cover what it has to see. 0: none.
    start_frames: int = 0
    # How many times as often the first frames are drawn.
    start_weight: int = 1
    # Parts into which each process splits its share of a batch, to need less memory.
    gradient_accumulation: int = 1
    # Compute activations again in the backward pass instead of keeping them.
    gradient_checkpointing: bool = False
    # Compile the layers with torch.compile.
    compile: bool = False
    # How several processes (torchrun) share the work: ddp copies the model, fsdp shards it.
    sharding: Sharding = "none"
    # Leave steps beyond the end of an episode out of the loss.
    mask_padded_steps: bool = False
    # Leave action dimensions that the robot does not have out of the loss.
    mask_padded_dims: bool = False
    # Episodes of each data set held out of training to validate on; 0: none.
    validation_episodes: int = 0
    # Steps between validations.
    validation_interval: int = 1_000
    # Decode and resize all frames once, into a file that later runs use too.
    cache_frames: bool = False
    # Seed of everything random in the run.
    seed: int = 42
    # Samples per step, over all processes.
    batch_size: int = 32
    # Processes that read data, per training process; 0: the training process itself.
    num_workers: int = 2
    # Steps in total.
    num_train_steps: int = 30_000
    # Steps between log lines.
    log_interval: int = 100
    # Steps between checkpoints.
    save_interval: int = 1_000
    # Checkpoints at multiples of this are kept for good; None: none.
    keep_period: int | None = 5_000
    # This many of the newest checkpoints are kept as well.
    keep_last: int = 1
    # Delete a run of the same name and start again; a folder that is no run is not deleted.
    overwrite: bool = False
    # Continue the run of the same name from its newest checkpoint.
    resume: bool = False
    # Where metrics are sent besides metrics.jsonl.
    tracking: tuple[Tracker, ...] = ()
    # Sent to every client that connects, e.g. the pose to start from.
    policy_metadata: tyro.conf.Suppress[Mapping[str, Any] | None] = None
    # Where the preset's own statistics are.
    assets_base_dir: str = "./assets"
    # Where runs are stored.
    checkpoint_base_dir: str = "./checkpoints"

    def __post_init__(self) -> None:
        for flag, value in (("name", self.name), ("exp-name", self.exp_name)):
            # A run's folder may be deleted, so its name must not lead elsewhere.
            if value is not tyro.MISSING and (value in ("", "..") or Path(value).name != value):
                raise ValueError(f"--{flag} is {value!r}; as a folder it must be one plain name.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be at least {least}, is {value}.")
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ValueError(f"--ema-decay must lie between 0 and 1, is {self.ema_decay}.")
        if self.resume and self.overwrite:
            raise ValueError(
                "--resume continues a run and --overwrite deletes it: they contradict each other. "
                "Leave one out (--no-overwrite if the preset sets it)."
            )
        if self.allow_missing and self.weights is None:
            raise ValueError("--allow-missing lists exceptions to --weights, which is not given.")
        if (self.start_frames > 0) != (self.start_weight > 1):
            raise ValueError(
                f"--start-frames is {self.start_frames}, --start-weight {self.start_weight}: one "
                "does nothing without the other. Set both, e.g. 48 and 3, or neither."
            )
        self._check_adapters()
        self._check_flow_options()
        self._check_mixture()

    def _check_adapters(self) -> None:
        """Raise ValueError if there are LoRA adapters but all other weights would train as well."""
        adapted = [name for name in self.model.experts if getattr(self.model, name).lora]
        if adapted and all(pattern.startswith("!") for pattern in self.freeze):
            patterns = " ".join(f"'{name}.*'" for name in adapted)
            raise ValueError(
                f"{' and '.join(adapted)} have LoRA adapters, but nothing is frozen: all weights "
                f"would train as well. Set --freeze {patterns} '!*lora*', or choose a size without "
                "LoRA."
            )

    def _check_flow_options(self) -> None:
        """Raise ValueError if an option would have no effect on a model that writes tokens."""
        flags = "--noise-draws", "--mask-padded-steps", "--mask-padded-dims"
        are_set = self.noise_draws > 1, self.mask_padded_steps, self.mask_padded_dims
        if any(are_set) and not self.model.denoises:
            raise ValueError(
                f"{', '.join(itertools.compress(flags, are_set))} would do nothing: "
                f"{self.model.family} learns tokens, without noise or padded actions."
            )

        if getattr(self.model, "distilled_steps", None) and self.noise_draws < 2:
            raise ValueError(
                f"--noise-draws is {self.noise_draws}; expected at least 2 to distil: half of them "
                "train ordinary denoising, the others the steps that replace it."
            )

    def _check_mixture(self) -> None:
        """Raise ValueError if the actions of different robots would be mixed up in the loss."""
        if self.data is tyro.MISSING:
            return
        factories = self.data.entries
        if "" in factories and factories[""].share is not None:
            raise ValueError("--data.share would do nothing: there is only one robot.")
        if len(factories) > 1 and not self.model.denoises:
            raise ValueError(
                f"{self.name} mixes {self.data.robot}, but {self.model.family} writes the actions "
                "of one robot only. Train π0 or π0.5 with --model.targets fast instead."
            )
        if len(factories) > 1 and not (self.mask_padded_steps and self.mask_padded_dims):
            raise ValueError(
                f"{self.name} mixes {self.data.robot}, which need not have the same action "
                "dimensions: set --mask-padded-dims and --mask-padded-steps."
            )

    @property
    def assets_dirs(self) -> Path:
        return Path(self.assets_base_dir) / self.name

    @property
    def checkpoint_dir(self) -> Path:
        if self.exp_name is tyro.MISSING:
            raise ValueError("The run has no name: give --exp-name.")
        return Path(self.checkpoint_base_dir) / self.name / self.exp_name

    def data_config(self) -> DataConfig:
        """Return the pipeline of the only robot. Raise ValueError if there are several."""
        if "" not in self.data.entries:
            known = ", ".join(self.robots)
            raise UnknownRobot(f"{self.name} is for several robots: name one of {known}.")
        return self.data.entries[""].create(self.assets_dirs, self.model)

    def pipelines(self) -> tuple[DataConfig, ...]:
        """Return the pipeline of every data set: of all robots, and of all sets of each."""
        sets: list[DataConfig] = []
        folders: dict[str, str] = {}
        for entry, factory in self.data.entries.items():
            try:
                pipeline = factory.create(self.assets_dirs, self.model)
            except ValueError as error:
                if entry:
                    error.add_note(f"in the data of {entry}")
                raise
            pipeline = dataclasses.replace(pipeline, entry=entry, set_index=len(sets))
            if pipeline.has_actions and not pipeline.fake and pipeline.asset_id is not None:
                other = folders.setdefault(pipeline.asset_id, entry)
                if other != entry:
                    raise ValueError(
                        f"The statistics of {other} and {entry} would both be named "
                        f"{pipeline.asset_id!r}. Set {pipeline.flag('assets.asset-id')}."
                    )
            sets += pipeline.each_set()
        return tuple(sets)

    @property
    def robots(self) -> list[str]:
        """The names of the robots of a mixture, without pictures with questions."""
        return [name for name, one in self.data.entries.items() if one.has_actions]

    def for_robot(self, name: str) -> TrainConfig:
        """Return the configuration of one robot of a mixture, as if it were the only one."""
        factories = self.data.entries
        if "" in factories:
            raise UnknownRobot(f"{self.name} is of one robot, {self.data.robot}: name none.")
        if name not in self.robots:
            raise UnknownRobot.named(name, self.robots)
        metadata = dict(self.policy_metadata or {})
        metadata |= metadata.pop(ROBOTS, {}).get(name, {})
        data = dataclasses.replace(factories[name], share=None)
        return dataclasses.replace(self, data=data, policy_metadata=metadata)
