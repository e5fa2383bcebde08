"""No robot: random samples in the model's own shapes, to try everything that is not data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from piston.config import DataConfig, DataConfigFactory
from piston.models.configs import ModelConfig
from piston.serialization import register


@register("fake")
@dataclasses.dataclass(frozen=True)
class FakeDataConfig(DataConfigFactory):
    """Random samples; needs no files and no statistics."""

    robot: ClassVar[str] = "fake"

    # Only a name; nothing is read.
    repo_id: str = "fake"

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:  # noqa: ARG002
        return DataConfig(repo_id=self.repo_id, fake=True)
