"""Finding a preset and overriding it from the command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from piston import presets
from piston.cli.train import parse
from piston.models.configs import GEMMA


def test_a_wrong_name_suggests_the_nearest():
    with pytest.raises(presets.UnknownPreset, match="named 'pi0_alhoa'. Did you mean 'pi0_aloha'"):
        presets.get("pi0_alhoa")


def test_a_preset_cannot_be_registered_twice():
    with pytest.raises(ValueError, match="exists already"):
        presets.register(presets.get("debug"))


def test_overrides_of_any_depth():
    config = parse(
        ["pi0_aloha", "--exp-name", "x", "--batch-size", "8", "--resume", "--data.repo-id", "a/b"]
        + ["--model.action-horizon", "10", "--data.default-prompt", "pick up the cup"]
        + ["--lr-schedule.peak-lr", "1e-4", "--data.assets.asset-id", "mine"]
        + ["--model.vlm", "gemma_2b_lora", "--freeze", "vlm.*", "!*lora*"]
    )
    assert (config.name, config.exp_name, config.batch_size) == ("pi0_aloha", "x", 8)
    assert config.resume
    assert config.model.action_horizon == 10
    assert config.model.vlm == GEMMA["gemma_2b_lora"]
    assert config.data.default_prompt == "pick up the cup"
    assert config.data.assets.asset_id == "mine"
    assert config.lr_schedule.peak_lr == 1e-4
    assert config.freeze == ("vlm.*", "!*lora*")
    assert config.policy_metadata == {"reset_pose": [0, -1.5, 1.5, 0, 0, 0]}


def test_what_is_not_overridden_stays():
    config = parse(["debug"])
    assert config == presets.get("debug")


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["debug", "--batchsize", "3"])
    assert "--batch-size" in capsys.readouterr().err


def test_a_run_needs_its_own_name(capsys):
    with pytest.raises(SystemExit):
        parse(["pi0_aloha_sim"])
    assert "exp-name" in capsys.readouterr().err


def test_a_module_of_ones_own_is_known_to_every_command(tmp_path):
    (tmp_path / "my_presets.py").write_text(
        "import dataclasses\n"
        "from piston import presets\n"
        "presets.register(dataclasses.replace(presets.get('debug'), name='mine'))\n"
    )
    command = [sys.executable, "-m", "piston.cli", "presets", "mine"]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PISTON_PRESETS": "my_presets", "PYTHONPATH": paths}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "name = 'mine'" in result.stdout
    environment["PISTON_PRESETS"] = "not_there"
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "PISTON_PRESETS names 'not_there'" in result.stderr


ROBOT = """
import dataclasses
from piston.robots import RobotDataConfig, RobotInputs
from piston.serialization import register

@register("my_robot")
@dataclasses.dataclass(frozen=True)
class MyDataConfig(RobotDataConfig):
    inputs = RobotInputs("MyRobot", {"front": "base_0_rgb"}, {"joints": 2}, {"actions": 2})
"""


def test_a_module_that_is_not_on_the_path_is_named_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "mine_alone.py").write_text("from piston import presets\npresets.names()\n")
    (tmp_path / "json.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def read(named):
        monkeypatch.setenv("PISTON_PRESETS", named)
        presets.import_user_presets.__wrapped__()

    with pytest.raises(ValueError, match="mean the file: PISTON_PRESETS=mine_alone.py\\?"):
        read("mine_alone")
    with pytest.raises(ValueError, match="There is no Python file"):
        read("other.py")
    with pytest.raises(ValueError, match="A module named 'json' is imported already"):
        read("json.py")
    read(f"mine_alone.py, {tmp_path}/mine_alone.py")
    assert sys.modules.pop("mine_alone").__file__ == str(tmp_path / "mine_alone.py")
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("tag", ["my_robot", "my_module:MyDataConfig"], ids=["0.2", "0.1.0"])
def test_a_robot_of_ones_own_is_read_if_its_module_is_named(tmp_path, tag):
    (tmp_path / "my_module.py").write_text(ROBOT)
    data = {"type": "train", "name": "mine", "exp_name": "x", "data": {"type": tag}}
    read = f"from piston import presets; print(presets.train_config_from_json({data}, 'a.json'))"
    command = [sys.executable, "-c", read]
    environment = {**os.environ, "PISTON_PRESETS": "my_module"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "data=MyDataConfig(" in result.stdout, result.stderr
    # Not imported without being asked for, although Python would find it in the current folder.
    del environment["PISTON_PRESETS"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert f"a.json.data is of type '{tag}', which is not registered" in result.stderr
    given = "my_module.py" if ":" in tag else "my_robot.py"
    assert f"PISTON_PRESETS=/path/to/{given}" in result.stderr


CHECKPOINTS = Path(__file__).parents[1] / "reference" / "checkpoints_0.1.0"
WITNESS = "from pathlib import Path; Path({path!r}).write_text('executed')\n"


@pytest.mark.parametrize("how", [[], ["-P"]], ids=["python -m", "as the installed command"])
def test_files_beside_a_checkpoint_are_never_imported(tmp_path, how):
    """Neither a module that config.json names nor one with the name of a module not installed."""
    checkpoint, witness = tmp_path / "checkpoint", tmp_path / "witness"
    shutil.copytree(CHECKPOINTS / "pi0_aloha", checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config["train"]["data"]["type"] = "evil:DataConfig"
    (checkpoint / "config.json").chmod(0o644)
    (checkpoint / "config.json").write_text(json.dumps(config))
    for module in ("evil", "evil_presets"):
        (checkpoint / f"{module}.py").write_text(WITNESS.format(path=str(witness)))
    command = [sys.executable, *how, "-m", "piston.cli"]

    def run(*words: str, **variables: str) -> str:
        environment = {**os.environ, **variables}
        result = subprocess.run(
            [*command, *words], cwd=checkpoint, env=environment, capture_output=True, text=True
        )
        assert "Traceback" not in result.stderr
        return result.stderr

    assert "'evil:DataConfig', which is not registered" in run("serve", ".")
    assert not witness.exists()
    # A preset that imports what is not installed does not find it in the current folder.
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "mine.py").write_text("import evil_presets\n")
    # An empty entry in PYTHONPATH would be the current folder.
    before = filter(None, [os.environ.get("PYTHONPATH")])
    paths = os.pathsep.join([str(tmp_path / "modules"), *before])
    if how:  # `python -m` itself, not Piston, puts the current folder first
        message = run("presets", PISTON_PRESETS="mine", PYTHONPATH=paths)
        assert "No module named 'evil_presets'" in message
        assert "PISTON_PRESETS names 'evil_presets'" in run(
            "presets", PISTON_PRESETS="evil_presets"
        )
    assert not witness.exists()
