"""Configuration of training runs and data pipelines: frozen dataclasses without side effects."""

from piston.config.data import AssetsConfig, DataConfig, DataConfigFactory, ModelTransformFactory
from piston.config.train import (
    TRAIN_SECTION,
    AdamW,
    CosineDecaySchedule,
    LRSchedule,
    RsqrtDecaySchedule,
    Sharding,
    TrainConfig,
)

__all__ = [
    "TRAIN_SECTION",
    "AdamW",
    "AssetsConfig",
    "CosineDecaySchedule",
    "DataConfig",
    "DataConfigFactory",
    "LRSchedule",
    "ModelTransformFactory",
    "RsqrtDecaySchedule",
    "Sharding",
    "TrainConfig",
]
