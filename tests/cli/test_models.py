"""`piston summary` and `piston convert`, as a person runs them."""

import json
from typing import get_args

import pytest
import torch

from piston import weights
from piston.cli import main, models
from piston.models.configs import GEMMA, VISION, Pi0Config


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    config = Pi0Config(
        vision=VISION["dummy"], vlm=GEMMA["dummy"], action_expert=GEMMA["dummy"], vocab_size=300
    )
    weights.save_model(weights.build_model(config), config, tmp_path / "model")
    return tmp_path / "model"


def test_summary_of_a_preset(capsys):
    assert main(["summary", "pi0_aloha"]) == 0
    shown = capsys.readouterr().out
    # The released π0: 3.24 billion parameters, 256 tokens per camera.
    for part in ("3,238,048,528", "2,508,531,712", "256", "state", "12.95 GB", "6.49 GB"):
        assert part in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("state ")]
    assert rows == [["state", "■", "■", "■", "·"]]


def test_summary_of_pi05_has_no_state_token(capsys):
    assert main(["summary", "pi05_aloha"]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("state ")]


def test_summary_of_a_checkpoint(checkpoint, capsys):
    assert main(["summary", str(checkpoint)]) == 0
    assert "from a piston checkpoint" in capsys.readouterr().out


def test_neither_preset_nor_checkpoint(capsys):
    assert main(["summary", "pi0_alhoa"]) == 1
    assert "Did you mean 'pi0_aloha'" in capsys.readouterr().err


def test_convert_halves_and_refuses_to_overwrite(checkpoint, tmp_path, capsys):
    target = tmp_path / "half"
    assert main(["convert", str(checkpoint), str(target), "--dtype", "bfloat16"]) == 0
    half = weights.open_checkpoint(target)
    assert half.tensor("vlm.layers.0.mlp.up.weight").dtype == torch.bfloat16
    assert half.tensor("vlm.layers.0.mlp_norm.scale").dtype == torch.float32
    assert main(["convert", str(checkpoint), str(target)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_convert_to_lerobot_and_back_with_the_sizes(checkpoint, tmp_path, capsys):
    assert main(["convert", str(checkpoint), str(tmp_path / "theirs"), "--to", "lerobot"]) == 0
    state = weights.load_model(checkpoint).state_dict()
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    assert config["paligemma_variant"] == "dummy"
    command = ["convert", str(tmp_path / "theirs"), str(tmp_path / "back")]
    assert main([*command, "--vlm", "gemma_2b"]) == 1
    assert "vlm is stated as gemma_2b (--vlm" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--vlm", "dummy", "--action-expert", "dummy", "--vision", "dummy"]) == 0
    back = weights.load_model(tmp_path / "back").state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_convert_knows_the_formats_without_importing_them():
    assert get_args(models.Format) == weights.FORMATS


def test_convert_checks_a_preset(checkpoint, tmp_path, capsys):
    assert main(["convert", str(checkpoint), str(tmp_path / "x"), "--preset", "pi0_aloha"]) == 1
    assert "does not fit the π0 model" in capsys.readouterr().err
