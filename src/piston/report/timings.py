"""The section on times: of the stages of a job, of training and of inference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from piston.report.document import Missing, render
from piston.report.figures import duration
from piston.report.prediction import Prediction
from piston.report.training import Run
from piston.sim.scores import PERCENTILES, Evaluation
from piston.stages import Stages


def timings(
    stages: Stages | None,
    run: Run,
    evaluations: Sequence[Evaluation],
    prediction: Prediction | None,
) -> Markup:
    """Return the section with the times of stages, training and inference."""
    _, speed = run.curve("samples_per_second")
    measured: dict[str, str] = {}
    if len(speed):
        measured = {
            "samples per second, median": f"{np.median(speed):,.1f}",
            "slowest and fastest interval": f"{speed.min():,.1f} … {speed.max():,.1f}",
            "a step, median": f"{1e3 * run.config.batch_size / np.median(speed):,.0f} ms",
            "waiting for data, median": f"{np.median(run.curve('waiting_for_data')[1]):.1%}",
            "all steps": duration(run.training_seconds),
        }
    latencies = [
        (f"as the robot waited ({evaluation.name}, {evaluation.policy})", evaluation.latency_ms)
        for evaluation in evaluations
    ]
    if prediction is not None:
        about = f"{prediction.policy.device}, {prediction.num_timed} requests"
        name = f"in this page's process, one request at a time ({about})"
        latencies.append((name, prediction.latency_ms))
    finished = [] if stages is None else stages.finished
    if not (finished or measured or latencies):
        raise Missing("nothing was measured yet. Train and evaluate the run.")
    return render(
        "timings.html",
        stages=finished,
        longest=max((stage["seconds"] for stage in finished), default=0.0) or 1.0,
        training=measured,
        latency_columns=["a chunk of actions", *(f"{p} %" for p in PERCENTILES)],
        latencies=[
            (name, *(f"{times[f'p{p}']:,.0f} ms" for p in PERCENTILES)) for name, times in latencies
        ],
    )
