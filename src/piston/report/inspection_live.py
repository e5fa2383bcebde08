"""The section on training against live: pictures of both, and histograms of the states."""

from __future__ import annotations

import numpy as np

from piston.inspection.live import Comparison
from piston.inspection.live_numbers import Dimension
from piston.inspection.live_pictures import AS_IT_IS, Camera
from piston.report.markup import (
    Line,
    Markup,
    figure,
    join,
    multiples,
    note,
    picture,
    small_plot,
    table,
    tag,
)

_PICTURE = 160
_NUM_CAUSES = 3


def live_section(found: Comparison) -> Markup:
    """Return cameras, states, rates and sentences of the live set beside those of training."""
    text = (
        f"{found.num_live_frames:,} live frames against {found.num_training_frames:,} of training."
    )
    parts = [note(text), *(_camera(one) for one in found.cameras), _states(found.dimensions)]
    timing = found.timing
    facts = {
        "control steps per second": (timing.training_rate, timing.live_rate),
        "seconds between requests (median)": (None, timing.request_interval),
        "share of requests after the end of the chunk before": (None, timing.late_requests),
    }
    rows = [
        [name, *("–" if one is None else f"{one:.3g}" for one in values)]
        for name, values in facts.items()
        if values[1] is not None
    ]
    if rows:
        parts.append(table(("rate", "training", "live"), rows, class_="numbers"))
    if found.new_prompts:
        prompts = [(text, f"{share:.0%}") for text, share in found.new_prompts.items()]
        parts.append(table(("sentence that training never had", "of the frames"), prompts))
    parts += [note(sentence) for sentence in found.undecided]
    return join(parts)


def _camera(one: Camera) -> Markup:
    shown = [picture(one.training_picture, "training, the nearest", _PICTURE)]
    if one.live_picture is None:
        shown.append(note("The live set does not have this camera."))
    else:
        shown.append(picture(one.live_picture, "live", _PICTURE))
    nearest = sorted(one.distances.items(), key=lambda pair: pair[1])[:_NUM_CAUSES]
    distances = {AS_IT_IS: one.distances[AS_IT_IS], **dict(nearest)} if nearest else {}
    rows = [(name, f"{distance:.1f}") for name, distance in distances.items()]
    if one.own_distance is not None:
        rows.append(("training pictures among themselves", f"{one.own_distance:.1f}"))
    text = (
        f"{one.name}: a live picture as the model sees it, and the picture of training that is "
        "most like it. Below: the distance of live pictures to the nearest of training, in levels "
        "of 256, as they are and with the causes undone that make it smallest. A cause that makes "
        "it much smaller is the likely one."
    )
    compared = table(("live pictures", "distance"), rows, class_="numbers")
    return figure(text, tag("div", *shown, class_="thumbnails"), compared)


def _states(dimensions: list[Dimension]) -> Markup:
    text = (
        "How often each state has a value, in training and live. The number is the share of live "
        "frames beyond the range of training."
    )
    figures = []
    for one in dimensions:
        # A histogram as a curve with steps.
        edges = np.repeat(one.edges, 2)[1:-1]
        lines = [
            Line(edges, np.repeat(one.training_histogram, 2), "ink"),
            Line(edges, np.repeat(one.live_histogram, 2), "accent"),
        ]
        value = f"{one.outside:.0%} outside"
        figures.append(small_plot(one.name, lines, "value", value=value, from_zero=True))
    return multiples(text, [("ink", "training"), ("accent", "live")], figures)
