"""Metrics of a run: always `metrics.jsonl` in its folder, and TensorBoard or W&B if asked for."""

from __future__ import annotations

import importlib.util
import logging
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from piston.config import TrainConfig
from piston.files import json_line, read_json_lines, write_json_lines
from piston.serialization import to_json

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_id.txt"
_WANDB_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
# A list has one number per dimension. Values that are None or not finite are not logged.
Metrics = Mapping[str, float | Sequence[float] | None]


class Tracker(Protocol):
    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Logs to all trackers. A tracker that fails is reported once; training continues."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._failed: set[str] = set()

    def log(self, step: int, metrics: Metrics) -> None:
        known = {name: value for name, value in metrics.items() if _is_known(value)}
        for tracker in self._trackers:
            try:
                tracker.log(step, known)
            except Exception as error:  # third-party code may raise anything
                self._report(tracker, f"Metrics of step {step} were not written", error)

    def close(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                self._report(tracker, "Metrics were not all written", error)

    def _report(self, tracker: Tracker, what: str, error: Exception) -> None:
        """Log the first failure of each tracker; later ones are usually the same."""
        name = type(tracker).__name__
        if name not in self._failed:
            self._failed.add(name)
            logger.error("%s: %s (%s; training continues, this is logged once)", what, error, name)


def require_trackers(config: TrainConfig) -> None:
    """Raise ImportError if a tracker is not installed, before anything slow happens."""
    for name in config.tracking:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"--tracking {name} needs {name}. Run: pip install 'piston[track]'")


def check_logins(config: TrainConfig) -> None:
    """Raise ValueError if a login fails, before an earlier run is deleted."""
    if "wandb" in config.tracking:
        import wandb

        if wandb.setup().settings.mode not in _WANDB_WITHOUT_LOGIN:
            with _wandb_errors():
                wandb.login(verify=True)


@contextmanager
def _wandb_errors() -> Iterator[None]:
    import wandb

    try:
        yield
    except wandb.Error as error:
        raise ValueError(
            f"--tracking wandb: {error} Run `wandb login`, set WANDB_MODE=offline to keep the "
            "metrics in the run's folder, or leave the option out."
        ) from error


def make_trackers(config: TrainConfig, run: Path, first_step: int) -> Trackers:
    kinds: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
    }
    requested = [kinds[name](config, run, first_step) for name in config.tracking]
    return Trackers([JsonLines(run / METRICS), *requested])


class JsonLines:
    """Appends one JSON object per log call to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        self._file.write(json_line({"step": step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return what was logged; lines that are cut off or damaged are left out."""
    lines = (line for _, line in read_json_lines(path))
    return [line for line in lines if line and isinstance(line.get("step"), int)]


def remove_metrics_after(path: Path, step: int) -> None:
    """Delete the lines of steps that a resumed run repeats."""
    if path.is_file():
        write_json_lines(path, [line for line in read_metrics(path) if line["step"] <= step])


class TensorBoard:
    """Writes event files. A resumed run hides what was logged after `first_step`."""

    def __init__(self, config: TrainConfig, run: Path, first_step: int) -> None:  # noqa: ARG002
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in flat(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases; `WANDB_MODE=offline` keeps everything in the run's folder."""

    def __init__(self, config: TrainConfig, run: Path, first_step: int) -> None:  # noqa: ARG002
        import wandb

        with _wandb_errors():
            self._run: Any = wandb.init(
                project="piston",
                name=config.exp_name,
                id=_own_id(run / WANDB_ID),
                resume="allow",
                dir=str(run),
                config=to_json(config),
            )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(flat(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _own_id(path: Path) -> str:
    """Return the run's id: the same when it is resumed, another when it is started again."""
    if not path.is_file():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


def flat(metrics: Metrics) -> dict[str, float]:
    """Turn each list, one number per dimension, into separate entries `name/index`."""
    result: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Sequence):
            result |= {f"{name}/{index}": number for index, number in enumerate(value)}
        elif value is not None:
            result[name] = value
    return result


def _is_known(value: float | Sequence[float] | None) -> bool:
    """Return False for None and for numbers that JSON cannot hold."""
    return value is not None and (not isinstance(value, float) or math.isfinite(value))
