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
from piston.report.markup import Markup, Missing, duration, join, table, tag
from piston.sim.scores import PERCENTILES, Evaluation

if TYPE_CHECKING:
    from piston.report.prediction import Prediction
    from piston.report.training import Run

LARGEST_PROCESS = "the largest process"


@dataclasses.dataclass
class Stages:
    """The stages of a job so far. The seconds of a stage are those of all attempts at it."""

    # Which job it is.
    job: Mapping[str, Any]
    # {"name", "seconds", "result"} of each stage, in order.
    finished: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # So far, unfinished attempts included; and whose memory that is.
    peak_memory_bytes: int = 0
    peak_memory_of: str = LARGEST_PROCESS
    # Stage → seconds of attempts that did not finish it.
    unfinished: dict[str, float] = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> dict[str, Any] | None:
        return next((stage for stage in self.finished if stage["name"] == name), None)

    def add(self, name: str, seconds: float, result: str | None) -> None:
        """Add an attempt at a stage, which replaces a former one; `result` is None if it failed."""
        seconds += self.unfinished.pop(name, 0.0)
        if result is None:
            self.unfinished[name] = seconds
            return
        self.finished = [stage for stage in self.finished if stage["name"] != name]
        self.finished.append({"name": name, "seconds": seconds, "result": result})

    def write(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self), indent=2)


def read_stages(path: Path) -> Stages:
    try:
        return Stages(**read_json(path))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no list of stages as `piston demo` writes it.") from error


def timings(
    stages: Stages | None,
    run: Run,
    evaluations: Sequence[Evaluation],
    prediction: Prediction | None,
) -> Markup:
    """Return the section with the times of stages, training and inference."""
    parts: list[Markup] = []

    def add(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        parts.extend((tag("h3", title), table(header, rows, class_="numbers")))

    if stages is not None and stages.finished:
        seconds = [stage["seconds"] for stage in stages.finished]
        rows = []
        for stage in stages.finished:
            share = 100 * stage["seconds"] / (max(seconds) or 1)
            bar = tag("span", class_="bar", style=f"width:{max(share, 0.5):.1f}%")
            rows.append((stage["name"], duration(stage["seconds"]), bar, stage["result"]))
        rows.append(("all stages", duration(sum(seconds)), Markup(), ""))
        add("Stages", ("stage", "time", "", "result"), rows)
    _, speed = run.curve("samples_per_second")
    if len(speed):
        measured = {
            "samples per second, median": f"{np.median(speed):,.1f}",
            "slowest and fastest interval": f"{speed.min():,.1f} … {speed.max():,.1f}",
            "a step, median": f"{1e3 * run.config.batch_size / np.median(speed):,.0f} ms",
            "waiting for data, median": f"{np.median(run.curve('waiting_for_data')[1]):.1%}",
            "all steps": duration(run.training_seconds),
        }
        add("Training", ("", "measured"), list(measured.items()))
    latencies = [
        (f"as the robot waited ({evaluation.name}, {evaluation.policy})", evaluation.latency_ms)
        for evaluation in evaluations
    ]
    if prediction is not None:
        about = f"{prediction.device}, {prediction.num_timed} requests"
        name = f"in this page's process, one request at a time ({about})"
        latencies.append((name, prediction.latency_ms))
    if latencies:
        header = ("a chunk of actions", *(f"{p} %" for p in PERCENTILES))
        amounts = (
            (name, *(f"{times[f'p{p}']:,.0f} ms" for p in PERCENTILES)) for name, times in latencies
        )
        add("Inference", header, list(amounts))
    if not parts:
        raise Missing("nothing was measured yet. Train and evaluate the run.")
    return join(parts)
