"""Reference cases as tests use them: configuration, weights, inputs and expected outputs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piston.models.autoregressive import Pi0FAST
from piston.models.configs import GemmaSize, LoRA, ModelConfig, Pi0Config, Pi0FASTConfig, VisionSize
from piston.models.flow import Pi0
from piston.observation import Observation
from piston.verification.models import observation_of
from piston.weights import load_model


def model_config(facts: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that a case states, computed in float32."""
    lora = facts.get("lora") or {}

    def expert(name: str) -> GemmaSize:
        return GemmaSize(**facts[name], lora=LoRA(**lora[name]) if name in lora else None)

    shared: dict[str, Any] = {
        "action_dim": facts["action_dim"],
        "action_horizon": facts["action_horizon"],
        "max_token_len": facts["max_token_len"],
        "dtype": "float32",
        "vision": VisionSize(**facts["vision"]),
        "vlm": expert("vlm"),
        "vocab_size": facts["vocab_size"],
        "image_size": facts["image_size"],
        "cameras": tuple(facts["image_keys"]),
    }
    if facts["model"] == "pi0_fast":
        return Pi0FASTConfig(**shared, max_decoding_steps=facts["max_decoding_steps"])
    return Pi0Config(**shared, action_expert=expert("expert"), pi05=facts["model"] == "pi05")


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
