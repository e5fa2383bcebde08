"""The chunks of one evaluated episode against what was executed of them."""

from __future__ import annotations

import numpy as np

from piston.report.contents import Contents, Missing
from piston.report.markup import Markup, join, tag
from piston.report.parts.chunk import LEAST_SPAN, legend, title
from piston.report.plots import Frame, Line, plot
from piston.sim.scores import Trace


def executed(contents: Contents) -> Markup | Missing:
    traced = [result for result in contents.evaluations if result.trace is not None]
    if not traced:
        return Missing(f"the policy was not evaluated. {contents.how_to_evaluate}")
    result, trace = traced[0], traced[0].trace
    assert trace is not None
    note = (
        f"Seed {trace.seed} of {result.task}: each of the {len(trace.starts)} chunks as it was "
        f"predicted ({trace.chunks.shape[1]} steps), from the moment it was asked for, and what "
        f"was executed ({result.execute_horizon} steps of each). Where a chunk's end and the next "
        "chunk agree, the policy kept to its plan."
    )
    figures = (_dimension(trace, dim) for dim in range(trace.executed.shape[1]))
    return join(
        [
            tag("p", note, class_="note"),
            legend(("ink", "executed"), ("accent", "predicted")),
            tag("div", *figures, class_="multiples"),
        ]
    )


def _dimension(trace: Trace, dim: int) -> Markup:
    steps = np.arange(trace.chunks.shape[1])
    lines = [
        Line((start + steps) / trace.hz, chunk[:, dim], "accent", opacity=0.6)
        for start, chunk in zip(trace.starts, trace.chunks)
    ]
    done = trace.executed[:, dim]
    lines.append(Line(np.arange(len(done)) / trace.hz, done, "ink"))
    widest = float(np.ptp(trace.executed, axis=0).max())
    frame = Frame(
        *(280, 150, "seconds"), min_span=LEAST_SPAN * widest, num_x_ticks=4, num_y_ticks=3
    )
    return tag("figure", title(trace.names[dim], ""), plot(lines, frame))
