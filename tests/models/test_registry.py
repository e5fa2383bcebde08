"""A model of one's own, which docs/extending.md shows: trained, served, inspected."""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.inspection import untrained
from tests.inspection.untrained import ROBOT, observation

from piston import presets, serialization, weights
from piston.cli import main
from piston.config import TrainConfig
from piston.inference.loading import load_policy, random_policy
from piston.inspection import Frames, Plan, compute
from piston.models import build
from piston.models.configs import ModelConfig, Pi0Config
from piston.models.flow import Pi0
from piston.robots.description import with_robot
from piston.weights import CheckpointError, build_model, convert, load_model, open_checkpoint

PROGRAM = Path(__file__).parents[2] / "examples" / "extending" / "action_head.py"
NEW = "suffix.action_out.more.*"


@pytest.fixture
def preset(tmp_path, monkeypatch) -> TrainConfig:
    """The program's preset with a robot and a dataset, and smaller."""
    monkeypatch.setattr(presets, "_BY_NAME", dict(presets._BY_NAME))
    monkeypatch.setattr(build, "_MODELS", dict(build._MODELS))
    for name in ("_classes", "_names", "_imported"):
        monkeypatch.setattr(serialization, name, copy.copy(getattr(serialization, name)))
    monkeypatch.chdir(tmp_path)
    serialization.import_file(PROGRAM)
    config = with_robot(presets.get("tiny_deep_head"), ROBOT)
    sizes = {
        "vision": untrained.VISION,
        "vlm": untrained.gemma(),
        "action_expert": untrained.gemma(14),
    }
    changes = {"image_size": untrained.IMAGE_SIZE, "head_width": 24, "action_horizon": 4}
    model = dataclasses.replace(config.model, **sizes, **changes)
    data = dataclasses.replace(config.data, repo_id=str(untrained.record(tmp_path / "set")))
    preset = dataclasses.replace(config, name="arm", model=model, data=data)
    yield presets.register(preset)
    del sys.modules["action_head"]


def test_it_trains_serves_and_is_inspected(preset, tmp_path):
    parent = Pi0Config(
        **{f.name: getattr(preset.model, f.name) for f in dataclasses.fields(Pi0Config)}
    )
    torch.manual_seed(0)
    weights.save_model(build_model(parent), parent, tmp_path / "pi0")
    assert main(["stats", "arm"]) == 0
    short = ["--num-train-steps", "2", "--batch-size", "2", "--noise-draws", "1"]
    start = ["--weights", str(tmp_path / "pi0"), "--allow-missing", NEW]
    command = ["train", "arm", "--exp-name", "x", "--num-workers", "0", *short]
    assert main([*command, "--weights", str(tmp_path / "pi0")]) == 1  # its tensors are missing
    assert main([*command, "--overwrite", *start]) == 0
    checkpoint = tmp_path / "checkpoints" / "arm" / "x" / "1"

    written = json.loads((checkpoint / "config.json").read_text())["model"]
    assert (written["type"], written["defined_in"]) == ("pi0_deep_head", "action_head")
    policy = load_policy(checkpoint)
    assert type(policy.model).__name__ == "DeepHeadPi0"
    assert policy.model.config == preset.model
    head = policy.model.suffix.action_out
    assert head.more[0].weight.shape == (24, 14)
    assert policy.infer(observation())["actions"].shape == (4, 3)
    quantized = load_policy(checkpoint, dtype="int8").model
    assert torch.equal(quantized.suffix.action_out.more[0].weight, head.more[0].weight)

    plan = Plan(frames=1, seeds=2, maps=0, episodes=1)
    found = compute(policy, Frames.open(policy, preset.data.repo_id), plan=plan)
    assert found.about["family"] == "π0 with a deep head"
    assert found.inside is not None


def test_its_tensors_are_read_strictly(preset, tmp_path):
    model = build_model(preset.model)
    weights.save_model(model, preset.model, tmp_path / "model")
    loaded = load_model(tmp_path / "model").state_dict()
    assert loaded.keys() == model.state_dict().keys()
    wider = dataclasses.replace(preset.model, head_width=32)
    with pytest.raises(CheckpointError, match=r"more\.0\.bias: found \(24,\), expected \(32,\)"):
        open_checkpoint(tmp_path / "model", wider)
    with pytest.raises(ValueError, match="which LeRobot.s models do not include"):
        convert(tmp_path / "model", tmp_path / "theirs", to="lerobot")


@pytest.mark.usefixtures("preset")
def test_a_tiny_policy_and_the_summary_know_it(capsys):
    assert type(random_policy("arm").model).__name__ == "DeepHeadPi0"
    assert main(["summary", "arm"]) == 0
    assert "π0 with a deep head" in capsys.readouterr().out


@dataclasses.dataclass(frozen=True)
class _Renamed(Pi0Config):
    family = "renamed"


def test_a_configuration_without_a_module_is_built_as_its_parent(preset):
    fields = {f.name: getattr(preset.model, f.name) for f in dataclasses.fields(Pi0Config)}
    assert type(build_model(_Renamed(**fields))) is Pi0


@dataclasses.dataclass(frozen=True)
class _OtherHead(ModelConfig):
    family = "regression"
    uses_quantiles = True
    state_in_prompt = False
    usual_prompt_length = 16


def test_a_new_family_says_how_its_numbers_and_prompts_are_made(preset):
    config = _OtherHead(tokenizer="bytes", action_dim=4)
    pipeline = preset.data.create(Path("assets"), config)
    assert pipeline.use_quantile_norm
    shown = np.zeros((8, 8, 3), np.uint8)
    seen = {"image": {"base_0_rgb": shown}, "image_mask": {"base_0_rgb": True}}
    seen |= {"state": np.ones(3, np.float32), "prompt": "go"}
    for transform in pipeline.model_transforms.inputs:
        seen = transform(seen)
    assert seen["tokenized_prompt"].shape == (16,)
    assert seen["tokenized_prompt_mask"].sum() == len("go\n") + 1  # and no state
    assert seen["state"].shape == (4,)
    silent = {name: value for name, value in vars(_OtherHead).items() if name == "family"}
    with pytest.raises(TypeError, match="state_in_prompt.*uses_quantiles.*usual_prompt_length"):
        type("Silent", (ModelConfig,), silent)()


@pytest.mark.usefixtures("preset")
def test_a_type_has_one_model_and_needs_one():
    with pytest.raises(ValueError, match="Pi0Config is the configuration of Pi0 already"):
        build.register_model(Pi0Config)(type("Other", (Pi0,), {}))
    with pytest.raises(TypeError, match="No model is registered for a SimpleNamespace"):
        build_model(type("SimpleNamespace", (), {})())
