"""The policy's chunk against what was recorded, and how noise became that chunk."""

from __future__ import annotations

import numpy as np

from piston.report import pictures
from piston.report.contents import Contents, Missing
from piston.report.markup import Markup, join, lone_tag, tag
from piston.report.plots import Frame, Line, plot
from piston.report.prediction import Denoising, Prediction
from piston.report.sample import Sample

# Joints that hardly move get a frame of at least this share of the widest one's.
LEAST_SPAN = 0.15
_NUM_JOINTS_DENOISED = 6
_MAX_PICTURES = 11
_NOISE_LIMIT = 2.5  # standard deviations at which colours end


def chunk(contents: Contents) -> Markup | Missing:
    sample, prediction = contents.sample, contents.prediction
    if isinstance(sample, Missing):
        return sample
    if isinstance(prediction, Missing):
        return prediction
    draws = len(prediction.chunks)
    note = (
        f"{_place(sample)}. Lines show {draws} chunk{'s' * (draws > 1)} of {len(sample.recorded)} "
        f"steps ({len(sample.recorded) / sample.fps:.1f} s), from as many draws of noise, in the "
        "robot's own space. The number is the mean distance of the first from what was recorded."
    )
    figures = (_joint(sample, prediction, dim) for dim in range(len(sample.names)))
    return join(
        [
            tag("p", note, class_="note"),
            legend(("ink", "recorded"), ("accent", "policy")),
            tag("div", *figures, class_="multiples"),
        ]
    )


def _place(sample: Sample) -> str:
    known = "held out of training" if sample.held_out else "part of what was trained on"
    return f"Episode {sample.episode}, frame {sample.frame} of {sample.repo_id} ({known})"


def _joint(sample: Sample, prediction: Prediction, dim: int) -> Markup:
    seconds = np.arange(len(sample.recorded)) / sample.fps
    recorded, chunks = sample.recorded[:, dim], prediction.chunks[:, :, dim]
    error = np.abs(chunks[0] - recorded)[sample.is_real].mean()
    # Behind the end of the episode nothing was recorded.
    real = np.where(sample.is_real, recorded, np.nan)
    lines = [Line(seconds, one, "accent", opacity=0.35) for one in chunks[1:]]
    lines += [Line(seconds, chunks[0], "accent"), Line(seconds, real, "ink")]
    spans = np.ptp(sample.recorded[sample.is_real], axis=0)
    frame = Frame(
        *(280, 150, "seconds"),
        min_span=LEAST_SPAN * float(spans.max()),
        num_x_ticks=4,
        num_y_ticks=3,
    )
    return tag("figure", title(sample.names[dim], f"{error:.2g}"), plot(lines, frame))


def denoising(contents: Contents) -> Markup | Missing:
    sample, prediction = contents.sample, contents.prediction
    if isinstance(sample, Missing):
        return sample
    if isinstance(prediction, Missing):
        return prediction
    if prediction.denoising is None:
        return Missing(f"{contents.run.config.model.family} writes tokens and does not denoise.")
    shown = prediction.denoising
    note = (
        "The same frame in the model's space (normalised). Time 1 is noise, time 0 the actions. "
        f"In the pictures a row is a dimension, a column one of {shown.recorded.shape[0]} steps of "
        f"the chunk; blue is −{_NOISE_LIMIT:g}, orange +{_NOISE_LIMIT:g}. Below, the "
        "dimensions that move most."
    )
    return join(
        [
            tag("p", note, class_="note"),
            _strip(shown),
            legend(("ink", "recorded"), ("accent", "actions (time 0)"), ("fade", "on the way")),
            tag("div", *_most_moving(sample, shown), class_="multiples"),
        ]
    )


def _strip(shown: Denoising) -> Markup:
    last = len(shown.passed) - 1
    chosen = np.unique(np.linspace(0, last, min(_MAX_PICTURES, last + 1)).round().astype(int))
    figures = [_heat(shown.passed[step], f"time {1 - step / last:.2g}") for step in chosen]
    return tag("div", *figures, _heat(shown.recorded, "recorded"), class_="strip")


def _heat(values: np.ndarray, text: str) -> Markup:
    source = pictures.png(pictures.heat_map(values.T, _NOISE_LIMIT))
    return tag("figure", lone_tag("img", src=source, alt=text), tag("figcaption", text))


def _most_moving(sample: Sample, shown: Denoising) -> list[Markup]:
    order = np.argsort(-np.ptp(shown.recorded, axis=0), kind="stable")
    figures = []
    for dim in sorted(order[:_NUM_JOINTS_DENOISED].tolist()):
        steps, last = np.arange(len(shown.recorded)), len(shown.passed) - 1
        lines = [
            Line(steps, shown.passed[step, :, dim], "fade", opacity=0.25 + 0.6 * step / last)
            for step in range(last)
        ]
        lines.append(Line(steps, shown.recorded[:, dim], "ink"))
        lines.append(Line(steps, shown.passed[-1, :, dim], "accent"))
        frame = Frame(280, 150, "step of the chunk", num_x_ticks=4, num_y_ticks=3)
        figures.append(tag("figure", title(sample.names[dim], ""), plot(lines, frame)))
    return figures


def title(name: str, number: str) -> Markup:
    return tag("figcaption", tag("span", name.replace("_", " ")), tag("span", number))


def legend(*entries: tuple[str, str]) -> Markup:
    spans = (tag("span", tag("i", class_=look), text) for look, text in entries)
    return tag("div", *spans, class_="legend")
