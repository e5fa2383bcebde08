"""A robot of one's own in Python, named by its file: trained with workers, served elsewhere."""

import copy
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from piston import presets, serialization
from piston.cli import main
from piston.data.record import Recorder
from piston.inference.loading import load_policy
from piston_client.examples import example_observation

ROBOT = """
import dataclasses

from piston import presets
from piston.robots import RobotDataConfig, RobotInputs
from piston.serialization import register
from piston.transforms import Group

ARM = RobotInputs(
    "MyArm",
    {"front": "base_0_rgb"},
    {"joints": ("a", "b")},
    {"actions": ("a", "b")},
    columns={"front": "image", "joints": "state", "actions": "action"},
)


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float

    def __call__(self, data):
        scaled = {key: self.factor * data[key] for key in ("state", "actions") if key in data}
        return {**data, **scaled}


@register("my_arm")
@dataclasses.dataclass(frozen=True)
class MyArmDataConfig(RobotDataConfig):
    inputs = ARM

    def conversions(self):
        return Group([Scale(0.5)], [Scale(2.0)])


presets.register(
    dataclasses.replace(
        presets.get("tiny_robot"),
        name="my_arm",
        data=MyArmDataConfig(prompt_from_task=True, norm_floor=0.01),
    )
)
"""

READ = """
import json, sys
from piston import presets
config = json.load(open(sys.argv[1]))["train"]
print(presets.train_config_from_json(config, "config.json").data.robot)
"""


def record(folder):
    features = {
        "image": {"dtype": "image", "shape": [32, 32, 3]},
        "state": {"dtype": "float32", "shape": [2]},
        "action": {"dtype": "float32", "shape": [2]},
    }
    with Recorder(folder, 10, features) as recorder:
        for step in range(12):
            values = np.float32([step, 2 * step])
            image = np.zeros((32, 32, 3), np.uint8)
            recorder.add_frame({"image": image, "state": values, "action": values}, "move")
        recorder.save_episode()


@pytest.fixture
def own_registries(monkeypatch):
    monkeypatch.setattr(presets, "_BY_NAME", dict(presets._BY_NAME))
    for name in ("_classes", "_names", "_imported"):
        monkeypatch.setattr(serialization, name, copy.copy(getattr(serialization, name)))
    yield
    sys.modules.pop("my_arm", None)


@pytest.mark.usefixtures("own_registries")
def test_a_file_is_enough_and_its_absence_is_explained(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "my_arm.py").write_text(ROBOT)
    record(tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PISTON_PRESETS", "here/my_arm.py")
    presets.import_user_presets.__wrapped__()
    monkeypatch.delenv("PISTON_PRESETS")  # the server of workers would keep it for later tests
    # A worker has to know the class of the robot's transform, which is not on Python's path.
    options = ["my_arm", "--data.repo-id", "set", "--num-workers", "1", "--no-cache-frames"]
    assert main(["stats", *options]) == 0
    short = ["--num-train-steps", "1", "--batch-size", "2", "--noise-draws", "1", "--exp-name", "x"]
    assert main(["train", *options, *short]) == 0
    checkpoint = tmp_path / "checkpoints" / "my_arm" / "x" / "0"
    policy = load_policy(checkpoint)
    assert policy.infer(example_observation(policy.metadata))["actions"].shape == (16, 2)
    for given, expected in (
        ("", "The module 'my_arm' defined it .*PISTON_PRESETS=/path/to/my_arm.py"),
        ("here/my_arm.py", "MyArm"),
    ):
        result = subprocess.run(
            [sys.executable, "-P", "-c", READ, checkpoint / "config.json"],
            env={**os.environ, "PISTON_PRESETS": given},
            capture_output=True,
            text=True,
        )
        assert re.search(expected, result.stdout + result.stderr)
