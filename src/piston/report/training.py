"""A run as its folder holds it, and the section on its training."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from piston import presets
from piston.config import TrainConfig
from piston.files import read_json_object
from piston.report.markup import Line, Markup, Missing, image, is_wide, join, note, plot, tag
from piston.training.checkpoint import newest_whole_step
from piston.training.run import CONFIG
from piston.training.trackers import METRICS, read_metrics

FIRST_BATCH = "first_batch.png"


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    config: TrainConfig
    # The lines of metrics.jsonl.
    metrics: list[dict[str, Any]]

    @cached_property
    def checkpoint(self) -> Path | None:
        step = newest_whole_step(self.folder)
        return None if step is None else self.folder / str(step)

    def curve(self, name: str) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Return the steps at which a value was logged, and its values."""
        pairs = [(line["step"], line[name]) for line in self.metrics if name in line]
        steps, values = np.array(pairs, float).reshape(-1, 2).T
        return steps, values

    @property
    def training_seconds(self) -> float:
        """Return the duration of the logged steps, without what came before the first."""
        steps, speed = self.curve("samples_per_second")
        counts = np.diff(steps, prepend=-1.0)
        return float(np.sum(counts * self.config.batch_size / speed))


def read_run(folder: Path) -> Run:
    path = folder / CONFIG
    if not path.is_file():
        hint = "`piston runs` lists the runs there are."
        if (folder.parent / CONFIG).is_file():
            hint = f"It is a checkpoint: give its run, {folder.parent}."
        raise FileNotFoundError(f"{folder} is no run of `piston train`: it has no {CONFIG}. {hint}")
    config = presets.train_config_from_json(read_json_object(path), str(path))
    return Run(folder, config, read_metrics(folder / METRICS))


def training(run: Run) -> Markup:
    """Return the section with the loss, the learning rate and the first batch."""
    steps, losses = run.curve("loss")
    if len(steps) < 2:
        raise Missing(
            f"metrics.jsonl has {len(steps)} line(s) with a loss. Train on, or log more often: "
            "--log-interval 10"
        )
    lines = [Line(steps, losses, "accent", "training loss")]
    validated, validation = run.curve("validation/loss")
    if len(validated):
        lines.append(Line(validated, validation, "second", "loss on held-out episodes"))
    log = is_wide(np.concatenate([losses, validation]))
    rate = Line(*run.curve("learning_rate"), "quiet", "learning rate")
    norm = Line(*run.curve("gradient_norm"), "quiet", "gradient norm")
    curves = tag(
        "div",
        plot(lines, 960, 300, "", "loss (log)" if log else "loss", log=log, markers=True),
        plot([rate], 960, 110, "", rate.name, markers=True, num_ticks=(6, 3)),
        plot(
            [norm], 960, 130, "step", norm.name, log=is_wide(norm.y), markers=True, num_ticks=(6, 3)
        ),
        class_="scrolls wide",
    )
    count = int(sum(run.curve("skipped_steps")[1]))
    skipped = note(f"{count} steps were skipped: not finite.") if count else None
    return join([curves, skipped, _first_batch(run.folder / FIRST_BATCH)])


def _first_batch(path: Path) -> Markup | None:
    if not path.is_file():
        return None
    with Image.open(path) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    return tag(
        "details",
        tag("summary", "The first batch, as the model got it"),
        note("A row per sample, a column per camera."),
        image(pixels, "the first batch", longest=480, loading="lazy"),
    )
