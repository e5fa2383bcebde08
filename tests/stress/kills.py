"""Processes that are killed at random moments: training, recording and converting.

They are forked from this process, which has imported all that they need and computes nothing
itself, so that they are at work at once.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from tests.data.recording_cases import FEATURES, FPS, as_v21, check_set, main, record
from tests.training.running import assert_same_run, losses, tiny

from files import read_set
from piston.data.convert import convert_to_v30
from piston.data.record import Recorder
from piston.progress import Progress
from piston.training.loop import train_loop
from rows import Part, Row, quiet

_STEPS = 20


def _start(function: Callable[..., Any], *args: Any) -> ForkProcess:
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    return process


def _kill(process: ForkProcess) -> bool:
    """Kill a process; False if it had ended. Raise OSError if it had failed."""
    process.kill()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise OSError("A process failed after another one was killed; it says why, above.")
    return process.exitcode != 0


def _train(folder: Path, resume: bool) -> None:
    with quiet():
        train_loop(tiny(folder, resume=resume, num_train_steps=_STEPS, save_interval=3))


def training(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Kill a run and resume it until it is complete; it must equal one that was never killed."""
    rng, began = random.Random(seed), time.monotonic()
    kills = runs = different = 0
    with tempfile.TemporaryDirectory() as temporary:
        uncut = Path(temporary) / "uncut"
        _start(_train, uncut, False).join()
        while time.monotonic() - began < seconds:
            runs += 1
            folder = Path(temporary) / str(runs)
            while _killed(folder, rng):
                kills += 1
                progress(round(time.monotonic() - began), None, f"{kills} killed")
            try:
                assert_same_run(folder / "tiny/run", uncut / "tiny/run", _STEPS - 1)
            except AssertionError:
                different += 1
    found = f"{runs - different} of {runs} runs equal, bit for bit"
    return [Row("training killed and resumed", kills, found, "all", different == 0)]


def _killed(folder: Path, rng: random.Random) -> bool:
    """Start or resume a run and kill it some steps later; False if it ended by itself."""
    run = folder / "tiny" / "run"
    process = _start(_train, folder, run.exists())
    steps = len(losses(run)) + rng.randint(0, 6)
    while process.is_alive() and len(losses(run)) <= steps:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.1))
    return _kill(process)


def _record(root: Path, output: int) -> None:
    sys.stdout = os.fdopen(output, "w")
    with quiet():
        main(root)


def recording(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Kill a recorder; every episode whose saving it reported must be in the set."""
    rng, began, kills, known, lost = random.Random(seed), time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory() as temporary, quiet():
        root = Path(temporary) / "set"
        while time.monotonic() - began < seconds:
            ours, theirs = os.pipe()
            process = _start(_record, root, theirs)
            os.close(theirs)
            with os.fdopen(ours) as output:
                known = max(known, int(output.readline()))
                time.sleep(rng.uniform(0, 0.5))
                _kill(process)
                known = max([known, *map(int, output.read().split())])
            kills += 1
            lost += known > 0 and check_set(root) < known
            if known > 60:  # start anew: reading all of them takes ever longer
                root, known = Path(temporary) / f"set{kills}", 0
            progress(round(time.monotonic() - began), None, f"{kills} killed")
    return [Row("recorder killed: saved episodes lost", kills, str(lost), "0", lost == 0)]


def _convert(source: Path, target: Path) -> None:
    with quiet():
        convert_to_v30(source, target, overwrite=True)


def converting(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Kill a conversion that overwrites: the target is the old set or the new one, whole."""
    rng, began, kills, lost = random.Random(seed), time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as temporary, quiet():
        folder = Path(temporary)
        for name, episodes in (("old", 2), ("source", 6)):
            with Recorder(folder / name, FPS, FEATURES, "arm", "h264") as recorder:
                for episode in range(episodes):
                    record(recorder, episode)
        source, target = as_v21(folder / "source", folder / "v21"), folder / "old"
        whole, longest = [read_set(target), read_set(folder / "source")], 1.0
        while time.monotonic() - began < seconds:
            started, process = time.monotonic(), _start(_convert, source, target)
            process.join(rng.uniform(0, longest))
            if _kill(process):
                kills += 1
            else:
                longest = time.monotonic() - started
            lost += not target.exists() or read_set(target) not in whole
            progress(round(time.monotonic() - began), None, f"{kills} killed")
    return [Row("convert --overwrite killed: set lost", kills, str(lost), "0", lost == 0)]


PARTS = [
    Part("kill training", training, 50.0),
    Part("kill recorder", recording, 20.0),
    Part("kill convert", converting, 20.0),
]
