"""What distilling changes in the configuration of a training run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from piston.config import CosineDecaySchedule, TrainConfig
from piston.models.configs import Pi0Config


def distilled(config: TrainConfig, checkpoint: Path) -> TrainConfig:
    """Return how a checkpoint that was trained with `config` is distilled to one step."""
    model = config.model
    if not isinstance(model, Pi0Config):
        raise ValueError(f"{checkpoint} is a {model.family}, which does not denoise.")
    if model.distilled_steps is not None:
        raise ValueError(f"{checkpoint} was distilled already, to {model.distilled_steps} steps.")
    schedule = config.lr_schedule
    warmup = schedule.warmup_steps // 2
    schedule = dataclasses.replace(schedule, peak_lr=schedule.peak_lr / 2, warmup_steps=warmup)
    if isinstance(schedule, CosineDecaySchedule):
        decay_steps = max(warmup + 1, schedule.decay_steps // 2)
        decay_lr = schedule.decay_lr / 2
        schedule = dataclasses.replace(schedule, decay_steps=decay_steps, decay_lr=decay_lr)
    # Adapters stay adapters: what they adapt is frozen.
    adapted = ("action_expert.*", "!action_expert.*lora*") if model.action_expert.lora else ()
    return dataclasses.replace(
        config,
        exp_name=tyro.MISSING,
        model=dataclasses.replace(model, distilled_steps=1),
        # The statistics are those that the checkpoint was trained with.
        data=config.data.with_assets(str(checkpoint.resolve() / "assets")),
        weights=str(checkpoint.resolve()),
        allow_missing=("suffix.time.target.*",),
        freeze=("vision.*", "vlm.*", *adapted),
        noise_draws=max(2, config.noise_draws),
        num_train_steps=max(1, config.num_train_steps // 2),
        lr_schedule=schedule,
        resume=False,
        overwrite=False,
    )
