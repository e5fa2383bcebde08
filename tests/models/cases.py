"""Reference cases as tests use them: configuration, weights, inputs and expected outputs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from piston.models.autoregressive import Pi0FAST
from piston.models.configs import ModelConfig
from piston.models.flow import Pi0
from piston.observation import Observation
from piston.verification.models import model_config, observation_of
from piston.weights import load_model


@dataclasses.dataclass(frozen=True)
class Case:
    folder: Path
    facts: dict
    arrays: dict[str, np.ndarray]

    @classmethod
    def read(cls, folder: Path) -> Case:
        with np.load(folder / "case.npz") as arrays:
            facts = json.loads((folder / "config.json").read_text())
            return cls(folder, facts, dict(arrays))

    @property
    def config(self) -> ModelConfig:
        return model_config(self.facts)

    def model(self) -> Pi0 | Pi0FAST:
        file = self.folder / "model.safetensors"
        return load_model(file if file.exists() else self.folder / "params", self.config)

    def observation(self, prompt: str = "in") -> Observation:
        return observation_of(self.arrays, prompt)

    def input(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[f"in/{name}"])

    def output(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[f"out/{name}"])
