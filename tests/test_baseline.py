"""Files that version 0.2.0.dev0 wrote are read, served and resumed as they were there.

`reference/0.2.0.dev0/make_baseline.py` says how they came about. On the machine that made them all
numbers here are equal bit for bit; another processor rounds sums in another order, and so may a
later version. PISTON_BASELINE_TOLERANCE=0 shows whether anything differs at all.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

import piston
from piston import presets
from piston.cli import main
from piston.data import open_dataset
from piston.robots.description import read_robot
from piston.training.loop import train_loop
from piston.transforms import flatten_dict
from piston_client import Client

HERE = Path(__file__).parent / "reference" / "0.2.0.dev0"
# Relative to the largest number of an array, for actions, and to each number for metrics.
TOLERANCE = float(os.environ.get("PISTON_BASELINE_TOLERANCE", "1e-5"))
# A step divides gradients by their size, which makes differences of rounding larger.
TRAINED_TOLERANCE = 20 * TOLERANCE
RUNS = ("pi0", "pi05", "pi0_fast", "mixture", "subtasks", "robot_file", "lora", "rsqrt", "shares")
# This robot is a class in my_presets.py. What registers it here would be seen by other tests.
PYTHON_ROBOT = "degrees_cart"


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    with tarfile.open(HERE / "files.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def baseline(unpacked, monkeypatch):
    """The folder of the files, to which locations in them are relative."""
    monkeypatch.chdir(unpacked)
    return unpacked


@pytest.fixture
def run(baseline, tmp_path):
    """Copies a run, to be resumed there."""

    def copy(name):
        return shutil.copytree(baseline / "runs" / name / "half", tmp_path / name / "half")

    return copy


def checkpoint(run):
    """The newest checkpoint of a run."""
    return max((p for p in run.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))


def half(baseline, name):
    return checkpoint(baseline / "runs" / name / "half")


def cases(name):
    """The requests, each with its expected replies by the checkpoint that gave them."""
    found = {}
    with np.load(HERE / f"{name}.npz") as arrays:
        for key, value in arrays.items():
            number, part, *keys = key.split("|")
            place = found.setdefault(int(number), {}).setdefault(part, {})
            for parent in keys[:-1]:
                place = place.setdefault(parent, {})
            place[keys[-1]] = value if value.ndim else value.item()
    return [found[number] for number in sorted(found)]


def described(name):
    return json.loads((HERE / f"{name}.json").read_text())


def assert_replies(name, infer, part="reply", tolerance=TOLERANCE):
    for case in cases(name):
        reply = infer(case["request"])
        for key, expected in case[part].items():
            if isinstance(expected, str):
                assert reply[key] == expected
            else:
                close = tolerance * np.abs(expected).max()
                np.testing.assert_allclose(reply[key], expected, rtol=0, atol=close)


def load(folder, **options):
    """What answers requests, of whichever robot they are."""
    policies = {}

    def infer(request):
        robot = request.get("robot")
        if robot not in policies:
            policies[robot] = piston.load_policy(folder, robot=robot, **options)
        return policies[robot].infer(request)

    return infer


def by_step(lines, first_step):
    """Metrics of training and validation, of the steps from this one on."""
    found = {}
    for line in lines:
        if line["step"] >= first_step:
            found.setdefault(line["step"], {}).update(flatten_dict(line))
    return found


def assert_metrics(name, run, first_step):
    """The steps from this one on are those of the run that was not cut."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = by_step(lines, first_step)
    expected = by_step(described(name)["metrics"], first_step)
    assert found.keys() == expected.keys()
    for step, line in expected.items():
        assert {key: found[step][key] for key in line} == pytest.approx(line, TRAINED_TOLERANCE)


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_gives_the_same_replies(name, baseline, shapes_checked):
    with shapes_checked(False):
        assert_replies(name, load(half(baseline, name)))


@pytest.mark.parametrize("name", RUNS)
def test_clients_are_told_the_same(name, baseline):
    robot = "arm" if name == "mixture" else None
    found = piston.load_policy(half(baseline, name), robot=robot).metadata
    assert json.loads(json.dumps(found)) == described(name)["metadata"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_resumed_as_if_it_had_not_been_cut(name, run, shapes_checked):
    folder = run(name)
    last = checkpoint(folder)
    text = (folder / "run.json").read_text()
    config = presets.train_config_from_json(json.loads(text), f"{folder}/run.json")
    config = dataclasses.replace(
        config,
        checkpoint_base_dir=str(folder.parents[1]),
        num_train_steps=1 + described(name)["metrics"][-1]["step"],
        resume=True,
    )
    with shapes_checked(False):
        end = train_loop(config)
        assert_metrics(name, folder, first_step=int(last.name) + 1)
        assert_replies(name, load(end), "end", TRAINED_TOLERANCE)


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_an_exported_policy_gives_the_same_actions(baseline, tmp_path):
    file = tmp_path / "policy.pt2"
    export = [sys.executable, "-m", "piston.cli", "export", str(half(baseline, "pi0")), str(file)]
    # Inductor compiles programs to find out which vector instructions work, though torch knows it.
    own = {**os.environ, "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    subprocess.run([*export, "--num-steps", "2", "--max-batch", "2"], env=own, check=True)
    assert_replies("exported", piston.load_policy(file).infer)
    # The graphs compute what the model does.
    assert_replies("exported", load(half(baseline, "pi0"), num_steps=2), tolerance=10 * TOLERANCE)


def test_a_recording_of_a_server_is_read(baseline):
    dataset = open_dataset(baseline / "recording")
    recorded = cases("recording")
    assert len(dataset) == len(recorded)
    assert [episode.length for episode in dataset.metadata.episodes] == [2, 1]
    for number, case in enumerate(recorded):
        item, actions = dataset[number], case["reply"]["actions"]
        assert item["task"] == case["request"]["prompt"]
        np.testing.assert_array_equal(item["action_chunk"], actions)
        np.testing.assert_array_equal(item["action"], actions[0])
        np.testing.assert_array_equal(item["observation.state"], case["request"]["state"])
        seen = item["observation.images.cam_high"].astype(float)
        sent = case["request"]["images"]["cam_high"].transpose(1, 2, 0)
        assert np.abs(seen.mean() - sent.mean()) < 5  # after a lossy codec
    assert_replies("recording", load(half(baseline, "pi0")))


def test_a_robot_file_is_read_as_it_was(baseline, tmp_path, monkeypatch):
    """The description in the checkpoint is that of the file, which still describes a robot."""
    config = json.loads((half(baseline, "robot_file") / "config.json").read_text())["train"]
    found = presets.train_config_from_json(config, "config.json")
    assert found.data.description == read_robot(HERE / "arm.toml")
    words = ["--robot", str(HERE / "arm.toml"), "--data.repo-id", "data/arm"]
    monkeypatch.setenv("PISTON_HOME", str(tmp_path / "home"))
    assets = f"--assets-base-dir={tmp_path}"
    assert main(["stats", "tiny_robot", *words, assets]) == 0
    assert len(list(tmp_path.glob("tiny_robot/**/norm_stats.json"))) == 1


def piston_command(*words):
    """The command line with the presets of `my_presets.py`, in a process of its own."""
    own = {"PISTON_PRESETS": str(HERE / "my_presets.py"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "piston.cli", *words],
        env={**os.environ, **own},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return errors


def test_a_file_of_presets_trains_and_resumes(run, tmp_path):
    """The new run has the weights, batches and losses that it had; so has the resumed one."""
    resumed = run(PYTHON_ROBOT)
    new = piston_command(
        *("train", PYTHON_ROBOT, "--exp-name", "new", f"--checkpoint-base-dir={tmp_path}")
    )
    words = ("train", PYTHON_ROBOT, "--exp-name", "half", "--resume")
    old = piston_command(*words, f"--checkpoint-base-dir={tmp_path}")
    finish(new)
    assert "Resumed" in finish(old)
    assert_metrics(PYTHON_ROBOT, tmp_path / PYTHON_ROBOT / "new", first_step=0)
    assert_metrics(PYTHON_ROBOT, resumed, first_step=3)


@pytest.mark.usefixtures("baseline")
def test_other_presets_of_the_file_are_known(tmp_path):
    words = ("--exp-name", "x", f"--checkpoint-base-dir={tmp_path}", "--num-train-steps", "1")
    described = piston_command(
        *("train", "described_arm", "--robot", str(HERE / "arm.toml"), *words),
        *("--data.repo-id", "data/arm", "--data.assets.assets-dir", "assets"),
        *("--data.assets.asset-id", "arm"),
    )
    mixture = piston_command("train", "cart_and_questions", *words)
    finish(described)
    finish(mixture)
    for name in ("described_arm", "cart_and_questions"):
        (line,) = (tmp_path / name / "x" / "metrics.jsonl").read_text().splitlines()
        assert np.isfinite(json.loads(line)["loss"])


@contextlib.contextmanager
def served(folder):
    """The port of a server of a checkpoint, which is a process of its own."""
    process = piston_command("serve", str(folder), "--port", "0")
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "Listening at ws://" in line:
                yield line.split("ws://")[1].split(",")[0].split()[0]
                break
        else:
            raise AssertionError("the server ended")
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_server_replies_the_same(baseline):
    with (
        served(half(baseline, PYTHON_ROBOT)) as address,
        Client(address, connect_timeout=120) as client,
    ):
        assert_replies(PYTHON_ROBOT, client.infer)
        assert client.metadata["robot"] == described(PYTHON_ROBOT)["metadata"]["robot"]
