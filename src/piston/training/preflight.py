"""What may be wrong and is cheap to see, looked at before anything slow: names, headers, columns.

Nothing here decodes a frame, builds a model with memory or changes a file.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from typing import Any

import tyro

from piston import presets, weights
from piston.config import DataConfig, TrainConfig
from piston.training.optimizer import freeze_parameters
from piston.weights.errors import check_match


def read_statistics(config: TrainConfig) -> DataConfig:
    """The pipeline with its statistics; where there are none, the command that computes them."""
    return config.data_config().with_norm_stats(_stats_arguments(config))


def check_freeze(config: TrainConfig) -> None:
    freeze_parameters(weights.build_on_meta(config.model), config.freeze)


def check_weights(config: TrainConfig) -> None:
    """Whether the checkpoint to start from is there and fits the model, by its header alone."""
    if config.weights is None:
        return
    checkpoint = weights.open_checkpoint(config.weights, config.model)
    check_match(
        weights.expected_shapes(config.model),
        checkpoint.shapes(),
        may_be_new=config.may_be_new,
        what=f"{checkpoint} does not fit the {config.model.family} model",
    )


def _stats_arguments(config: TrainConfig) -> str:
    """What `piston stats` needs for the statistics of this configuration."""
    try:
        preset = presets.get(config.name)
    except presets.UnknownPreset:
        return config.name
    words = [config.name, *_changed(preset.data, config.data, "--data.")]
    if config.model.action_horizon != preset.model.action_horizon:
        words += ["--model.action-horizon", str(config.model.action_horizon)]
    if config.assets_base_dir != preset.assets_base_dir:
        words += ["--assets-base-dir", config.assets_base_dir]
    return shlex.join(words)


def _changed(before: Any, now: Any, prefix: str) -> Iterator[str]:
    """Options for the fields in which two configurations differ."""
    for field in dataclasses.fields(now):
        value, own = getattr(now, field.name), getattr(before, field.name, None)
        name = field.name.replace("_", "-")
        if value == own or value is tyro.MISSING:
            continue
        if dataclasses.is_dataclass(value):
            yield from _changed(own, value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield f"{prefix}{'' if value else 'no-'}{name}"
        elif isinstance(value, tuple):
            yield from (f"{prefix}{name}", *map(str, value))
        elif value is None or isinstance(value, str | int | float):
            yield from (f"{prefix}{name}", str(value))
