"""Where the time went: stages, training, inference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from piston.report.amounts import duration
from piston.report.contents import Contents, Missing
from piston.report.markup import Markup, join, table, tag
from piston.report.stages import Stage

_PERCENTILES = (50, 90, 99)


def timings(contents: Contents) -> Markup | Missing:
    parts = [_stages(contents), _training(contents), _inference(contents)]
    if not any(parts):
        return Missing("nothing was measured yet. Train and evaluate the run.")
    return join(parts)


def _stages(contents: Contents) -> Markup | None:
    if contents.stages is None or not contents.stages.finished:
        return None
    stages = contents.stages.finished
    total = sum(stage.seconds for stage in stages)
    longest = max(stage.seconds for stage in stages)
    rows = [
        (stage.name, duration(stage.seconds), _bar(stage, longest), stage.result)
        for stage in stages
    ]
    rows.append(("all stages", duration(total), Markup(), ""))
    return join([tag("h3", "Stages"), _table(("stage", "time", "", "result"), rows)])


def _bar(stage: Stage, longest: float) -> Markup:
    share = 100 * stage.seconds / longest if longest else 0
    return tag("span", class_="bar", style=f"width:{max(share, 0.5):.1f}%")


def _training(contents: Contents) -> Markup | None:
    run = contents.run
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


def _inference(contents: Contents) -> Markup | None:
    rows = [
        (
            f"as the robot waited ({evaluation.name}, {evaluation.policy})",
            *(f"{evaluation.latency_ms[f'p{p}']:,.0f} ms" for p in _PERCENTILES),
        )
        for evaluation in contents.evaluations
    ]
    if not isinstance(contents.prediction, Missing) and contents.prediction.infer_ms:
        times, device = contents.prediction.infer_ms, contents.prediction.device
        name = f"in this page's process, one request at a time ({device}, {len(times)} requests)"
        rows.append((name, *(f"{np.percentile(times, p):,.0f} ms" for p in _PERCENTILES)))
    if not rows:
        return None
    header = ("a chunk of actions", *(f"{p} %" for p in _PERCENTILES))
    return join([tag("h3", "Inference"), _table(header, rows)])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    return tag("div", table(header, rows, class_="numbers"), class_="scrolls")
