"""The section on open loop: chunks along episodes, errors per dimension, the worst moments.

Dims: h steps of a chunk, a action dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from piston.inspection.open_loop import OpenLoop, WorstMoment
from piston.inspection.results import known_mean
from piston.report.markup import (
    Line,
    Markup,
    figure,
    image,
    join,
    multiples,
    picture,
    small_plot,
    table,
    tag,
)

# Seeds that are drawn, and points of a curve along an episode.
_MAX_SEEDS, _MAX_POINTS = 4, 160
_NUM_WORST = 6
_PICTURE = 120
# Standard deviations at which the colour of an error ends.
_FULL_COLOUR = 0.5
_ORANGE = (230, 110, 20)


def open_loop_section(results: Sequence[OpenLoop], cameras: Mapping[str, str]) -> Markup:
    """Return the section; `cameras` are the robot's names by slot."""
    first, *others = results
    folded = [
        tag("details", tag("summary", f"Episode {one.episode}"), along_episode(one))
        for one in others
    ]
    return join([along_episode(first), *folded, errors(results), worst_moments(results, cameras)])


def along_episode(result: OpenLoop) -> Markup:
    """Return the chunks that would be executed, one after the other, against the recording."""
    text = (
        f"Episode {result.episode}: what was recorded, and what the policy predicts when it is "
        f"asked every {result.execute_horizon} steps at what was recorded there. Pale: other noise "
        "seeds. Where one curve ends and the next begins, a new chunk takes over: a step there is "
        "a jump of the robot. The number is the mean error in standard deviations."
    )
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
    return multiples(text, [("ink", "recorded"), ("accent", "policy")], figures)


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
    chosen = np.unique(np.linspace(0, len(x) - 1, _MAX_POINTS // 4).round().astype(int))
    return Line(x[chosen], y[chosen], "accent", opacity=opacity)


def errors(results: Sequence[OpenLoop]) -> Markup:
    """Return a table of the dimensions with the error along the chunk as a band of colours."""
    first = results[0]
    along = known_mean(np.stack([one.error_std for one in results]), 0)
    averages = [
        known_mean(np.concatenate(parts), 0)
        for parts in (
            [one.error for one in results],
            [one.error_std for one in results],
            [one.seed_spread / one.std for one in results],
            [one.error_of_standing / one.std for one in results],
        )
    ]
    ratios = np.concatenate([one.jump_ratios.reshape(-1, len(first.names)) for one in results])
    averages.append(np.median(ratios, axis=0) if len(ratios) else 0 * first.std + np.nan)
    rows = [
        (name.replace("_", " "), *(_number(one[dim]) for one in averages), _band(along[:, dim]))
        for dim, name in enumerate(first.names)
    ]
    seconds = len(along) / first.fps
    header = (
        *("action", "error", "error / std", "seeds / std", "standing / std", "jump / step"),
        f"error along the chunk, {seconds:.1f} s",
    )
    text = (
        f"Mean distance from the recording over {len(results)} episode"
        f"{'s' * (len(results) > 1)} and all steps of the chunk: in the robot's units, in standard "
        "deviations (std) of the recorded action; next to it how much noise seeds differ, and the "
        "error of a robot that stays where it is. A jump is the change where a new chunk takes "
        "over, typically, as a multiple of the largest step that was recorded. In the band each "
        f"column is a step of the chunk; orange is {_FULL_COLOUR:g} standard deviations or more."
    )
    return figure(text, table(header, rows, class_="numbers names"))


def _band(values: Float[np.ndarray, " h"]) -> Markup:
    """Return one pixel per step, transparent without an error."""
    opacity = 255 * np.clip(np.nan_to_num(values) / _FULL_COLOUR, 0, 1)
    colours = np.tile(np.array(_ORANGE, np.uint8), (1, len(values), 1))
    pixels = np.concatenate((colours, opacity.astype(np.uint8)[None, :, None]), axis=-1)
    return image(pixels, "error along the chunk", class_="band")


def worst_moments(results: Sequence[OpenLoop], cameras: Mapping[str, str]) -> Markup | None:
    """Return the frames with the largest errors: pictures and the dimension that is most wrong."""
    moments = [(one, result) for result in results for one in result.worst]
    if not moments:
        return None
    moments.sort(key=lambda pair: -pair[0].error_std)
    text = (
        "The worst moments, and the action that is most wrong in each: its mean error in standard "
        "deviations over the steps that would be executed. Where the curves agree with each other "
        "and not with the recording, the policy has learned another motion or does not see what "
        "matters; where they differ, it is not sure."
    )
    figures = [_moment(*pair, cameras) for pair in moments[:_NUM_WORST]]
    return multiples(text, [("ink", "recorded"), ("accent", "policy")], figures)


def _moment(moment: WorstMoment, result: OpenLoop, cameras: Mapping[str, str]) -> Markup:
    place, dim = result.asked.index(moment.frame), result.names.index(moment.dimension)
    chunks = result.chunks[place, :, :, dim]
    seconds = (moment.frame + np.arange(chunks.shape[1])) / result.fps
    recorded = result.recorded[moment.frame :, dim][: chunks.shape[1]]
    lines = [_line(seconds, one, 0.3) for one in chunks[1:_MAX_SEEDS]]
    lines += [_line(seconds, chunks[0]), Line(seconds[: len(recorded)], recorded, "ink")]
    pictures = [
        picture(pixels, cameras.get(slot, slot).replace("_", " "), _PICTURE)
        for slot, pixels in moment.pictures.items()
    ]
    title = f"Episode {moment.episode}, frame {moment.frame}"
    name = moment.dimension.replace("_", " ")
    said = (
        f"Error {moment.error:.2g}, which is {moment.error_std:.2g} std; seeds differ by "
        f"{moment.seed_spread_std:.2g} std."
    )
    return tag(
        "div",
        tag("b", title),
        tag("div", *pictures, class_="thumbnails"),
        small_plot(name, lines, value=f"{moment.error_std:.2g}"),
        tag("p", said, class_="note"),
    )


def _number(value: float) -> str:
    return f"{value:.2g}" if np.isfinite(value) else "–"
