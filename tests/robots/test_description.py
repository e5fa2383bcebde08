"""Robots that a file describes: reading, errors, names, grippers, the way into a checkpoint."""

import dataclasses
import re

import numpy as np
import pytest
import tyro

from piston import presets
from piston.cli.train import parse
from piston.config import AssetsConfig
from piston.inference.loading import random_policy
from piston.robots.description import read_robot, with_robot
from piston.serialization import from_json, to_json
from piston.transforms import compose
from piston.transforms.normalize import NormStats

FILE = """
name = "my_arm"
rate = 20
prompt = "pick up the fork"
relative = ["joint_1", "joint_2"]

[cameras]
"observation.images.front" = "base_0_rgb"
observation.images.wrist = "left_wrist_0_rgb"  # without quotes: the same

[state]
"observation.gripper" = ["gripper"]
"observation.joints" = ["joint_1", "joint_2"]

[actions]
"action" = ["joint_1", "joint_2", "gripper"]

[grippers]
gripper = { open = 0.08, closed = 0.0 }
"""


@pytest.fixture
def robot(tmp_path):
    path = tmp_path / "my_arm.toml"
    path.write_text(FILE)
    return read_robot(path)


def pipeline_of(robot):
    preset = with_robot(presets.get("tiny_robot"), robot)
    stats = {key: NormStats(np.zeros(3), np.ones(3)) for key in ("state", "actions")}
    return dataclasses.replace(preset.data_config(), norm_stats=stats)


def item(actions):
    image = np.zeros((8, 8, 3), np.uint8)
    return {
        "observation.images.front": image,
        "observation.images.wrist": image,
        "observation.gripper": np.float32([0.04]),
        "observation.joints": np.float32([1.0, 2.0]),
        "action": np.float32(actions),
    }


def test_relative_dimensions_and_grippers_are_found_by_name_in_both_directions(robot):
    pipeline = pipeline_of(robot)
    recorded = [[1.5, 2.25, 0.08], [1.0, 3.0, 0.0]]
    seen = compose(pipeline.input_transforms(training=True))(item(recorded))
    np.testing.assert_allclose(seen["state"][:3], [0.5, 1.0, 2.0], atol=1e-5)
    expected = [[0.5, 0.25, 0.0], [0.0, 1.0, 1.0]]
    np.testing.assert_allclose(seen["actions"][:, :3], expected, atol=1e-5)
    back = compose(pipeline.output_transforms())(seen)["actions"]
    np.testing.assert_allclose(back, recorded, atol=1e-5)
    assert pipeline.action_sequence_keys == ("action",)


def test_a_chunk_of_the_robot_is_read_like_the_data_set(robot):
    """Real-time chunking sends what is left of the old chunk as "actions"."""
    columns = item([[1.5, 2.25, 0.08]])
    chunk = {**columns, "actions": columns.pop("action")}
    np.testing.assert_array_equal(
        robot(chunk)["actions"], robot(item([[1.5, 2.25, 0.08]]))["actions"]
    )


def test_actions_of_several_columns_are_joined(tmp_path):
    path = tmp_path / "arm.toml"
    path.write_text(
        FILE.replace(
            '"action" = ["joint_1", "joint_2", "gripper"]',
            '"arm" = ["joint_1", "joint_2"]\n"hand" = ["gripper"]',
        )
    )
    robot = read_robot(path)
    pipeline = pipeline_of(robot)
    assert pipeline.action_sequence_keys == ("arm", "hand")
    data = {**item([[0, 0, 0]]), "arm": np.float32([[1.5, 2.25]]), "hand": np.float32([[0.08]])}
    seen = compose(pipeline.input_transforms(training=True))(data)
    np.testing.assert_allclose(seen["actions"][0, :3], [0.5, 0.25, 0.0], atol=1e-5)


def test_the_description_travels_with_the_configuration(robot):
    config = with_robot(presets.get("pi0_aloha_pen_uncap"), robot)
    assert config.data.repo_id is tyro.MISSING
    assert config.data.assets == AssetsConfig()
    data = dataclasses.replace(config.data, repo_id="me/arm")
    config = dataclasses.replace(config, data=data, exp_name="x")
    assert from_json(to_json(config)) == config
    assert config.data.robot == "my_arm"


def test_the_file_s_prompt_is_the_default(robot):
    config = with_robot(presets.get("pi0_aloha_sim"), robot)
    policy = random_policy(config)
    example = robot.example()
    del example["prompt"]
    assert policy.infer(example)["actions"].shape == (50, 3)
    assert policy.metadata["observation"]["prompt"]["required"] is False
    assert policy.metadata["control_hz"] == 20


def test_unnamed_dimensions_are_called_by_position(tmp_path):
    path = tmp_path / "arm.toml"
    path.write_text(
        'name = "arm"\nrelative = ["dim_0"]\ncameras = {}\n'
        "[state]\nstate = 3\n[actions]\naction = 2\n"
    )
    robot = read_robot(path)
    assert robot.delta_actions() == ((True, False), (0, -1))
    assert "names" not in robot.metadata(presets.get("tiny_robot").model, False)["actions"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "my_arm"', 'nam = "my_arm"', "'nam' is no key .* Did you mean 'name'"),
        ('name = "my_arm"', "", "'name' is missing"),
        ('name = "my_arm"', "name = 3", "'name' is 3; expected the robot's name in quotes"),
        ("rate = 20", "rate = 0", "'rate' is 0.0; expected steps per second"),
        ("rate = 20", 'rate = "20"', "'rate' is '20'; expected the number of control steps"),
        ("rate = 20", "rate = 20 Hz", r"not a TOML file: .*\(at line 3"),
        ('["joint_1", "joint_2"]\n\n[cam', '["joint_1", "joint2"]\n\n[cam',
         "'relative' names 'joint2', .* no such action dimension. Did you mean 'joint_2'"),
        ('= ["joint_1", "joint_2"]\n\n[act', '= ["joint_1", "joint_3"]\n\n[act',
         "'relative' names 'joint_2', .* no such state dimension"),
        ("{ open = 0.08, closed = 0.0 }", "{ open = 0.08 }", "grippers.gripper' is {'open': 0.08}"),
        ("closed = 0.0", "closed = 0.08", "gripper 'gripper' is open at 0.08 and closed at 0.08"),
        ("gripper = {", "griper = {", "'grippers' names 'griper', .* Did you mean 'gripper'"),
        ('"left_wrist_0_rgb"', '"base_0_rgb"', "two cameras are mapped to one slot"),
        ('["gripper"]', '["joint_1"]', "'state' has more than one dimension named 'joint_1'"),
        ('["gripper"]', '"gripper"', "'state.observation.gripper' is 'gripper'; expected a table"),
        ('["gripper"]', "true", "'state.observation.gripper' is True; expected"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_are_explained(tmp_path, old, new, message):
    path = tmp_path / "my_arm.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as error:
        read_robot(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_not_there_says_how_to_get_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"piston init-robot SET --output .*arm.toml"):
        read_robot(tmp_path / "arm.toml")


def test_a_slot_that_the_model_does_not_have_is_named(robot):
    cameras = {"observation.images.front": "base_rgb"}
    with pytest.raises(ValueError, match="'base_rgb', which is no slot .* mean 'base_0_rgb'"):
        pipeline_of(dataclasses.replace(robot, cameras=cameras))


def test_the_command_line_takes_a_file_with_any_preset(tmp_path, robot):
    path = str(tmp_path / "my_arm.toml")
    rest = ["--robot", path, "--data.repo-id", "me/arm", "--exp-name", "x", "--batch-size", "3"]
    for name in ("tiny_robot", "pi0_libero_low_mem_finetune"):
        config = parse([name, *rest])
        assert config.data.description == robot
        assert (config.batch_size, config.data.repo_id) == (3, "me/arm")
    assert parse(["tiny_robot", f"--robot={path}", *rest[2:]]).data.description == robot


@pytest.mark.usefixtures("robot")
def test_options_of_the_replaced_robot_are_refused(tmp_path, capsys):
    path = str(tmp_path / "my_arm.toml")
    rest = ["--robot", path, "--data.repo-id", "me/arm", "--exp-name", "x"]
    with pytest.raises(SystemExit):
        parse(["pi0_aloha_sim", *rest, "--data.no-adapt-to-pi"])
    assert "adapt-to-pi" in capsys.readouterr().err


def test_without_a_file_the_preset_says_what_to_give():
    assert presets.purpose(presets.get("tiny_robot")) == "training"
    config = parse(["tiny_robot", "--data.repo-id", "me/arm", "--exp-name", "x"])
    with pytest.raises(
        ValueError, match=re.escape("describe it with --robot FILE. `piston init-robot")
    ):
        config.data_config()
