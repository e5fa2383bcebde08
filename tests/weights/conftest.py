"""Small models and the configurations of the reference cases."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.cases import model_config

from piston.models.configs import GemmaSize, LoRA, ModelConfig, Pi0Config, Pi0FASTConfig, VisionSize
from piston.weights import build_model

_SIZES: dict[str, Any] = {
    "vision": VisionSize(width=24, depth=2, mlp_dim=40, num_heads=3, patch=8),
    "vlm": GemmaSize(width=20, depth=2, mlp_dim=28, num_heads=4, num_kv_heads=2, head_dim=6),
    "vocab_size": 50,
    "image_size": 16,
    "action_dim": 5,
    "action_horizon": 4,
    "max_token_len": 7,
    "dtype": "float32",
}
_EXPERT = GemmaSize(width=12, depth=2, mlp_dim=16, num_heads=4, num_kv_heads=2, head_dim=6)
_ADAPTED = {
    "vlm": GemmaSize(20, 2, 28, 4, 2, 6, LoRA(3, 3.0)),
    "action_expert": GemmaSize(12, 2, 16, 4, 2, 6, LoRA(2, 2.0)),
}
TINY: dict[str, ModelConfig] = {
    "pi0": Pi0Config(**_SIZES, action_expert=_EXPERT),
    "pi05": Pi0Config(**_SIZES, action_expert=_EXPERT, pi05=True),
    "pi0_lora": Pi0Config(**{**_SIZES, **_ADAPTED}),
    "pi0_fast": Pi0FASTConfig(**_SIZES),
}


@pytest.fixture(scope="session")
def tiny() -> dict[str, ModelConfig]:
    """One small configuration per family; width ≠ heads · head size, several key heads."""
    return TINY


@pytest.fixture(scope="session")
def tiny_state() -> Callable[[str], dict[str, torch.Tensor]]:
    """The tensors of a small model, the same ones at every call."""

    def make(family: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        state = build_model(TINY[family]).state_dict()
        return {name: torch.randn_like(tensor) for name, tensor in state.items()}

    return make


@pytest.fixture(scope="session")
def reference_config(reference: Path) -> Callable[[str], ModelConfig]:
    """The configuration of a reference model, as its config.json states it."""

    def read(name: str) -> ModelConfig:
        facts = json.loads((reference / "models" / name / "config.json").read_text())
        return model_config(facts)

    return read
