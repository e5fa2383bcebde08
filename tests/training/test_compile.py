"""Compiled layers compute what plain ones do."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from torch.testing import assert_close

from piston.training.loop import train_loop

from .running import environment, losses, state, tiny
from .tiny_presets import GEMMA, KI, PI0


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_compiled_training_equals_plain(tmp_path):
    # In a process of its own: what checks shapes in tests cannot be compiled.
    code = f"from tests.training.test_compile import compare; compare({str(tmp_path)!r})"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment(), check=True)


def compare(folder: str) -> None:
    # One layer of each kind: compiling is what takes long.
    one = dataclasses.replace(GEMMA, depth=1)
    for family in (PI0, KI):
        model = dataclasses.replace(family, vlm=one, action_expert=one)
        place = Path(folder) / model.family
        config = tiny(place, exp_name="plain", model=model, num_train_steps=2)
        plain = train_loop(config)
        compiled = train_loop(dataclasses.replace(config, exp_name="compiled", compile=True))
        assert losses(compiled.parent) == pytest.approx(losses(plain.parent), rel=1e-3)
        ours, theirs = state(compiled), state(plain)
        assert ours.keys() == theirs.keys()  # names stay as they are
        name = "model/action_expert.layers.0.mlp.up.weight"
        assert_close(ours[name], theirs[name], atol=1e-3, rtol=1e-2)
