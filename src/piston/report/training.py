"""A run as its folder holds it, and the sections on its training and how it was started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from markupsafe import Markup
from PIL import Image

from piston import presets
from piston.config import TrainConfig
from piston.files import read_json_lines, read_json_object
from piston.report.document import Missing, render, small_plot
from piston.report.figures import Line, is_wide
from piston.training.checkpoint import newest_whole_step
from piston.training.run import CONFIG, HISTORY
from piston.training.trackers import METRICS, read_metrics
from piston.training.validation import ERROR_PER_DIM

FIRST_BATCH = "first_batch.png"
Curve = tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    config: TrainConfig
    # The lines of metrics.jsonl, and of history.jsonl: one for each start.
    metrics: list[dict[str, Any]]
    history: list[dict[str, Any]]

    @cached_property
    def checkpoint(self) -> Path | None:
        step = newest_whole_step(self.folder)
        return None if step is None else self.folder / str(step)

    def curve(self, name: str) -> Curve:
        """Return the steps at which a value was logged, and its values."""
        pairs = [(line["step"], line[name]) for line in self.metrics if name in line]
        steps, values = np.array(pairs, float).reshape(-1, 2).T
        return steps, values

    @property
    def losses(self) -> list[str]:
        """Return the names of the curves that the loss is the sum of, if it is one."""
        return [*dict.fromkeys(key for line in self.metrics for key in line if key[:5] == "loss/")]

    def last(self, name: str) -> float | None:
        """Return the value of a curve at its end, None if it was never logged."""
        values = self.curve(name)[1]
        return float(values[-1]) if len(values) else None

    @cached_property
    def error_per_dim(self) -> dict[str, Curve]:
        """Return the validation error of each action dimension over the steps, by its name."""
        points: dict[str, list[tuple[int, float]]] = {}
        for line in self.metrics:
            errors = line.get(ERROR_PER_DIM, {})
            if not isinstance(errors, Mapping):  # a list in runs of version 0.1.0
                errors = {f"action[{dim}]": error for dim, error in enumerate(errors)}
            for name, error in errors.items():
                points.setdefault(name, []).append((line["step"], error))
        arrays = {name: np.array(pairs, float).T for name, pairs in points.items()}
        return {name: (steps, errors) for name, (steps, errors) in arrays.items()}

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
    history = [line for _, line in read_json_lines(folder / HISTORY) if line]
    return Run(folder, config, read_metrics(folder / METRICS), history)


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
    parts = [Line(*run.curve(name), f"run-{i}", name) for i, name in enumerate(run.losses)]
    norm = Line(*run.curve("gradient_norm"), "quiet", "gradient norm")
    return render(
        "training.html",
        loss=lines,
        loss_is_wide=is_wide(np.concatenate([losses, validation])),
        parts=parts,
        parts_are_wide=bool(parts) and is_wide(np.concatenate([line.y for line in parts])),
        rate=Line(*run.curve("learning_rate"), "quiet", "learning rate"),
        norm=norm,
        norm_is_wide=is_wide(norm.y),
        clip=run.config.optimizer.clip_gradient_norm,
        skipped=int(sum(run.curve("skipped_steps")[1])),
        first_batch=_first_batch(run.folder / FIRST_BATCH),
    )


def _first_batch(path: Path) -> np.ndarray | None:
    if not path.is_file():
        return None
    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB"))


def action_error(runs: Iterable[Run]) -> str:
    """Return what the action error is and its unit, for captions."""
    units = {
        "half of the range between the 1 % and 99 % quantiles of the training data"
        if run.config.model.uses_quantiles
        else "a standard deviation of the training data"
        for run in runs
    }
    unit = " or ".join(sorted(units)) + ", depending on the model" * (len(units) > 1)
    return (
        "the mean distance of the predicted actions from the recorded ones, on episodes that are "
        f"held out of training. It is in normalised units: 1 is {unit}. Lower is better."
    )


def validation(run: Run) -> Markup:
    """Return the section with the error of each action dimension on held-out episodes."""
    errors = run.error_per_dim
    if not errors:
        reason = "no validation is logged yet."
        if not run.config.validation_episodes:
            reason = "no episodes were held out of training. Train with --validation-episodes 5"
        elif len(run.curve("validation/loss")[0]):
            reason = f"{run.config.model.family} writes tokens: validation measures its loss only."
        raise Missing(reason)
    figures = [
        small_plot(name, [Line(*curve)], "step", value=f"{curve[1][-1]:.2g}", from_zero=True)
        for name, curve in errors.items()
    ]
    mean = Line(*run.curve("validation/action_error"), "accent", "action error")
    return render("validation.html", action_error=action_error([run]), mean=mean, figures=figures)


def origin(run: Run) -> Markup:
    """Return the section that says how, when and where the run was started."""
    if not run.history:
        raise Missing("the run was started by a version of Piston that did not log it.")
    return render("origin.html", starts=run.history)
