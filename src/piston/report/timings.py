"""The stages of a job with their times, as a file that a job adds to; and the section on times.

This module does without torch: `piston demo` starts quickly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from piston.files import read_json, write_json
from piston.report.markup import Markup, Missing, duration, join, scrolling, table, tag
from piston.sim.scores import Evaluation

if TYPE_CHECKING:
    from piston.report.prediction import Prediction
    from piston.report.training import Run

# What a peak of memory can be of.
LARGEST, TOGETHER = "the largest process", "all processes together"
_PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    result: str


@dataclasses.dataclass(frozen=True)
class Stages:
    """Finished stages in order. `job` says which job they belong to.

    A stage may take several attempts: its seconds are those of all of them.
    """

    job: Mapping[str, Any]
    finished: tuple[Stage, ...] = ()
    # So far, unfinished attempts included.
    peak_memory_bytes: int = 0
    # Whose memory that is, as in "peak memory of …".
    peak_memory_of: str = LARGEST
    # Stage → seconds of attempts that did not finish it.
    unfinished: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> Stage | None:
        return next((stage for stage in self.finished if stage.name == name), None)

    def after(self, name: str, seconds: float, result: str | None) -> Stages:
        """Return the stages after an attempt at one; `result` is None if it did not finish.

        A stage done again replaces its former self.
        """
        seconds += self.unfinished.get(name, 0.0)
        if result is None:
            return dataclasses.replace(self, unfinished={**self.unfinished, name: seconds})
        finished = [stage for stage in self.finished if stage.name != name]
        return dataclasses.replace(
            self,
            finished=(*finished, Stage(name, seconds, result)),
            unfinished={key: old for key, old in self.unfinished.items() if key != name},
        )

    def write(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self), indent=2)


def read_stages(path: Path) -> Stages:
    try:
        found = read_json(path)
        finished = tuple(Stage(**stage) for stage in found["finished"])
        return Stages(
            found["job"],
            finished,
            found["peak_memory_bytes"],
            # Older files have neither.
            found.get("peak_memory_of", LARGEST),
            found.get("unfinished", {}),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no list of stages as `piston demo` writes it.") from error


def timings(
    stages: Stages | None,
    run: Run,
    evaluations: Sequence[Evaluation],
    prediction: Prediction | Missing,
) -> Markup | Missing:
    """Return the section with the times of stages, training and inference."""
    parts = [_stages(stages), _training(run), _inference(evaluations, prediction)]
    if not any(parts):
        return Missing("nothing was measured yet. Train and evaluate the run.")
    return join(parts)


def _stages(stages: Stages | None) -> Markup | None:
    if stages is None or not stages.finished:
        return None
    total = sum(stage.seconds for stage in stages.finished)
    longest = max(stage.seconds for stage in stages.finished)
    rows = [
        (stage.name, duration(stage.seconds), _bar(stage.seconds / (longest or 1)), stage.result)
        for stage in stages.finished
    ]
    rows.append(("all stages", duration(total), Markup(), ""))
    return join([tag("h3", "Stages"), _table(("stage", "time", "", "result"), rows)])


def _bar(share: float) -> Markup:
    return tag("span", class_="bar", style=f"width:{max(100 * share, 0.5):.1f}%")


def _training(run: Run) -> Markup | None:
    _, speed = run.curve("samples_per_second")
    _, waiting = run.curve("waiting_for_data")
    if not len(speed):
        return None
    rows = [
        ("samples per second, median", f"{np.median(speed):,.1f}"),
        ("slowest and fastest interval", f"{speed.min():,.1f} … {speed.max():,.1f}"),
        ("a step, median", f"{1e3 * run.config.batch_size / np.median(speed):,.0f} ms"),
        ("waiting for data, median", f"{np.median(waiting):.1%}"),
        ("all steps", duration(run.training_seconds)),
    ]
    return join([tag("h3", "Training"), _table(("", "measured"), rows)])


def _inference(
    evaluations: Sequence[Evaluation], prediction: Prediction | Missing
) -> Markup | None:
    rows = [
        (
            f"as the robot waited ({evaluation.name}, {evaluation.policy})",
            *(f"{evaluation.latency_ms[f'p{p}']:,.0f} ms" for p in _PERCENTILES),
        )
        for evaluation in evaluations
    ]
    if not isinstance(prediction, Missing) and prediction.infer_ms:
        times, device = prediction.infer_ms, prediction.device
        name = f"in this page's process, one request at a time ({device}, {len(times)} requests)"
        rows.append((name, *(f"{np.percentile(times, p):,.0f} ms" for p in _PERCENTILES)))
    if not rows:
        return None
    header = ("a chunk of actions", *(f"{p} %" for p in _PERCENTILES))
    return join([tag("h3", "Inference"), _table(header, rows)])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    return scrolling(table(header, rows, class_="numbers"))
