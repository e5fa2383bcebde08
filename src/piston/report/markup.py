"""HTML and SVG as text: what is not markup already is escaped, always.

Knows tags; knows nothing of what they say.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any


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
    """One that has no end, such as `img`; in SVG such a tag closes itself."""
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
