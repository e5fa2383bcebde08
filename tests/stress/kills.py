"""Processes that are killed at random moments: training, recording and converting."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.data.recording_cases import FEATURES, FPS, as_v21, check_set, record
from tests.training.running import assert_same_run, command, environment, losses, tiny

from files import read_set
from piston.data.recorder import Recorder
from piston.progress import Progress
from piston.training.loop import train_loop
from rows import Part, Row, quiet

_STEPS = 40
_OPTIONS = (f"--num-train-steps={_STEPS}", "--save-interval=7")
_DATA_TESTS = Path(__file__).parents[1] / "data"


def training(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Kill a run and resume it until it is complete; it must equal one that was never killed."""
    rng, began = random.Random(seed), time.monotonic()
    kills = runs = different = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        changes = {"num_train_steps": _STEPS, "save_interval": 7}
        with quiet():
            uncut = train_loop(tiny(folder / "uncut", **changes)).parent
        while time.monotonic() - began < seconds:
            runs += 1
            base = folder / str(runs)
            run = base / "tiny" / "run"
            while not _finished(base, run, rng):
                kills += 1
                progress(round(time.monotonic() - began), None, f"{kills} killed")
            try:
                assert_same_run(run, uncut, _STEPS - 1)
            except AssertionError:
                different += 1
    found = f"{runs - different} of {runs} runs equal, bit for bit"
    return [Row("training killed and resumed", kills, found, "all", different == 0)]


def _finished(base: Path, run: Path, rng: random.Random) -> bool:
    """Start or resume a run and kill it some steps later; True if it ended by itself."""
    resume = ("--resume",) if run.exists() else ()
    arguments = command(base, *_OPTIONS, *resume)
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(arguments, env=environment(), text=True, **output)
    steps = len(losses(run)) + rng.randint(0, 25)
    while process.poll() is None and len(losses(run)) <= steps:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))
    process.kill()
    errors = process.communicate()[1]
    if process.returncode not in (0, -signal.SIGKILL):
        raise OSError(f"A run that was resumed failed: {errors}")
    return process.returncode == 0


def recording(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Kill a recorder; every episode whose saving it reported must be in the set."""
    rng, began, kills, known, lost = random.Random(seed), time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "set"
        while time.monotonic() - began < seconds:
            arguments = [sys.executable, "recording_cases.py", str(root)]
            process = subprocess.Popen(
                arguments, stdout=subprocess.PIPE, text=True, cwd=_DATA_TESTS
            )
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.5))
            os.kill(process.pid, signal.SIGKILL)
            saved = [int(line) for line in process.communicate()[0].splitlines()]
            known = max([known, *saved])
            kills += 1
            with quiet():
                complete = (root / "meta/info.json").exists() and check_set(root) >= known
            lost += known > 0 and not complete
            if known > 60:  # start anew: reading all of them takes ever longer
                root, known = Path(temporary) / f"set{kills}", 0
            progress(round(time.monotonic() - began), None, f"{kills} killed")
    return [Row("recorder killed: saved episodes lost", kills, str(lost), "0", lost == 0)]


def converting(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Kill `data convert --overwrite`: the target is the old set or the new one, whole."""
    rng, began, kills, lost = random.Random(seed), time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, episodes in (("old", 2), ("source", 6)):
            with Recorder(folder / name, FPS, FEATURES, "arm", "h264") as recorder:
                for episode in range(episodes):
                    record(recorder, episode)
        source, target = as_v21(folder / "source", folder / "v21"), folder / "old"
        whole = [read_set(target), read_set(folder / "source")]
        arguments = [sys.executable, "-m", "piston.cli", "data", "convert", str(source)]
        while time.monotonic() - began < seconds:
            process = subprocess.Popen(
                [*arguments, str(target), "--overwrite"],
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                process.wait(rng.uniform(0.5, 3.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
            lost += read_set(target) not in whole if target.exists() else 1
            progress(round(time.monotonic() - began), None, f"{kills} killed")
    return [Row("convert --overwrite killed: set lost", kills, str(lost), "0", lost == 0)]


PARTS = [
    Part("kill training", training, 50.0),
    Part("kill recorder", recording, 20.0),
    Part("kill convert", converting, 20.0),
]
