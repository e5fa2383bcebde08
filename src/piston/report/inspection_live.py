"""The section on training against live: pictures of both, and histograms of the states."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from piston.inspection.live import Comparison
from piston.inspection.live_numbers import Dimension
from piston.inspection.live_pictures import AS_IT_IS, Camera
from piston.report.document import render, small_plot
from piston.report.figures import Line

_NUM_CAUSES = 3


def live_section(found: Comparison) -> Markup:
    """Return cameras, states, rates and sentences of the live set beside those of training."""
    timing = found.timing
    rates = {
        "control steps per second": (timing.training_rate, timing.live_rate),
        "seconds between requests (median)": (None, timing.request_interval),
        "share of requests after the end of the chunk before": (None, timing.late_requests),
    }
    return render(
        "live.html",
        found=found,
        cameras=[(camera, _distances(camera)) for camera in found.cameras],
        states=[_histogram(one) for one in found.dimensions],
        rates=[
            (name, *("–" if value is None else f"{value:.3g}" for value in values))
            for name, values in rates.items()
            if values[1] is not None
        ],
        new_prompts=[(prompt, f"{share:.0%}") for prompt, share in found.new_prompts.items()],
    )


def _distances(camera: Camera) -> dict[str, str]:
    """Return how far live pictures are from training, with the causes that explain it best."""
    distances: dict[str, float] = {}
    if camera.distances:
        nearest = sorted(camera.distances.items(), key=lambda pair: pair[1])[:_NUM_CAUSES]
        distances = {AS_IT_IS: camera.distances[AS_IT_IS], **dict(nearest)}
    if camera.own_distance is not None:
        distances["training pictures among themselves"] = camera.own_distance
    return {name: f"{distance:.1f}" for name, distance in distances.items()}


def _histogram(dimension: Dimension) -> Markup:
    """Return how often a state has each value, as curves with steps."""
    edges = np.repeat(dimension.edges, 2)[1:-1]
    lines = [
        Line(edges, np.repeat(dimension.training_histogram, 2), "ink"),
        Line(edges, np.repeat(dimension.live_histogram, 2), "accent"),
    ]
    value = f"{dimension.outside:.0%} outside"
    return small_plot(dimension.name, lines, "value", value=value, from_zero=True)
