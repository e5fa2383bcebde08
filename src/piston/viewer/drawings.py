"""What the inspector's page draws, as HTML: the chunk, the effect of a change, and maps.

Arguments are what the page of `piston inspect` receives as JSON.

Dims: h steps of a chunk, a action dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from piston.report.document import render, small_plot
from piston.report.figures import Line

# Actions that hardly move get an axis of at least this many of their standard deviations.
_LEAST_SPAN = 0.5
_MAP_OPACITY = 0.75
_LOOKS = {"base": "second", "changed": "accent"}


def draw_moment(about: dict[str, Any], moment: dict[str, Any]) -> list[Markup]:
    """Return a plot of each action as it was recorded, until the policy has answered."""
    return draw_answer(about, moment, {"base": None, "changed": None, "effect": None})["plots"]


def draw_answer(
    about: dict[str, Any], moment: dict[str, Any], answer: dict[str, Any]
) -> dict[str, Any]:
    """Return a sentence on the effect, and a bar and a plot for each action."""
    effect = answer["effect"]
    changes = effect and effect["per_action"]
    recorded = np.array(moment["recorded"])
    chunks = {
        look: {key: np.array(values) for key, values in answer[name].items()}
        for name, look in _LOOKS.items()
        if answer[name] is not None
    }
    plots, bars = [], []
    for dim, action in enumerate(about["actions"]):
        lines = [Line(np.arange(len(recorded)) / about["fps"], recorded[:, dim], "ink")]
        for look, chunk in chunks.items():
            seconds = np.arange(len(chunk["mean"])) / about["fps"]
            band = (chunk["low"][:, dim], chunk["high"][:, dim])
            lines.append(Line(seconds, chunk["mean"][:, dim], look, band=band))
        value, std = "", action["std"]
        if effect:
            change, spread = changes[dim], effect["spread"] and effect["spread"][dim]
            value = f"±{change:.3g}"
            in_spreads = f" ({change / spread:.3g}×)" if spread else ""
            # A bar of full length is one standard deviation or more.
            share = min(change / std, 1.0) if std else 0.0
            bars.append({"width": f"{100 * share:.1f}%", "text": f"{change:.3g}{in_spreads}"})
        else:
            bars.append({"width": "0%", "text": ""})
        plots.append(small_plot(action["name"], lines, value=value, min_span=_LEAST_SPAN * std))
    return {"effect": _sentence(effect, about["seeds"]), "bars": bars, "plots": plots}


def _sentence(effect: dict[str, Any] | None, num_seeds: int) -> str:
    if effect is None:
        return "Nothing is changed. Cover a region, switch a camera off, edit the sentence …"
    size = effect["strength"] or 0.0
    text = f"The change moves the actions by {size:.3g} of their standard deviation"
    if effect["in_spreads"] is None:
        return f"{text}."
    return f"{text}, {effect['in_spreads']:.3g} times the spread over {num_seeds} noise seeds."


def draw_map(cells: Sequence[Sequence[float]], values: Sequence[float]) -> Markup:
    """Return the cells in SVG, as opaque as in the maps of the overview."""
    largest = max(values) or 1.0
    opacities = [_MAP_OPACITY * math.sqrt(max(value, 0.0) / largest) for value in values]
    return render("map.html", cells=zip(cells, opacities))
