"""Parts of an HTML page as text: escaped tags, tables, pictures as data URIs, amounts, line plots.

Plots are SVG, coloured by the page's style sheet so that they fit light and dark.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
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
_LEAST_SHARE = 0.15


class Missing(Exception):
    """Why a section is not shown, and how to get it."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """`tag("td", "a < b", class_="wide")`. A None attribute is left out, True stands alone."""
    return Markup(f"<{name}{_attributes(attributes)}>{join(children)}</{name}>")


def lone_tag(name: str, /, **attributes: Any) -> Markup:
    """Return a tag without an end, such as `img`; in SVG such a tag closes itself."""
    return Markup(f"<{name}{_attributes(attributes)}/>")


def _attributes(attributes: dict[str, Any]) -> str:
    given = []
    for key, value in attributes.items():
        # `class` and `for` are words of Python: a trailing underscore goes.
        name = key.rstrip("_").replace("_", "-")
        if value is True:
            given.append(f" {name}")
        elif value is not None:
            given.append(f' {name}="{html.escape(str(value))}"')
    return "".join(given)


def join(children: Iterable[Any]) -> Markup:
    return Markup("".join(escape(child) for child in children if child is not None))


def table(header: Iterable[Any], rows: Iterable[Iterable[Any]], **attributes: Any) -> Markup:
    """Return a table that scrolls where it is wider than the screen."""
    head = tag("tr", *(tag("th", cell) for cell in header))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    inner = tag("table", tag("thead", head), tag("tbody", *body), **attributes)
    return tag("div", inner, class_="scrolls")


def card(what: str, number: str, remark: str) -> Markup:
    """Return one of the headline numbers of a page."""
    return tag("div", tag("h3", what), tag("b", number), tag("p", remark), class_="card")


def note(text: str) -> Markup:
    return tag("p", text, class_="note")


def figure(caption: str, *parts: Markup | None) -> Markup:
    """Return drawings below a caption that says what they show and how to read it."""
    return tag("figure", tag("figcaption", caption), *parts, class_="captioned")


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """`entries` are classes of the style sheet and what they stand for."""
    spans = (tag("span", tag("i", class_=look), text) for look, text in entries)
    return tag("div", *spans, class_="legend")


def image(
    pixels: UInt8[np.ndarray, "h w _"], text: str, longest: int | None = None, **attributes: Any
) -> Markup:
    """Return a picture (RGB or RGBA), made smaller if a side is longer than `longest`."""
    picture = Image.fromarray(pixels)
    if longest is not None:
        picture.thumbnail((longest, longest))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return lone_tag("img", src=_data_uri("image/png", buffer.getvalue()), alt=text, **attributes)


def picture(pixels: UInt8[np.ndarray, "h w 3"], text: str, longest: int | None = None) -> Markup:
    """Return an image with its text below it."""
    return tag("figure", image(pixels, text, longest), tag("figcaption", text))


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
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def short(number: float) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


class Line(NamedTuple):
    """A curve. `look` is a class of the style sheet; a `name` puts it into the legend."""

    x: np.ndarray
    y: np.ndarray
    look: str = "accent"
    name: str = ""
    opacity: float = 1.0


def plot(
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
) -> Markup:
    """Return the curves in one frame, with a legend if several have names.

    The vertical axis spans at least `min_span`, so that small noise looks small; with `from_zero`
    it begins at 0. With `markers` each point shows its values when pointed at. `num_ticks` is for
    the x and the y axis.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = [np.log10(line.y) if log else line.y for line in lines]
    xs, ys = np.concatenate([line.x for line in lines]), np.concatenate(scaled)
    ys = ys[np.isfinite(ys)]
    if not len(ys):
        return tag("p", "No finite number to plot.", class_="missing")
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
        return bottom + (values - low) / (high - low) * (top - bottom)

    columns = ticks(first, last, num_ticks[0])
    rows = log_ticks(10**low, 10**high) if log else ticks(low, high, num_ticks[1])
    rule = f'<path d="M{left:.1f} {{0:.1f}}L{right:.1f} {{0:.1f}}" class="{{1}}"/>'
    parts = [_text(across(x), bottom + 14, text) for x, text in zip(columns, _formatted(columns))]
    for tick, text in zip(rows, _formatted(rows)):
        y = up(math.log10(tick) if log else tick)
        parts += [Markup(rule.format(y, "grid")), _text(left - 6, y + 3.5, text, "end")]
    parts.append(Markup(rule.format(bottom, "axis")))
    if x_label:
        parts.append(_text((left + right) / 2, height - 4, x_label))
    if y_label:
        parts.append(_text(left, top - 9, y_label, "start"))
    for line, y in zip(lines, scaled):
        marked = markers and len(y) <= _MAX_MARKERS
        parts.append(_curve(line, across(line.x), up(y), markers=marked))
    drawing = tag("svg", *parts, viewBox=f"0 0 {width:g} {height:g}", role="img")
    named = {line.name: line.look for line in lines if line.name}
    entries = [(look, name) for name, look in named.items()]
    return join([legend(entries) if len(named) > 1 else None, drawing])


def _curve(line: Line, x_places: np.ndarray, y_places: np.ndarray, *, markers: bool) -> Markup:
    """Return one path, interrupted where a value is missing, and its markers."""
    commands, dots, command = [], [], "M"
    for x, y, x_place, y_place in zip(line.x, line.y, x_places, y_places):
        if not math.isfinite(y_place):
            command = "M"
            continue
        # A line of no length after each beginning: a point without neighbours is drawn as a dot.
        commands.append(f"{command}{x_place:.1f} {y_place:.1f}" + "h0" * (command == "M"))
        command = "L"
        if markers:
            text = tag("title", f"{line.name or 'value'} {y:.4g} at {x:,g}")
            place = {"cx": f"{x_place:.1f}", "cy": f"{y_place:.1f}"}
            dots.append(tag("circle", text, **place, r=5, class_=f"marker {line.look}"))
    opacity = None if line.opacity == 1 else f"{line.opacity:.2f}"
    path = lone_tag("path", d="".join(commands), class_=f"line {line.look}", opacity=opacity)
    return join([path, *dots])


def _text(x: float, y: float, text: str, anchor: str = "middle") -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


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


def small_plot(
    name: str,
    lines: Sequence[Line],
    x_label: str = "seconds",
    *,
    value: str = "",
    widest: float = 0.0,
    from_zero: bool = False,
) -> Markup:
    """Return the figure of one action dimension; `widest` is the largest range of all of them."""
    title = tag("figcaption", tag("span", name.replace("_", " ")), tag("span", value))
    # Curves that have names are in the legend of all plots.
    lines = [line._replace(name="") for line in lines]
    least, ticks = _LEAST_SHARE * widest, (4, 3)
    drawn = plot(lines, 280, 150, x_label, min_span=least, from_zero=from_zero, num_ticks=ticks)
    return tag("figure", title, drawn)


def multiples(
    caption: str, looks: Iterable[tuple[str, str]], figures: Iterable[Markup], *above: Markup
) -> Markup:
    """Return small plots with one caption and legend; `above` stands between the two."""
    return figure(caption, *above, legend(looks), tag("div", *figures, class_="multiples"))
