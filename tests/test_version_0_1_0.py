"""Checkpoints that version 0.1.0 wrote load, and give the actions that they gave there.

`presets.json` holds every preset of that version as it stood in a checkpoint's `config.json`.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tyro

import piston
from piston import presets, weights
from piston.serialization import from_json

FOLDER = Path(__file__).parent / "reference" / "checkpoints_0.1.0"
PRESETS = json.loads((FOLDER / "presets.json").read_text())


def _observation(case):
    images = {k.removeprefix("image/"): v for k, v in case.items() if k.startswith("image/")}
    others = {k: v for k, v in case.items() if not k.startswith("image/") and k not in ("actions",)}
    return {**others, "prompt": str(case["prompt"])} | ({"images": images} if images else {})


@pytest.mark.parametrize("name", ["pi0_aloha", "pi05_libero"])
@pytest.mark.parametrize("converted", [False, True])
def test_checkpoint_gives_the_same_actions(name, converted, tmp_path):
    case, folder = dict(np.load(FOLDER / name / "case.npz")), FOLDER / name
    if converted:
        weights.convert(folder, folder := tmp_path / "new")
    found = piston.load_policy(folder).infer(_observation(case), seed=7)["actions"]
    # The same arithmetic; another processor may round its sums in another order.
    np.testing.assert_allclose(found, case["actions"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_configuration_is_read_as_the_preset(name):
    found = from_json(PRESETS[name])
    # Presets of that version deleted an earlier run of theirs by themselves.
    overwrite = name.startswith("debug")
    preset = dataclasses.replace(presets.get(name), exp_name="v010", overwrite=overwrite)
    if preset.data.repo_id is tyro.MISSING:
        preset = dataclasses.replace(
            preset, data=dataclasses.replace(preset.data, repo_id="you/set")
        )
    assert found == preset
