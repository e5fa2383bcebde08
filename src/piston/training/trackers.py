"""Metrics of a run: measured, logged to `metrics.jsonl`, and to TensorBoard or W&B if asked for."""

from __future__ import annotations

import datetime
import importlib.util
import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from piston.config import TrainConfig
from piston.files import json_line, read_json_lines, write_json_lines
from piston.serialization import to_json
from piston.training.step import StepResult

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
_MAX_SAMPLES_SHOWN = 4
WANDB_ID = "wandb_id.txt"
_WANDB_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
# A list has one number per dimension. Values that are None or not finite are not logged.
Metrics = Mapping[str, float | Sequence[float] | None]


@runtime_checkable
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


# -- what a person sees of a run


class Meter:
    """Averages over a logging interval, and the share of its time spent waiting for data.

    Its state is saved in checkpoints, so that averages after a resume cover the same steps.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size, self._learning_rate = batch_size, float("nan")
        self._skipped, self.skipped_in_a_row = 0, 0
        self._shown_loss: float | None = None
        self.begin_interval()

    def begin_interval(self) -> None:
        self._count, self._loss, self._gradient_norm = 0, 0.0, 0.0
        self.start_clock()

    def start_clock(self) -> None:
        """Measure rates from now on."""
        self._steps, self._waited, self._started = 0, 0.0, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent in this context out of the rates."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def count_step(self, waited: float) -> None:
        """Count a step that waited for data for so many seconds."""
        self._steps += 1
        self._waited += waited

    def add(self, result: StepResult) -> None:
        self._learning_rate = result.learning_rate
        if result.skipped:
            self._skipped += 1
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
            self._count += 1
            self._loss += result.loss
            self._gradient_norm += result.gradient_norm
            self._shown_loss = self._loss / self._count

    def metrics(self) -> Metrics:
        elapsed = time.perf_counter() - self._started
        return {
            "loss": self._loss / self._count if self._count else None,
            "gradient_norm": self._gradient_norm / self._count if self._count else None,
            "learning_rate": self._learning_rate,
            "samples_per_second": self._batch_size * self._steps / elapsed,
            "waiting_for_data": self._waited / elapsed,
            "skipped_steps": self._skipped,
        }

    def __str__(self) -> str:
        elapsed = time.perf_counter() - self._started
        loss = "–" if self._shown_loss is None else f"{self._shown_loss:.4f}"
        return (
            f"loss {loss}  lr {self._learning_rate:.2e}  "
            f"{self._batch_size * self._steps / elapsed:.1f} samples/s  "
            f"data {self._waited / elapsed:.0%}"
        )

    def time_left(self, num_steps: int) -> datetime.timedelta:
        """Estimate the time that so many more steps take."""
        elapsed = time.perf_counter() - self._started
        return datetime.timedelta(seconds=round(num_steps * elapsed / self._steps))

    def state_dict(self) -> dict[str, float]:
        return {
            "count": self._count,
            "loss": self._loss,
            "gradient_norm": self._gradient_norm,
            "skipped": self._skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count, self._loss = state["count"], state["loss"]
        self._gradient_norm = state["gradient_norm"]
        self._skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]


def save_first_batch(batch: Mapping[str, Any], path: Path) -> None:
    """Save the images of some samples, a row per sample, as the model gets them unaugmented."""
    images, masks = batch["image"], batch["image_mask"]
    rows = [
        np.concatenate(
            [np.asarray(images[name][i]) * bool(masks[name][i]) for name in sorted(images)], axis=1
        )
        for i in range(min(_MAX_SAMPLES_SHOWN, len(batch["state"])))
    ]
    Image.fromarray(np.concatenate(rows).astype(np.uint8)).save(path)
    logger.info("First batch: %s (a row per sample; %s)", path, ", ".join(sorted(images)))
