"""Loaded weights compute what the reference computed, whichever file they came from."""

from typing import Any

import numpy as np
import pytest
import torch

from piston.verification.models import observation_of
from piston.weights import convert, load_model


def read_case(folder) -> dict[str, Any]:
    with np.load(folder / "case.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("pi0", "params"),
        ("pi0", "model.safetensors"),
        ("pi05", "params"),
        ("pi05", "model.safetensors"),
        ("pi0_lora", "params"),
    ],
)
def test_velocity(reference, reference_config, tmp_path, name, file):
    folder = reference / "models" / name
    config = reference_config(name)
    case = read_case(folder)
    convert(folder / file, tmp_path / "ours", config=config)
    for model in (load_model(folder / file, config), load_model(tmp_path / "ours")):
        with torch.no_grad():
            found = model.velocity(
                case["in/noise"] * case["in/time"][:, None, None]
                + case["in/actions"] * (1 - case["in/time"][:, None, None]),
                case["in/time"],
                model.prefill(observation_of(case)),
            )
        assert (found - case["out/velocity"]).abs().max() < 1e-4


def test_fast_loss(reference, reference_config):
    folder = reference / "models" / "pi0_fast"
    case = read_case(folder)
    model = load_model(folder / "params", reference_config("pi0_fast"))
    with torch.no_grad():
        loss = model.training_losses(observation_of(case), None, {})["tokens"]
    torch.testing.assert_close(loss, case["out/loss"], rtol=1e-4, atol=1e-5)
