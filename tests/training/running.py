"""Starting runs, here and in processes of their own, and reading what they left behind."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from piston.config import TrainConfig
from piston.serialization import to_json
from piston.training import loop

from .tiny_presets import TINY

FOLDER = Path(__file__).parent
# What depends on the clock and not on the run.
TIMES = ("samples_per_second", "waiting_for_data")
# Long enough for a busy machine.
PATIENCE = 600.0


def tiny(folder: Path, **changes: Any) -> TrainConfig:
    return dataclasses.replace(TINY, checkpoint_base_dir=str(folder), **changes)


def environment(**more: str) -> dict[str, str]:
    """One thread, as in this process: with another number of them sums are rounded differently."""
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "PISTON_PRESETS": "tiny_presets", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def command(folder: Path, *options: str, preset: str = "tiny") -> list[str]:
    base = f"--checkpoint-base-dir={folder}"
    return [sys.executable, "-m", "piston.cli", "train", preset, base, *options]


@contextmanager
def started(arguments: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process in a group of its own, which ends with the test at the latest."""
    process = subprocess.Popen(
        arguments,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_for(condition: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run_together(
    configs: list[TrainConfig], folder: Path, num_processes: int = 2
) -> list[dict[str, Any]]:
    """Train them one after the other in the same processes; what each of them ended with."""
    jobs = [{"config": to_json(config), "port": _free_port()} for config in configs]
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    worker = [sys.executable, str(FOLDER / "worker.py"), str(path)]
    processes = []
    for rank in range(num_processes):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
        own = environment(**place, MASTER_ADDR="127.0.0.1")
        processes.append(
            subprocess.Popen(worker, env=own, stderr=subprocess.PIPE, stdout=-1, text=True)
        )
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    for process, (_, errors) in zip(processes, outputs):
        assert process.returncode == 0, errors
    return json.loads(outputs[0][0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def metrics(run: Path) -> list[dict[str, Any]]:
    """What was logged, without what depends on the clock."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: v for name, v in line.items() if name not in TIMES} for line in lines]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def state(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's train_state, whoever wrote them."""
    reader = dcp.FileSystemReader(checkpoint / "train_state")
    found = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in found.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Losses, order of batches, weights, optimizer and mean, bit for bit."""
    assert metrics(one) == metrics(other)
    for name in ("train_state/progress.json", "model.safetensors"):
        assert (one / str(step) / name).read_bytes() == (other / str(step) / name).read_bytes()
    assert_same_tensors(state(one / str(step)), state(other / str(step)))


def assert_same_tensors(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float | None = None
) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if tolerance is None:
            assert torch.equal(value, theirs[name]), name
        else:
            difference = (value - theirs[name]).abs().max().item()
            assert difference <= tolerance, f"{name}: {difference}"


def note_batches(monkeypatch: Any) -> list[tuple[int, list[int]]]:
    """The steps that the loop will do, each with the samples of its batch."""
    seen: list[tuple[int, list[int]]] = []
    original = loop.Trainer.step

    def step(self: Any, batch: Any, number: int, *more: Any) -> Any:
        seen.append((number, batch["index"].tolist()))
        return original(self, batch, number, *more)

    monkeypatch.setattr(loop.Trainer, "step", step)
    return seen
