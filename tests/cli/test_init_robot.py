"""`piston init-robot`, and the way of a robot of one's own from a recording to a served policy."""

import dataclasses

import numpy as np
import pytest

from piston.cli import main
from piston.data.describe import describe_robot
from piston.data.format import Feature
from piston.data.metadata import Metadata
from piston.data.record import Recorder
from piston.inference.loading import load_policy
from piston.robots.description import read_robot
from piston.serving import running_server
from piston_client import Client

JOINTS = [f"joint_{i}" for i in range(1, 8)]
NUMBERS = {"dtype": "float32", "shape": [8], "names": [*JOINTS, "gripper"]}
CAMERA = {"dtype": "image", "shape": [48, 64, 3]}


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "my_arm"
    features = {
        "observation.images.front": CAMERA,
        "observation.images.wrist": CAMERA,
        "observation.state": NUMBERS,
        "action": NUMBERS,
    }
    random = np.random.default_rng(0)
    with Recorder(folder, 20, features, robot_type="seven joints") as recorder:
        for _ in range(2):
            for step in range(20):
                state = np.float32([*np.sin(step / 5 + np.arange(7)), step % 2])
                image = random.integers(256, size=(48, 64, 3), dtype=np.uint8)
                frame = {"observation.images.front": image, "observation.images.wrist": image}
                recorder.add_frame(
                    {**frame, "observation.state": state, "action": state + np.float32(0.1)},
                    task="pick up the fork",
                )
            recorder.save_episode()
    return folder


@pytest.fixture
def file(recording, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init-robot", str(recording), "--output", "arm.toml"]) == 0
    return tmp_path / "arm.toml"


def test_the_file_says_what_the_data_set_says(file):
    robot = read_robot(file)
    assert (robot.name, robot.rate, robot.prompt) == ("seven joints", 20, "pick up the fork")
    assert robot.cameras == {
        "observation.images.front": "base_0_rgb",
        "observation.images.wrist": "left_wrist_0_rgb",
    }
    assert robot.relative == tuple(JOINTS)
    assert robot.state == {"observation.state": (*JOINTS, "gripper")}
    assert '# "gripper" = { open = 1.0, closed = 0.0 }' in file.read_text("utf-8")
    own = [line for line in file.read_text("utf-8").splitlines() if line and line[0] != "#"]
    assert len(own) <= 16
    assert max(map(len, own)) <= 100


def test_a_file_is_never_replaced_unasked(recording, file, capsys):
    file.write_text("mine")
    assert main(["init-robot", str(recording), "--output", str(file)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main(["init-robot", str(recording), "--output", str(file), "--overwrite"]) == 0
    assert read_robot(file).name == "seven joints"


def test_from_recording_to_served_policy_without_the_user_s_files(recording, file, capsys):
    options = ["tiny_robot", "--robot", str(file), "--data.repo-id", str(recording)]
    assert main(["stats", *options]) == 0
    assert "joint_7" in capsys.readouterr().out
    small = ["--num-train-steps", "2", "--batch-size", "2", "--noise-draws", "1"]
    assert main(["train", *options, "--exp-name", "first", *small]) == 0
    run = file.parent / "checkpoints" / "tiny_robot" / "first"
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text("utf-8")
    assert "what the policy predicts from this frame, 16 steps" in page
    assert "cannot be read" not in page
    moved = file.parent / "elsewhere"
    (run / "1").rename(moved)
    file.unlink()
    with running_server(load_policy(moved)) as server, Client(server.url) as client:
        example = client.example_observation()
        assert example.keys() == {
            *("observation.images.front", "observation.images.wrist"),
            *("observation.state", "prompt"),
        }
        assert client.infer(example)["actions"].shape == (16, 8)
        assert (client.metadata["robot"], client.metadata["control_hz"]) == ("seven joints", 20)
        assert client.metadata["actions"]["names"] == [*JOINTS, "gripper"]
        assert len(client.metadata["action_limits"]["low"]) == 8


def test_another_rate_than_the_data_set_s_is_warned_of(recording, file, caplog):
    file.write_text(file.read_text("utf-8").replace("rate = 20", "rate = 50"))
    options = ["tiny_robot", "--robot", str(file), "--data.repo-id", str(recording)]
    assert main(["stats", *options]) == 0
    assert "20 frames per second, the robot 50 control steps" in caplog.text


def test_only_keys_may_differ_from_what_a_checkpoint_was_trained_with(recording, file):
    options = ["tiny_robot", "--robot", str(file), "--data.repo-id", str(recording)]
    assert main(["stats", *options]) == 0
    small = ["--num-train-steps", "1", "--batch-size", "2", "--noise-draws", "1"]
    assert main(["train", *options, "--exp-name", "first", *small]) == 0
    checkpoint = file.parent / "checkpoints" / "tiny_robot" / "first" / "0"
    robot = read_robot(file)
    renamed = dataclasses.replace(robot, state={"joints": (*JOINTS, "gripper")})
    policy = load_policy(checkpoint, robot=renamed)
    assert policy.infer(renamed.example())["actions"].shape == (16, 8)
    with pytest.raises(ValueError, match="--robot has relative .* trained with"):
        load_policy(checkpoint, robot=dataclasses.replace(robot, relative=()))


def features(*cameras, **vectors):
    found = {name: Feature(name, "video", (48, 64, 3)) for name in cameras}
    for key, names in vectors.items():
        key = key.replace("__", ".")
        dim = names if isinstance(names, int) else len(names)
        found[key] = Feature(key, "float32", (dim,), None if isinstance(names, int) else names)
    return found


def described(tmp_path, found, tasks=("Fold it.",)):
    metadata = Metadata(tmp_path, "v2.1", 30, None, found, (), dict(enumerate(tasks)))
    object.__setattr__(metadata, "episodes", ())
    path = tmp_path / "arm.toml"
    text = describe_robot(metadata, "arm")
    path.write_text(text, "utf-8")
    return read_robot(path), text


@pytest.mark.parametrize(
    ("cameras", "slots"),
    [
        (["cam_low", "cam_high", "cam_left_wrist", "cam_right_wrist"], [None, 0, 1, 2]),
        (["wrist_image", "image"], [1, 0]),
        (["side", "top"], [1, 0]),
        (["laptop", "phone", "extra", "more"], [0, 1, 2, None]),
        (["wrist_left", "wrist_right", "exterior_1", "exterior_1_depth"], [1, 2, 0, None]),
    ],
)
def test_slots_are_guessed_from_the_cameras_names(tmp_path, monkeypatch, cameras, slots):
    keys = [f"observation.images.{name}" for name in cameras]
    monkeypatch.setattr(Metadata, "cameras", property(lambda _: tuple(keys)))
    robot, _ = described(tmp_path, features(*keys, observation__state=3, action=3))
    known = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    assert robot.cameras == {k: known[slot] for k, slot in zip(keys, slots) if slot is not None}


def test_rotations_and_grippers_are_not_relative(tmp_path):
    names = ["x", "y", "z", "roll", "pitch", "yaw", "qw", "gripper.pos", "ry"]
    robot, text = described(tmp_path, features(observation__state=names, action=names))
    assert robot.relative == ("x", "y", "z")
    assert '# "gripper.pos" = { open' in text


def test_joints_that_roll_are_relative(tmp_path):
    joints = ["shoulder_pan.pos", "wrist_flex.pos", "wrist_roll.pos", "wrist_rotate"]
    names = [*joints, "gripper.pos"]
    robot, _ = described(tmp_path, features(observation__state=names, action=names))
    assert robot.relative == tuple(joints)


def test_sets_without_names_or_with_several_keys(tmp_path):
    robot, text = described(
        tmp_path, features(joints=6, gripper=1, actions=7, next__reward=1), ("Fold.", "Unfold.")
    )
    assert (robot.state, robot.actions) == ({"joints": 6, "gripper": 1}, {"actions": 7})
    assert robot.relative == ()
    assert robot.prompt is None
    assert '# prompt = "Fold."' in text
    twice = features(position=["a", "b"], velocity=["a", "b"], action=["a", "b"])
    assert described(tmp_path, twice)[0].state == {"position": ("a", "b"), "velocity": 2}


def test_a_set_without_actions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no actions that could be recognised"):
        described(tmp_path, features(observation__state=3))


def test_text_of_any_kind_is_quoted(tmp_path):
    task = 'put "it" \\ away\n\x7fé'
    robot, _ = described(tmp_path, features(observation__state=3, action=3), [task])
    assert robot.prompt == task
