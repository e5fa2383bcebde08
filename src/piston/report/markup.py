"""Parts of an HTML page as text: escaped tags, tables, legends, pictures as data URIs, amounts."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

# From minus to plus: blue, pale, orange, which people with any colour vision can distinguish.
_COLOURS = np.array(
    [[33, 102, 172], [146, 197, 222], [247, 247, 247], [253, 184, 99], [179, 88, 6]]
)


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
