"""What figures need: pictures as data URIs, colours, amounts as text, and the layout of plots.

Plots are SVG (templates/plot.html), coloured by the page's style sheet so that they fit light and
dark.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

# From minus to plus: blue, pale, orange, which people with any colour vision can distinguish.
_COLOURS = np.array(
    [[33, 102, 172], [146, 197, 222], [247, 247, 247], [253, 184, 99], [179, 88, 6]]
)
# Markers that show their values when pointed at; more of them would only be a thick line.
_MAX_MARKERS = 300
_LOG_RATIO = 8.0
# Dimensions that hardly move get an axis of at least this share of the widest one's.
LEAST_SHARE = 0.15
# Effects below this are written as such.
_SMALL_EFFECT = 0.01


def png(pixels: UInt8[np.ndarray, "h w _"], longest: int | None = None) -> str:
    """Return a picture (RGB or RGBA), made smaller if a side is longer than `longest`."""
    picture = Image.fromarray(pixels)
    if longest is not None:
        picture.thumbnail((longest, longest))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return data_uri(buffer.getvalue(), "image/png")


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def heat_map(values: Float[np.ndarray, "r c"], limit: float) -> UInt8[np.ndarray, "r c 3"]:
    """Return one pixel per value: −limit blue, 0 pale, +limit orange."""
    places = np.clip(values / limit, -1, 1)
    channels = [np.interp(places, np.linspace(-1, 1, 5), channel) for channel in _COLOURS.T]
    return np.stack(channels, axis=-1).astype(np.uint8)


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def short(number: float) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def spoken(name: str) -> str:
    return name.replace("_", " ")


def percent(share: float) -> str:
    number = 100 * float(share)
    return f"{number:.0f} %" if number >= 9.5 else f"{number:.2g} %"


def two_digits(value: float) -> str:
    return f"{value:.2g}" if np.isfinite(value) else "–"


def effect(value: float) -> str:
    """Return two digits, of which few are after the point."""
    if 0 < value < _SMALL_EFFECT:
        return f"<{_SMALL_EFFECT:g}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


class Line(NamedTuple):
    """A curve. `look` is a class of the style sheet; a `name` puts it into the legend."""

    x: np.ndarray
    y: np.ndarray
    look: str = "accent"
    name: str = ""
    opacity: float = 1.0
    # The lowest and the highest values around the curve, drawn as an area.
    band: tuple[np.ndarray, np.ndarray] | None = None


class Plot(NamedTuple):
    """Where everything in a plot stands, in the units of its `width` and `height`."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    # Ticks: the place on the axis, and the text.
    columns: list[tuple[float, str]]
    rows: list[tuple[float, str]]
    x_label: str
    y_label: str
    # With their paths, areas and markers (place and text).
    curves: list[tuple[Line, str, str | None, list[tuple[float, float, str]]]]

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The looks and names of curves, if several have one."""
        named = {line.name: line.look for line, *_ in self.curves if line.name}
        return [(look, name) for name, look in named.items()] if len(named) > 1 else []


def lay_out(
    lines: Sequence[Line],
    width: float = 720,
    height: float = 220,
    x_label: str = "",
    y_label: str = "",
    *,
    log: bool = False,
    min_span: float = 0.0,
    from_zero: bool = False,
    markers: bool = False,
    num_ticks: tuple[int, int] = (6, 4),
) -> Plot | None:
    """Return the layout of the curves in one frame, None without any finite number.

    The vertical axis spans at least `min_span`, so that small noise looks small; with `from_zero`
    it begins at 0. With `markers` each point shows its values when pointed at. `num_ticks` is for
    the x and the y axis.
    """

    def scaled(values: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log10(values) if log else values

    xs = np.concatenate([line.x for line in lines])
    ys = scaled(np.concatenate([y for line in lines for y in (line.y, *(line.band or ()))]))
    ys = ys[np.isfinite(ys)]
    if not len(ys):
        return None
    left, right, top = 44.0, width - 8, 22.0 if y_label else 8.0
    bottom = height - (34.0 if x_label else 20.0)
    first, last = _widened(xs.min(), xs.max(), 2.0 if xs.min() == xs.max() else 0.0)
    low, high = ys.min(), ys.max()
    if not log:
        low, high = _widened(0.0 if from_zero else low, high, min_span)
        margin = 0.04 * (high - low)
        # Values that begin at 0, such as counts, stand on the axis.
        low, high = low - margin if low else low, high + margin
    elif high == low:
        low, high = low - math.log10(2), high + math.log10(2)

    def across(values: Any) -> Any:
        return left + (values - first) / (last - first) * (right - left)

    def up(values: Any) -> Any:
        return bottom + (scaled(values) - low) / (high - low) * (top - bottom)

    columns = ticks(first, last, num_ticks[0])
    rows = log_ticks(10**low, 10**high) if log else ticks(low, high, num_ticks[1])
    curves = []
    for line in lines:
        x, y = across(line.x), up(line.y)
        points = zip(line.x, line.y, x, y) if markers and len(y) <= _MAX_MARKERS else ()
        name = line.name or "value"
        marked = [
            (x_place, y_place, f"{name} {value:.4g} at {at:,g}")
            for at, value, x_place, y_place in points
            if math.isfinite(y_place)
        ]
        band = None
        if line.band is not None:
            around = np.concatenate([up(line.band[1]), up(line.band[0])[::-1]])
            band = _path(np.concatenate([x, x[::-1]]), around) + "Z"
        curves.append((line, _path(x, y), band, marked))
    return Plot(
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        columns=list(zip(map(across, columns), _formatted(columns))),
        rows=list(zip(map(up, rows), _formatted(rows))),
        x_label=x_label,
        y_label=y_label,
        curves=curves,
    )


def _path(x_places: np.ndarray, y_places: np.ndarray) -> str:
    """Return the commands of a path that is interrupted where a value is missing."""
    commands, command = [], "M"
    for x, y in zip(x_places.tolist(), y_places.tolist()):
        if not math.isfinite(y):
            command = "M"
            continue
        # A line of no length after each beginning: a point without neighbours is drawn as a dot.
        commands.append(f"{command}{x:.1f} {y:.1f}" + "h0" * (command == "M"))
        command = "L"
    return "".join(commands)


def _widened(low: float, high: float, min_span: float) -> tuple[float, float]:
    missing = max(min_span, 1e-9, 1e-6 * max(abs(low), abs(high))) - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def is_wide(values: np.ndarray) -> bool:
    """Return whether a logarithmic axis shows these values better."""
    finite = values[np.isfinite(values)]
    return bool(len(finite) and finite.min() > 0 and finite.max() / finite.min() > _LOG_RATIO)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers (1, 2 or 5 times a power of ten) from low to high."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((1, 2, 5, 10), key=lambda m: abs(math.log(m * power / rough))) * power
    steps = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [round(step * i, 12) for i in steps]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten; with 2 and 5 times them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5)
    chosen = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in chosen if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def _formatted(values: Sequence[float]) -> list[str]:
    """Format the ticks of one axis, all in the same way."""
    largest = max(map(abs, values), default=0.0)
    if not largest or 1e-2 <= largest < 1e6:
        return [f"{value:,.10g}" for value in values]
    # 1.5e-3 instead of 1.5e-03, 2e7 instead of 2.0e+07.
    parts = (f"{value:.1e}".split("e") for value in values)
    powers = [f"{mantissa.removesuffix('.0')}e{int(power)}" for mantissa, power in parts]
    return ["0" if value == 0 else text for value, text in zip(values, powers)]
