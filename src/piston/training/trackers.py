"""What a run reports: metrics of its steps, to `metrics.jsonl`, services and the terminal."""

from __future__ import annotations

import datetime
import importlib.util
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from piston.config import TrainConfig
from piston.data.problems import leave_out_any
from piston.extras import missing_package
from piston.files import json_line, read_json_lines, write_json_lines
from piston.serialization import to_json
from piston.training.step import StepOutput, StepResult, Trainer

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_id.txt"
# A run ends after this many steps in a row whose loss or gradient is not finite.
MAX_SKIPPED_STEPS = 10
_MAX_SAMPLES_SHOWN = 4
# A mapping has one number per action dimension. Values that are None or not finite are not logged.
Metrics = Mapping[str, float | Mapping[str, float] | None]
# The two functions of a tracker: log the metrics of a step; close.
Tracker = tuple[Callable[[int, Metrics], Any], Callable[[], Any]]


class TrainingStopped(RuntimeError):
    """The run ended before its last step; the message says why and what to do."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Trackers:
    """Logs to all trackers. The first failure of each is reported; training continues."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = trackers
        self._failed: set[str] = set()

    def log(self, step: int, metrics: Metrics) -> None:
        known = {
            name: value
            for name, value in metrics.items()
            if value is not None and (not isinstance(value, float) or math.isfinite(value))
        }
        for name, (log, _) in self._trackers.items():
            self._call(name, f"Metrics of step {step} were not written", log, step, known)

    def close(self) -> None:
        for name, (_, close) in self._trackers.items():
            self._call(name, "Metrics were not all written", close)

    def _call(self, name: str, failure: str, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # third-party code may raise anything
            if name not in self._failed:
                again = "training continues, this is logged once"
                logger.error("%s: %s (%s; %s)", failure, error, name, again)
            self._failed.add(name)


def require_installed(config: TrainConfig) -> None:
    """Raise ImportError if a tracker is not installed, before anything slow happens."""
    for name in config.tracking:
        if importlib.util.find_spec(name) is None:
            raise missing_package(f"--tracking {name}", name)


def check_logins(config: TrainConfig) -> None:
    """Raise ValueError if a login fails, before an earlier run is deleted."""
    if "wandb" in config.tracking:
        import wandb

        if wandb.setup().settings.mode not in ("offline", "dryrun", "disabled"):
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
    trackers = {METRICS: json_lines(run / METRICS)}
    if "tensorboard" in config.tracking:
        trackers["tensorboard"] = _tensorboard(run, first_step)
    if "wandb" in config.tracking:
        trackers["wandb"] = _wandb(config, run)
    return Trackers(trackers)


def json_lines(path: Path) -> Tracker:
    """Append one JSON object per log call to a file."""
    file = path.open("a", encoding="utf-8")

    def log(step: int, metrics: Metrics) -> None:
        file.write(json_line({"step": step, **metrics}))
        file.flush()

    return log, file.close


def _tensorboard(run: Path, first_step: int) -> Tracker:
    """Write event files. A resumed run hides what was logged after `first_step`."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=first_step)

    def log(step: int, metrics: Metrics) -> None:
        for name, value in flat(metrics).items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(config: TrainConfig, run: Path) -> Tracker:
    """Log to Weights & Biases; `WANDB_MODE=offline` keeps everything in the run's folder."""
    import wandb

    identity = run / WANDB_ID  # the same when the run is resumed, another when it starts again
    if not identity.is_file():
        identity.write_text(uuid.uuid4().hex)
    with _wandb_errors():
        service: Any = wandb.init(
            project="piston",
            name=config.exp_name,
            id=identity.read_text(),
            resume="allow",
            dir=str(run),
            config=to_json(config),
        )
    return lambda step, metrics: service.log(flat(metrics), step=step), service.finish


def flat(metrics: Metrics) -> dict[str, float]:
    """Turn each mapping, one number per dimension, into separate entries `name/dimension`."""
    result: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            result |= {f"{name}/{dimension}": number for dimension, number in value.items()}
        elif value is not None:
            result[name] = value
    return result


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return what was logged; lines that are cut off or damaged are left out."""
    lines = (line for _, line in read_json_lines(path))
    return [
        line
        for line in lines
        if line
        and isinstance(line.get("step"), int)
        and isinstance(line.get("loss", 0.0), int | float)
    ]


def remove_metrics_after(path: Path, step: int) -> None:
    """Delete the lines of steps that a resumed run repeats."""
    if path.is_file():
        write_json_lines(path, [line for line in read_metrics(path) if line["step"] <= step])


class Meter:
    """What the steps of a logging interval measured, and its time spent waiting for data.

    Results are read for several steps at once, as reading waits for the device. `totals` are saved
    in checkpoints, so that averages after a resume cover the same steps.
    """

    def __init__(self, config: TrainConfig, trainer: Trainer) -> None:
        self._config, self._trainer = config, trainer
        self._unread: list[tuple[int, StepOutput, list[Sequence[int]]]] = []
        self._learning_rate = float("nan")
        self._shown_loss: float | None = None
        self.totals: dict[str, Any] = {"skipped": 0, "skipped_in_a_row": 0}
        self.begin_interval()

    def begin_interval(self) -> None:
        self.totals |= {"count": 0, "losses": {}, "gradient_norm": 0.0}
        self.start_clock()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue the sums of a checkpoint; after one of version 0.1.0 an interval begins."""
        self.totals |= saved
        if self.totals.pop("loss", None) is not None:  # in 0.1.0 the only loss, without a name
            self.begin_interval()

    def start_clock(self) -> None:
        """Measure rates from now on."""
        self._steps, self._waited, self._started = 0, 0.0, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent in this context out of the rates."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def add(self, step: int, output: StepOutput, batch: Mapping[str, Any], waited: float) -> None:
        """Count a step that waited for its batch for so many seconds; its results are read later.

        Not too late: a run that skips all of its steps has to end.
        """
        self._steps += 1
        self._waited += waited
        places = [batch[key] for key in ("set_index", "episode_index", "frame_index")]
        self._unread.append((step, output, places))
        if len(self._unread) == MAX_SKIPPED_STEPS:
            self.read()

    def read(self) -> None:
        """Read results; raise TrainingStopped if too many steps in a row were skipped."""
        if not self._unread:
            return
        unread, self._unread, totals = self._unread, [], self.totals
        results = self._trainer.read([output for _, output, _ in unread])
        for (step, _, places), result in zip(unread, results):
            self._learning_rate = result.learning_rate
            if result.skipped:
                totals["skipped"] += 1
                totals["skipped_in_a_row"] += 1
                self._report_skipped(step, result, places)
                continue
            totals["skipped_in_a_row"] = 0
            totals["count"] += 1
            # A new dictionary: a checkpoint that is being written may hold the one of before.
            losses = dict(totals["losses"])
            for name, loss in result.losses.items():
                total, count = losses.get(name, (0.0, 0))
                losses[name] = [total + loss, count + 1]
            totals["losses"] = losses
            totals["gradient_norm"] += result.gradient_norm
            self._shown_loss = sum(self._losses().values())

    def _report_skipped(
        self, step: int, result: StepResult, places: Sequence[Sequence[int]]
    ) -> None:
        config, in_a_row = self._config, self.totals["skipped_in_a_row"]
        several = len(config.pipelines()) > 1
        frames = [
            f"{f'set {int(which)} ' if several else ''}{int(episode)}/{int(frame)}"
            f"{' (!)' if number in result.bad_samples else ''}"
            for number, (which, episode, frame) in enumerate(zip(*places))
        ]
        logger.warning(
            "Step %d skipped: loss %s, gradient norm %s. Episode/frame of its samples, with (!) "
            "where the loss is not finite: %s",
            *(step, result.loss, result.gradient_norm, ", ".join(frames)),
        )
        if in_a_row >= MAX_SKIPPED_STEPS:
            without = leave_out_any(config.pipelines())
            raise TrainingStopped(
                f"{in_a_row} steps in a row had a loss or gradient that is not finite; they "
                "changed no weights, and checkpoints are untouched. If few samples above have a "
                f"(!), leave their episodes out: --resume {without}. If most have it, lower the "
                f"learning rate: --resume --lr-schedule.peak-lr "
                f"{config.lr_schedule.peak_lr / 2:g}, or try --resume --model.dtype float32."
            )

    def _losses(self) -> dict[str, float]:
        """Return the mean of each loss over the steps that it has a part in."""
        return {name: total / count for name, (total, count) in self.totals["losses"].items()}

    def metrics(self) -> dict[str, Any]:
        count, elapsed = self.totals["count"], time.perf_counter() - self._started
        losses = self._losses()
        several = {f"loss/{name}": loss for name, loss in losses.items()} if len(losses) > 1 else {}
        return {
            "loss": sum(losses.values()) if losses else None,
            **several,
            "gradient_norm": self.totals["gradient_norm"] / count if count else None,
            "learning_rate": self._learning_rate,
            "samples_per_second": self._config.batch_size * self._steps / elapsed,
            "waiting_for_data": self._waited / elapsed,
            "skipped_steps": self.totals["skipped"],
        }

    def __str__(self) -> str:
        loss = "–" if self._shown_loss is None else f"{self._shown_loss:.4f}"
        rates = "{samples_per_second:.1f} samples/s  data {waiting_for_data:.0%}"
        return f"loss {loss}  lr {self._learning_rate:.2e}  {rates.format_map(self.metrics())}"

    def time_left(self, num_steps: int) -> datetime.timedelta:
        """Estimate the time that so many more steps take."""
        elapsed = time.perf_counter() - self._started
        return datetime.timedelta(seconds=round(num_steps * elapsed / self._steps))


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
