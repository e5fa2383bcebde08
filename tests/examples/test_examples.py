"""The programs in examples/ run as they are.

Those that need only the client are run by `packages/piston-client/tests/test_piston_server.py`.
"""

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import torch

from piston import cli, presets, weights
from piston.data.record import Recorder
from piston.inference.loading import load_policy
from piston.models.configs import GemmaSize, Pi0Config, VisionSize
from piston.serving import running_server

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
SHORT = ("--episodes", 2, "--steps", 20)
_SIZE = GemmaSize(width=16, depth=2, mlp_dim=24, num_heads=2, num_kv_heads=1, head_dim=8)
_TINY = Pi0Config(
    action_dim=14,
    action_horizon=8,
    max_token_len=16,
    dtype="float32",
    vision=VisionSize(width=16, depth=1, mlp_dim=24, num_heads=2, patch=16),
    vlm=_SIZE,
    action_expert=_SIZE,
    vocab_size=300,
    image_size=32,
    cameras=("base_0_rgb",),
    tokenizer="bytes",
)


def run_here(program, *arguments, folder):
    """Run an example in this process, which has imported torch, and return what it prints."""
    words = [str(EXAMPLES / program), *map(str, arguments)]
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as shown,
        unittest.mock.patch.object(sys, "argv", words),
    ):
        runpy.run_path(words[0], run_name="__main__")
    return shown.getvalue()


def run(program, *arguments, folder):
    """Run an example in a process of its own and return what it prints."""
    command = [sys.executable, EXAMPLES / program, *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    weights.save_model(weights.build_model(_TINY), _TINY, folder / "base")
    features = {
        "observation.images.top": {"dtype": "video", "shape": (48, 64, 3)},
        "observation.state": {"dtype": "float32", "shape": (14,)},
        "action": {"dtype": "float32", "shape": (14,)},
    }
    random = np.random.default_rng(0)
    with Recorder(folder / "data", fps=50, features=features, codec="h264") as recorder:
        for _ in range(2):
            for _ in range(12):
                frame = {
                    "observation.images.top": random.integers(256, size=(48, 64, 3), dtype="u1"),
                    "observation.state": random.random(14, np.float32),
                    "action": random.random(14, np.float32),
                }
                recorder.add_frame(frame, task="fold the towel")
            recorder.save_episode()
    options = ("--base", "base", "--steps", 3, "--batch-size", 2, "--rank", 2, "--num-workers", 0)
    shown = run_here("finetune_lora.py", "data", *options, folder=folder)
    return folder, shown


def test_finetune_lora_trains_adapters_alone(lora_run):
    folder, shown = lora_run
    checkpoint = folder / "checkpoints" / "aloha_lora" / "lora" / "2"
    assert f"piston serve {checkpoint}" in shown
    error = float(shown.split("mean error on a frame that was held out: ")[1].split()[0])
    assert 0 < error < 10
    base, tuned = (weights.open_checkpoint(place) for place in (folder / "base", checkpoint))
    adapters = [name for name in tuned.names() if "lora" in name]
    assert {name.split(".")[0] for name in adapters} == {"vlm", "action_expert"}
    moved = [n for n in base.names() if not torch.equal(base.tensor(n), tuned.tensor(n))]
    assert moved
    assert all(name.startswith("suffix.") for name in moved)
    assert any(tuned.tensor(name).any() for name in adapters if name.endswith("lora_b"))


def test_evaluate_shows_every_checkpoint(lora_run):
    pytest.importorskip("mujoco", reason="needs piston[sim]")
    folder, _ = lora_run
    options = ("--episodes", 1, "--max-steps", 10)
    shown = run_here("evaluate.py", "checkpoints/aloha_lora/lora", *options, folder=folder)
    _, *rows = shown.splitlines()
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert all("0/1 = 0%" in row for row in rows)


def test_own_robot_from_nothing(tmp_path, monkeypatch):
    """The commands are those of the program's own description, with a shorter training."""
    monkeypatch.chdir(tmp_path)
    task = ("--task", "pick up the fork")
    shown = run("own_robot.py", "record", "data/my_arm", *task, *SHORT, folder=tmp_path)
    assert "data/my_arm: 2 episodes of 20 frames" in shown
    text = (EXAMPLES / "own_robot.py").read_text("utf-8")
    commands = [
        shlex.split(line, comments=True) for line in re.findall(r"^    piston (.*)$", text, re.M)
    ]
    *prepare, (verb, checkpoint) = commands
    assert [words[0] for words in prepare] == ["init-robot", "stats", "train"]
    less = ["--num-train-steps", "2", "--batch-size", "2", "--noise-draws", "1"]
    for words in prepare:
        assert cli.main([*words, *(less if words[0] == "train" else ())]) == 0
    assert verb == "serve"
    # The last step of two is 1, of the preset's 1,500 it is 1499.
    assert Path(checkpoint).name == str(presets.get("tiny_robot").num_train_steps - 1)
    policy = load_policy(Path(checkpoint).with_name("1"))
    policy.warm_up()
    with running_server(policy) as server:
        shown = run("own_robot.py", "drive", server.url, *task, *SHORT, folder=tmp_path)
    assert "a policy for my_arm, 20 Hz" in shown
    assert "20 steps, episodes: 1" in shown
    assert "ended by: done" in shown
