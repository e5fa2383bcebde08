"""Every benchmark runs at a small size. What it measures is not looked at."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from piston.cli import main
from piston.sim.scores import Outcome

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STRESS = Path(__file__).parents[1] / "stress"
RUNS = {
    "stats.py --frames 2000 --horizon 5": ("1 thread:", "frames/s"),
    "serve.py --seconds 0.5 --clients 3 --max-batch 3 --round-trips 5 --preset pi0_libero "
    "--crowds 2 --turns 1": (
        *("this server", "least server", "replies per second", "swapped", "memory growth"),
        "Replies per second",
    ),
    "train.py dummy --steps 1 --draws 1 --num-workers 0 --batch-size 2": (
        *("1 draw per prefix", "gradient checkpointing", "waiting for data"),
    ),
    "launches.py pi05 --cameras 1": ("chunk of ten steps", "per layer and step", "addcmul"),
    "inference.py dummy --repeats 1 --num-steps 1 --dtype float32 --file --batches 1 2 "
    "--ways eager int8 one-step": (
        *("│ eager", "│ int8", "│ one-step", "vision", "prefill", "denoising", "per sample"),
        *("large matrix product", "peak memory", "to the first action"),
    ),
}


def run(words):
    """In a process of its own, as a person would: some benchmarks start others."""
    command = [sys.executable, *words]
    result = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("words", RUNS, ids=lambda words: words.split()[0])
def test_benchmark_runs(words):
    shown = run(words.split())
    for text in RUNS[words]:
        assert text in shown


def test_bfloat16_and_int8_are_compared_with_float32():
    words = "inference.py dummy --repeats 1 --num-steps 2 --ways eager int8 --cosine"
    shown = run(words.split())
    rows = [line.strip("│ ").split("│") for line in shown.splitlines() if line.startswith("│")]
    cosines = {cells[0].strip(): float(cells[-1]) for cells in rows}
    assert cosines.keys() == {"eager", "int8"}
    assert all(0.998 < cosine < 1 for cosine in cosines.values())


def test_data_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    importlib.import_module("train").record(tmp_path / "set", frames=20)
    shown = run(["data.py", str(tmp_path / "set"), "--seconds", "0.2", "--num-workers", "1"])
    for row in ("naive", "cold", "warm", "cached, 1 workers", "The cache was built"):
        assert row in shown


def test_auroc_is_the_share_of_pairs_in_the_right_order(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("uncertainty")

    def outcome(success, value, prompt="a"):
        return Outcome(0, prompt, success, success, 1, {}, uncertainty={"accel": value})

    mixed = [outcome(True, 1), outcome(True, 3), outcome(False, 2), outcome(False, 3)]
    assert module._auroc(mixed, "accel") == (1 + 0 + 1 + 0.5) / 4
    assert np.isnan(module._auroc(mixed[:2], "accel"))
    # Another task that is more uncertain and never fails says nothing about failures.
    calm = [*mixed, *(outcome(True, 9, "b") for _ in range(4))]
    assert module._auroc_within(calm, "accel") == module._auroc(mixed, "accel")
    assert module._auroc(calm, "accel") < 0.3
    value, low, high = module._interval(mixed * 20, "accel", module._auroc, 200)
    assert low < value < high


def test_what_a_policy_writes_and_how_it_acts_in_time_is_measured(tmp_path):
    """From a recording with labels to a policy that has hardly learned to write."""
    data, base = str(tmp_path / "set"), str(tmp_path / "runs")
    shared = ["tiny_aloha_subtasks", "--data.repo-id", data, "--assets-base-dir", str(tmp_path)]
    small = ["--num-train-steps", "1", "--batch-size", "2", "--noise-draws", "1"]
    small += ["--max-delay", "2"]
    train = ["train", *shared, "--exp-name", "x", "--checkpoint-base-dir", base, *small]
    record = ["record", "aloha_transfer_cube", "--episodes", "1", "--workers", "1", "--out", data]
    for words in (record, ["stats", *shared], train):
        assert main(words) == 0
    checkpoint = f"{base}/tiny_aloha_subtasks/x/0"
    options = ["--starts", "1", "--stride", "60", "--json", str(tmp_path / "all")]
    shown = run(["language.py", checkpoint, *options])
    assert "reach for the cube" in shown
    found = json.loads((tmp_path / "all").read_text())
    right = found["subtasks that are right"]
    assert right["all frames"].startswith("0/4")
    assert float(found["milliseconds per chunk"]["text is written"]) > 0
    options = ["--episodes", "1", "--delays", "8", "--json", str(tmp_path / "delays")]
    assert "go on, trained" in run(["delay.py", checkpoint, checkpoint, *options])
    found = {one["execution"]: one for one in json.loads((tmp_path / "delays").read_text())}
    # Of 300 steps, 48 of each chunk are executed, then 8 are waited.
    assert {name: one["waited"] for name, one in found.items()} == {
        **{"wait": 40, "async": 0, "guided": 0, "trained": 0}
    }
    options = ["--task", "aloha_transfer_cube", "--episodes", "1", "--candidates", "2"]
    shown = run(["uncertainty.py", checkpoint, *options, "--samples", "3"])
    assert all(word in shown for word in ("accel", "spread", "within tasks"))


def test_errors_are_one_message():
    command = [sys.executable, "data.py", "nowhere"]
    result = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_stress_runs():
    command = [sys.executable, STRESS, "--scale", "0.02", "fuzz"]
    path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "damaged messages: a reply to each" in result.stdout
