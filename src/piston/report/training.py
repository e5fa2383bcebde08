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
from piston.report.markup import (
    Frame,
    Line,
    Markup,
    Missing,
    image,
    is_wide,
    join,
    note,
    plot,
    png,
    scrolling,
    tag,
)
from piston.training.checkpoint import newest_whole_step
from piston.training.run import CONFIG
from piston.training.trackers import METRICS, read_metrics

FIRST_BATCH = "first_batch.png"


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    config: TrainConfig
    # The lines of metrics.jsonl.
    metrics: tuple[dict[str, Any], ...]

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
    if not (folder / CONFIG).is_file():
        parent = folder.parent / CONFIG
        hint = (
            f" It is a checkpoint: give its run, {folder.parent}."
            if parent.is_file()
            else " `piston runs` lists the runs there are."
        )
        raise FileNotFoundError(f"{folder} is no run of `piston train`: it has no {CONFIG}.{hint}")
    config = presets.train_config_from_json(read_json_object(folder / CONFIG), str(folder / CONFIG))
    return Run(folder, config, tuple(read_metrics(folder / METRICS)))


def training(run: Run) -> Markup | Missing:
    """Return the section with the loss, the learning rate and the first batch."""
    steps, losses = run.curve("loss")
    if len(steps) < 2:
        return Missing(
            f"metrics.jsonl has {len(steps)} line(s) with a loss. Train on, or log more often: "
            "--log-interval 10"
        )
    lines = [Line(steps, losses, "accent", "training loss")]
    validated, validation = run.curve("validation/loss")
    if len(validated):
        lines.append(Line(validated, validation, "second", "loss on held-out episodes"))
    log = is_wide(np.concatenate([losses, validation]))
    scale = "loss (log)" if log else "loss"
    curves = scrolling(
        plot(lines, Frame(960, 300, "", scale, log=log, markers=True)),
        _small(run, "learning_rate", "learning rate", last=False),
        _small(run, "gradient_norm", "gradient norm", last=True),
        class_="scrolls wide",
    )
    count = int(sum(run.curve("skipped_steps")[1]))
    skipped = note(f"{count} steps were skipped: not finite.") if count else None
    return join([curves, skipped, _first_batch(run)])


def _small(run: Run, name: str, label: str, last: bool) -> Markup:
    steps, values = run.curve(name)
    log = name == "gradient_norm" and is_wide(values)
    size = (960, 130, "step") if last else (960, 110, "")
    frame = Frame(*size, label, log=log, markers=True, num_y_ticks=3)
    return plot([Line(steps, values, "quiet", label)], frame)


def _first_batch(run: Run) -> Markup | None:
    path = run.folder / FIRST_BATCH
    if not path.is_file():
        return None
    with Image.open(path) as opened:
        source = png(np.asarray(opened.convert("RGB")), longest=480)
    picture = image(source, "the first batch", loading="lazy")
    return tag(
        "details",
        tag("summary", "The first batch, as the model got it"),
        note("A row per sample, a column per camera."),
        picture,
    )
