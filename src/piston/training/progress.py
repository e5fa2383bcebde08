"""What a person sees of a run: a bar, a line per interval, and the first batch as a picture."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image
from rich import progress
from rich.console import Console
from rich.table import Column

from piston.config import TrainConfig
from piston.progress import Live, shortened
from piston.training.step import StepResult
from piston.training.trackers import Metrics

logger = logging.getLogger(__name__)

_MAX_SAMPLES_SHOWN = 4
# Columns of a terminal for the step and all numbers; what a name and a bar need to be worth it.
_NUMBERS_WIDTH, _SMALLEST_NAME, _SMALLEST_BAR = 80, 8, 8


class Meter:
    """Means over an interval, and how much of its time went into waiting for data.

    Its state goes into checkpoints: after a resume the means are of the same steps.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size, self._learning_rate = batch_size, float("nan")
        self._skipped, self.skipped_in_a_row = 0, 0
        self.begin_interval()

    def begin_interval(self) -> None:
        self._count, self._loss, self._gradient_norm = 0, 0.0, 0.0
        self.start_clock()

    def start_clock(self) -> None:
        """Rates are of the steps from now on."""
        self._steps, self._waited, self._started = 0, 0.0, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside takes no time: rates are of steps alone."""
        begun = time.perf_counter()
        yield
        self._started += time.perf_counter() - begun

    def count_step(self, waited: float) -> None:
        """Count a step, for which data were waited for so many seconds."""
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

    def numbers(self) -> Metrics:
        elapsed = time.perf_counter() - self._started
        return {
            "loss": self._loss / self._count if self._count else None,
            "gradient_norm": self._gradient_norm / self._count if self._count else None,
            "learning_rate": self._learning_rate,
            "samples_per_second": self._batch_size * self._steps / elapsed,
            "waiting_for_data": self._waited / elapsed,
            "skipped_steps": self._skipped,
        }

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


class RunBar:
    """A bar on a terminal, nothing elsewhere; the log has a line per interval either way."""

    def __init__(self, config: TrainConfig, first_step: int, shown: bool) -> None:
        console = Console(stderr=True)
        self._bar = Live(
            *_columns(config.exp_name, console.width),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task(
            "", total=config.num_train_steps, completed=first_step, state=""
        )
        self._steps_left, self._batch_size = config.num_train_steps - first_step, config.batch_size
        self._loss: Any = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, meter: Meter) -> None:
        self._steps_left -= 1
        numbers = meter.numbers()
        if numbers["loss"] is not None:  # the results of the newest steps may not be read yet
            self._loss = numbers["loss"]
        numbers = {**numbers, "loss": self._loss}
        left = time_left(numbers, self._steps_left * self._batch_size)
        self._bar.update(self._task, advance=1, state=f"{left}  {describe(numbers)}")


def _columns(name: str, width: int) -> list[progress.ProgressColumn]:
    """Steps and numbers always; of the name and the bar what there is room for."""
    room = width - _NUMBERS_WIDTH
    name = shortened(name, room)
    columns: list[progress.ProgressColumn] = []
    if room > _SMALLEST_NAME:
        columns.append(progress.TextColumn(name, markup=False))
    if room - len(name) > _SMALLEST_BAR:
        columns.append(progress.BarColumn())
    whole = Column(no_wrap=True)
    columns.append(progress.MofNCompleteColumn(table_column=whole))
    columns.append(progress.TextColumn("{task.fields[state]}", table_column=whole.copy()))
    return columns


def describe(numbers: Metrics) -> str:
    loss = "–" if numbers["loss"] is None else f"{numbers['loss']:.4f}"
    return (
        f"loss {loss}  lr {numbers['learning_rate']:.2e}  "
        f"{numbers['samples_per_second']:.1f} samples/s  data {numbers['waiting_for_data']:.0%}"
    )


def time_left(numbers: Metrics, num_samples: int) -> str:
    """How long so many more samples take at the present rate: `2:05:10 left`."""
    rate = numbers["samples_per_second"]
    assert isinstance(rate, float)
    return f"{datetime.timedelta(seconds=round(num_samples / rate))} left"


def save_first_batch(batch: Mapping[str, Any], path: Path) -> None:
    """The cameras side by side, a row per sample, as the model gets them before augmentation."""
    images, masks = batch["image"], batch["image_mask"]
    rows = []
    for sample in range(min(_MAX_SAMPLES_SHOWN, len(batch["state"]))):
        pictures = [
            np.asarray(images[name][sample]) * bool(masks[name][sample]) for name in sorted(images)
        ]
        rows.append(np.concatenate(pictures, axis=1))
    Image.fromarray(np.concatenate(rows, axis=0).astype(np.uint8)).save(path)
    logger.info("First batch: %s (a row per sample; %s)", path, ", ".join(sorted(images)))
