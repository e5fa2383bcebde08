"""Parts of an HTML page as text: escaped tags, tables, pictures as data URIs, amounts, line plots.

Plots are SVG, coloured by the page's style sheet so that they fit light and dark.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
_LEAST_SHARE = 0.15


@dataclasses.dataclass(frozen=True)
class Missing:
    """Why a section is not shown, and how to get it."""

    why: str


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """`tag("td", "a < b", class_="wide")`. A None attribute is left out, True stands alone."""
    given = "".join(_attribute(key, value) for key, value in attributes.items())
    inside = join(children)
    return Markup(f"<{name}{given}>{inside}</{name}>")


def lone_tag(name: str, /, **attributes: Any) -> Markup:
    """Return a tag without an end, such as `img`; in SVG such a tag closes itself."""
    return Markup(f"<{name}{''.join(_attribute(k, v) for k, v in attributes.items())}/>")


def join(children: Iterable[Any]) -> Markup:
    return Markup("".join(escape(child) for child in children if child is not None))


def table(header: Iterable[Any], rows: Iterable[Iterable[Any]], **attributes: Any) -> Markup:
    head = tag("tr", *(tag("th", cell) for cell in header))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("table", tag("thead", head), tag("tbody", *body), **attributes)


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    # `class` and `for` are words of Python: a trailing underscore goes.
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def note(text: str) -> Markup:
    return tag("p", text, class_="note")


def scrolling(*children: Any, class_: str = "scrolls") -> Markup:
    """Wrap what may be wider than a narrow screen."""
    return tag("div", *children, class_=class_)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """`entries` are classes of the style sheet and what they stand for."""
    spans = (tag("span", tag("i", class_=look), text) for look, text in entries)
    return tag("div", *spans, class_="legend")


def image(source: str, text: str, **attributes: Any) -> Markup:
    return lone_tag("img", src=source, alt=text, **attributes)


def png(image: UInt8[np.ndarray, "h w 3"], longest: int | None = None) -> str:
    """Return a picture as a data URI, made smaller if a side is longer than `longest`."""
    picture = Image.fromarray(image)
    if longest is not None:
        picture.thumbnail((longest, longest))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return _data_uri("image/png", buffer.getvalue())


def heat_map(values: Float[np.ndarray, "r c"], limit: float) -> UInt8[np.ndarray, "r c 3"]:
    """Return one pixel per value: −limit blue, 0 pale, +limit orange."""
    places = np.clip(values / limit, -1, 1)
    channels = [np.interp(places, np.linspace(-1, 1, 5), channel) for channel in _COLOURS.T]
    return np.stack(channels, axis=-1).astype(np.uint8)


def mp4(path: Path) -> str:
    return _data_uri("video/mp4", path.read_bytes())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def short(number: float) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve. `look` is a class of the style sheet; a `name` puts it into the legend."""

    x: np.ndarray
    y: np.ndarray
    look: str = "accent"
    name: str = ""
    opacity: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frame:
    """The size of a plot and its axes."""

    width: float = 720
    height: float = 220
    x_label: str = ""
    y_label: str = ""
    log: bool = False
    # The vertical axis spans at least this, so that small noise looks small.
    min_span: float = 0.0
    # Each point shows its values when pointed at.
    markers: bool = False
    num_x_ticks: int = 6
    num_y_ticks: int = 4


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Maps values to coordinates: `low` to `start`, `high` to `stop`, linear or logarithmic."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, values: np.ndarray | float) -> np.ndarray:
        low, high, at = (np.log10(v) if self.log else v for v in (self.low, self.high, values))
        return self.start + (np.asarray(at) - low) / (high - low) * (self.stop - self.start)


def plot(lines: Sequence[Line], frame: Frame) -> Markup:
    """Return the curves in one frame, with a legend if several have names."""
    lines = [_drawable(line, frame.log) for line in lines]
    xs, ys = (np.concatenate([getattr(line, axis) for line in lines]) for axis in "xy")
    if not np.isfinite(ys).any():
        return tag("p", "No finite number to plot.", class_="missing")
    left, bottom = 44.0, 34.0 if frame.x_label else 20.0
    top = 22.0 if frame.y_label else 8.0
    across = _Axis(*_widened(np.nanmin(xs), np.nanmax(xs), 0.0), left, frame.width - 8)
    low, high = np.nanmin(ys), np.nanmax(ys)
    if not frame.log:
        low, high = _widened(low, high, frame.min_span)
        margin = 0.04 * (high - low)
        low, high = low - margin, high + margin
    elif high <= low:
        low, high = low / 2, high * 2
    up = _Axis(low, high, frame.height - bottom, top, frame.log)
    drawing = tag(
        "svg",
        _grid(across, up, frame),
        *(_curve(line, across, up) for line in lines),
        *(_markers(line, across, up) for line in lines if frame.markers),
        viewBox=f"0 0 {frame.width:g} {frame.height:g}",
        role="img",
    )
    named = {line.name: line.look for line in lines if line.name}
    entries = [(look, name) for name, look in named.items()]
    return join([legend(entries) if len(named) > 1 else None, drawing])


def is_wide(values: np.ndarray) -> bool:
    """Return whether a logarithmic axis shows these values better."""
    finite = values[np.isfinite(values)]
    return bool(len(finite) and finite.min() > 0 and finite.max() / finite.min() > _LOG_RATIO)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers (1, 2 or 5 times a power of ten) from low to high."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((1, 2, 5, 10), key=lambda m: abs(math.log(m * power / rough))) * power
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten; with 2 and 5 times them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5)
    chosen = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in chosen if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def _drawable(line: Line, log: bool) -> Line:
    x, y = np.asarray(line.x, float), np.asarray(line.y, float)
    hidden = ~np.isfinite(y) | (log & (y <= 0))
    return dataclasses.replace(line, x=x, y=np.where(hidden, np.nan, y))


def _widened(low: float, high: float, min_span: float) -> tuple[float, float]:
    missing = max(min_span, 1e-9, 1e-6 * max(abs(low), abs(high))) - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def _grid(across: _Axis, up: _Axis, frame: Frame) -> Markup:
    parts = []
    columns = ticks(across.low, across.high, frame.num_x_ticks)
    for tick, text in zip(columns, _formatted(columns)):
        parts.append(_text(float(across(tick)), up.start + 14, text))
    rows = log_ticks(up.low, up.high) if frame.log else ticks(up.low, up.high, frame.num_y_ticks)
    for tick, text in zip(rows, _formatted(rows)):
        y = float(up(tick))
        parts.append(_segment(across.start, y, across.stop, y, "grid"))
        parts.append(_text(across.start - 6, y + 3.5, text, "end"))
    parts.append(_segment(across.start, up.start, across.stop, up.start, "axis"))
    if frame.x_label:
        parts.append(_text((across.start + across.stop) / 2, frame.height - 4, frame.x_label))
    if frame.y_label:
        parts.append(_text(across.start, up.stop - 9, frame.y_label, "start"))
    return join(parts)


def _curve(line: Line, across: _Axis, up: _Axis) -> Markup:
    """Return one path, interrupted where a value is missing."""
    places = zip(across(line.x), up(line.y))
    commands, down = [], False
    for x, y in places:
        if math.isfinite(y):
            commands.append(f"{'L' if down else 'M'}{x:.1f} {y:.1f}")
        down = math.isfinite(y)
    opacity = None if line.opacity == 1 else f"{line.opacity:.2f}"
    return lone_tag("path", d="".join(commands), class_=f"line {line.look}", opacity=opacity)


def _markers(line: Line, across: _Axis, up: _Axis) -> Markup:
    if len(line.x) > _MAX_MARKERS:
        return Markup()
    dots = []
    for x, y in zip(line.x, line.y):
        if math.isfinite(y):
            text = tag("title", f"{line.name or 'value'} {y:.4g} at {x:,g}")
            place = {"cx": f"{across(x):.1f}", "cy": f"{up(y):.1f}"}
            dots.append(tag("circle", text, **place, r=5, class_=f"marker {line.look}"))
    return join(dots)


def _segment(x1: float, y1: float, x2: float, y2: float, look: str) -> Markup:
    return lone_tag("path", d=f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", class_=look)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def _formatted(values: Sequence[float]) -> list[str]:
    """Format the ticks of one axis, all in the same way."""
    largest = max(map(abs, values), default=0.0)
    if largest and not 1e-2 <= largest < 1e6:
        # 1.5e-3 instead of 1.5e-03, 2e7 instead of 2.0e+07.
        parts = (f"{value:.1e}".split("e") for value in values)
        powers = [f"{mantissa.removesuffix('.0')}e{int(power)}" for mantissa, power in parts]
        return ["0" if value == 0 else text for value, text in zip(values, powers)]
    return [f"{value:,.10g}" for value in values]


def small_plot(
    name: str,
    lines: Sequence[Line],
    x_label: str = "seconds",
    *,
    value: str = "",
    widest: float = 0.0,
) -> Markup:
    """Return the figure of one action dimension; `widest` is the largest range of all of them."""
    title = tag("figcaption", tag("span", name.replace("_", " ")), tag("span", value))
    frame = Frame(
        *(280, 150, x_label), min_span=_LEAST_SHARE * widest, num_x_ticks=4, num_y_ticks=3
    )
    return tag("figure", title, plot(lines, frame))


def multiples(
    text: str, looks: Iterable[tuple[str, str]], figures: Iterable[Markup], *above: Markup
) -> Markup:
    """Return a section of small plots with one legend; `above` stands between note and legend."""
    return join([note(text), *above, legend(looks), tag("div", *figures, class_="multiples")])
