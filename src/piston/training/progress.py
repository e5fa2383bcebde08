"""What a person sees of a run: a bar, a line per interval, and the first batch as a picture."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image
from rich import progress
from rich.console import Console

from piston.config import TrainConfig
from piston.training.step import StepResult
from piston.training.trackers import Numbers

logger = logging.getLogger(__name__)

_MAX_SAMPLES_SHOWN = 4


class Meter:
    """Means over an interval, and how much of its time went into waiting for data."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self.reset()

    def reset(self) -> None:
        self._started = time.perf_counter()
        self._waited = 0.0
        self._results: list[StepResult] = []

    def add(self, result: StepResult, waited: float) -> None:
        self._waited += waited
        self._results.append(result)

    def numbers(self) -> Numbers:
        elapsed = time.perf_counter() - self._started
        good = [result for result in self._results if not result.skipped]
        return {
            "loss": _mean([result.loss for result in good]),
            "gradient_norm": _mean([result.gradient_norm for result in good]),
            "learning_rate": self._results[-1].learning_rate,
            "samples_per_second": self._batch_size * len(self._results) / elapsed,
            "waiting_for_data": self._waited / elapsed,
            "skipped_steps": len(self._results) - len(good),
        }


class RunBar:
    """A bar on a terminal, nothing elsewhere; the log has a line per interval either way."""

    def __init__(self, config: TrainConfig, start: int, shown: bool) -> None:
        console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.TextColumn(config.exp_name, markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[state]}"),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=config.num_train_steps, completed=start, state="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, meter: Meter) -> None:
        numbers = meter.numbers()
        self._bar.update(self._task, advance=1, state=describe(numbers))


def describe(numbers: Numbers) -> str:
    return (
        f"loss {numbers['loss']:.4f}  lr {numbers['learning_rate']:.2e}  "
        f"{numbers['samples_per_second']:.1f} samples/s  data {numbers['waiting_for_data']:.0%}"
    )


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


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
