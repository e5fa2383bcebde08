"""The section on open loop: chunks along episodes, errors per dimension, the worst moments.

Dims: h steps of a chunk, a action dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup

from piston.inspection.open_loop import OpenLoop, Together, WorstMoment
from piston.inspection.results import evenly, known_mean
from piston.report.document import render, small_plot
from piston.report.figures import Line

# Seeds that are drawn, and points of a curve along an episode.
_MAX_SEEDS, _MAX_POINTS = 4, 160
_NUM_WORST = 6
# Standard deviations at which the colour of an error ends.
_FULL_COLOUR = 0.5
_ORANGE = (230, 110, 20)


def open_loop_section(results: Sequence[OpenLoop], cameras: Mapping[str, str]) -> Markup:
    """Return the section; `cameras` are the robot's names by slot."""
    errors, seconds = _errors(results)
    return render(
        "open_loop.html",
        episodes=[(one, _along_episode(one)) for one in results],
        errors=errors,
        seconds=seconds,
        full_colour=_FULL_COLOUR,
        worst=_worst_moments(results, cameras),
    )


def _along_episode(result: OpenLoop) -> list[Markup]:
    """Return plots of the chunks that would be executed, one after the other."""
    drawn = _one_after_the_other(result)
    seconds = np.arange(len(result.recorded)) / result.fps
    widest = float(np.ptp(result.recorded, axis=0).max())
    error = known_mean(result.error_std, 0)
    figures = []
    for dim, name in enumerate(result.names):
        lines = []
        for place, end in drawn:
            begin = result.asked[place]
            x, chunk = seconds[begin:end], result.chunks[place, :, : end - begin, dim]
            pale = [_line(x, one, 0.3) for one in chunk[1:_MAX_SEEDS]]
            lines += [*pale, _line(x, chunk[0])]
        lines.append(Line(seconds, result.recorded[:, dim], "ink"))
        value = f"{error[dim]:.2g}" if np.isfinite(error[dim]) else "never moves"
        figures.append(small_plot(name, lines, value=value, widest=widest))
    return figures


def _one_after_the_other(result: OpenLoop) -> list[tuple[int, int]]:
    """Return the asked frames, by place, that follow each other, and the frame where each ends."""
    found, free = [], 0
    for place, at in enumerate(result.asked):
        if at >= free:
            free = min(at + result.execute_horizon, len(result.recorded))
            found.append((place, free))
    return found


def _line(x: np.ndarray, y: np.ndarray, opacity: float = 1.0) -> Line:
    """Return a curve with few points, which has the first and the last."""
    chosen = evenly(len(x), _MAX_POINTS // 4)
    return Line(x[chosen], y[chosen], "accent", opacity=opacity)


def _errors(
    results: Sequence[OpenLoop],
) -> tuple[list[tuple[str, list[float], np.ndarray]], float]:
    """Return a row for each dimension (name, averages, band of colours), and a chunk's seconds."""
    found = Together(results)
    along = known_mean(found.errors, 0)
    averages = [
        found.mean_of(np.stack([one.error for one in results])),
        found.mean_of(found.errors),
        found.mean_of(np.stack([one.seed_spread / one.std for one in results])),
        found.mean_of(found.standing_errors),
        found.jumps,
    ]
    rows = [
        (name, [float(one[dim]) for one in averages], _band(along[:, dim]))
        for dim, name in enumerate(found.names)
    ]
    return rows, len(along) / results[0].fps


def _band(values: Float[np.ndarray, " h"]) -> UInt8[np.ndarray, "1 h 4"]:
    """Return one pixel per step, the more opaque the larger the error."""
    opacity = 255 * np.clip(np.nan_to_num(values) / _FULL_COLOUR, 0, 1)
    colours = np.tile(np.array(_ORANGE, np.uint8), (1, len(values), 1))
    return np.concatenate((colours, opacity.astype(np.uint8)[None, :, None]), axis=-1)


def _worst_moments(
    results: Sequence[OpenLoop], cameras: Mapping[str, str]
) -> list[tuple[WorstMoment, list[tuple[str, UInt8[np.ndarray, "_ _ 3"]]], Markup]]:
    """Return the frames with the largest errors: pictures, and the dimension that is most wrong."""
    moments = [(one, result) for result in results for one in result.worst]
    moments.sort(key=lambda pair: -pair[0].error_std)
    return [
        (
            moment,
            [(cameras.get(slot, slot), pixels) for slot, pixels in moment.pictures.items()],
            _around(moment, result),
        )
        for moment, result in moments[:_NUM_WORST]
    ]


def _around(moment: WorstMoment, result: OpenLoop) -> Markup:
    """Return a plot of the dimension that is most wrong."""
    place, dim = result.asked.index(moment.frame), result.names.index(moment.dimension)
    chunks = result.chunks[place, :, :, dim]
    seconds = (moment.frame + np.arange(chunks.shape[1])) / result.fps
    recorded = result.recorded[moment.frame :, dim][: chunks.shape[1]]
    lines = [_line(seconds, one, 0.3) for one in chunks[1:_MAX_SEEDS]]
    lines += [_line(seconds, chunks[0]), Line(seconds[: len(recorded)], recorded, "ink")]
    return small_plot(moment.dimension, lines, value=f"{moment.error_std:.2g}")
