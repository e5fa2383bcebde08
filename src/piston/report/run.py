"""What a run's folder tells: its configuration, its numbers, its newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from piston import presets
from piston.config import TrainConfig
from piston.files import read_json_object
from piston.training.checkpoint import newest_whole_step
from piston.training.run import CONFIG
from piston.training.trackers import METRICS

FIRST_BATCH = "first_batch.png"


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    config: TrainConfig
    # The lines of metrics.jsonl.
    metrics: tuple[dict[str, Any], ...]

    @cached_property
    def checkpoint(self) -> Path | None:
        """The newest that is as it was written."""
        step = newest_whole_step(self.folder)
        return None if step is None else self.folder / str(step)

    def curve(self, name: str) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Steps, and the number of that name after each of them."""
        pairs = [(line["step"], line[name]) for line in self.metrics if name in line]
        steps, values = np.array(pairs, float).reshape(-1, 2).T
        return steps, values

    @property
    def training_seconds(self) -> float:
        """Of the steps that were logged, without what came before the first."""
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
    metrics = folder / METRICS
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return Run(folder, config, tuple(json.loads(line) for line in lines))
