"""Reference cases as tests use them: configuration, weights, inputs and expected outputs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from piston.models.autoregressive import Pi0FAST
from piston.models.configs import Pi0Config, Pi0FASTConfig
from piston.models.flow import Pi0
from piston.models.variants import GemmaSize, LoRA, VisionSize
from piston.observation import Observation
from piston.weights.loading import load_model

_PROMPT = ("tokenized_prompt", "tokenized_prompt_mask", "token_ar_mask", "token_loss_mask")


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
    def config(self) -> Pi0Config | Pi0FASTConfig:
        facts, lora = self.facts, self.facts.get("lora") or {}
        shared = {
            "vision": VisionSize(**facts["vision"]),
            "vlm": _gemma(facts["vlm"], lora.get("vlm")),
            "cameras": tuple(facts["image_keys"]),
            "dtype": "float32",
        } | {
            name: facts[name]
            for name in (
                "vocab_size",
                "action_dim",
                "action_horizon",
                "max_token_len",
                "image_size",
            )
        }
        if facts["model"] == "pi0_fast":
            return Pi0FASTConfig(**shared, max_decoding_steps=facts["max_decoding_steps"])
        expert = _gemma(facts["expert"], lora.get("expert"))
        return Pi0Config(**shared, action_expert=expert, pi05=facts["model"] == "pi05")

    def model(self) -> Pi0 | Pi0FAST:
        file = self.folder / "model.safetensors"
        return load_model(file if file.exists() else self.folder / "params", self.config)

    def observation(self, prompt: str = "in") -> Observation:
        batch = {
            part: {camera: self.arrays[f"in/{part}/{camera}"] for camera in self.config.cameras}
            for part in ("image", "image_mask")
        }
        prompts = {
            name: self.arrays[f"{prompt}/{name}"]
            for name in _PROMPT
            if f"{prompt}/{name}" in self.arrays
        }
        return Observation.from_dict({**batch, **prompts, "state": self.arrays["in/state"]})

    def input(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[f"in/{name}"])

    def output(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[f"out/{name}"])


def _gemma(numbers: dict, lora: dict | None) -> GemmaSize:
    return GemmaSize(**numbers, lora=LoRA(**lora) if lora else None)
