"""Where numbers of a run go: always `metrics.jsonl` in its folder, and where else one asks.

Knows names and numbers; knows nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from piston.config import TrainConfig
from piston.serialization import to_json

METRICS = "metrics.jsonl"
Numbers = Mapping[str, float | Sequence[float]]


class Tracker(Protocol):
    def log(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


def make_trackers(config: TrainConfig, run: Path) -> list[Tracker]:
    kinds: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
    }
    return [JsonLines(run / METRICS), *(kinds[name](config, run) for name in config.tracking)]


class JsonLines:
    """One JSON object per line. A resumed run appends, after the lines up to where it resumes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, numbers: Numbers) -> None:
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def forget_after(path: Path, step: int) -> None:
    """Drop lines of steps that a resumed run does again."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        path.write_text("".join(kept), encoding="utf-8")


class TensorBoard:
    def __init__(self, config: TrainConfig, run: Path) -> None:  # noqa: ARG002
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "--tracking tensorboard needs tensorboard. Run: pip install 'piston[track]'"
            ) from error
        self._writer: Any = SummaryWriter(str(run / "tensorboard"))

    def log(self, step: int, numbers: Numbers) -> None:
        for name, value in flat(numbers).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """`WANDB_MODE=offline` keeps everything in the run's folder."""

    def __init__(self, config: TrainConfig, run: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                "--tracking wandb needs wandb. Run: pip install 'piston[track]'"
            ) from error
        self._run: Any = wandb.init(
            project="piston",
            name=config.exp_name,
            id=f"{config.name}-{config.exp_name}",
            resume="allow",
            dir=str(run),
            config=to_json(config),
        )

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(flat(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def flat(numbers: Numbers) -> dict[str, float]:
    """Lists of numbers, one per dimension, as numbers of their own."""
    result: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, Sequence):
            result |= {f"{name}/{index}": number for index, number in enumerate(value)}
        else:
            result[name] = value
    return result
