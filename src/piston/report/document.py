"""Put sections together to one HTML file that opens anywhere."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import piston
from piston.files import write_text
from piston.report.markup import Markup, Missing, lone_tag, note, tag

T = TypeVar("T")


def attempt(make: Callable[..., T], *arguments: Any) -> T | Missing:
    """Call `make`; return the Missing that it raises, or the first one among its arguments."""
    for argument in arguments:
        if isinstance(argument, Missing):
            return argument
    try:
        return make(*arguments)
    except Missing as missing:
        return missing


def write_page(
    out: Path,
    title: str,
    subtitle: str,
    cards: Sequence[Markup],
    sections: Mapping[str, Markup | Missing],
) -> Path:
    """Write a page with links to its sections; those that are missing are named at its end."""
    write_text(out, page_text(title, subtitle, cards, sections))
    return out


def page_text(
    title: str,
    subtitle: str,
    cards: Sequence[Markup],
    sections: Mapping[str, Markup | Missing],
) -> str:
    """Return the same page as text."""
    links, shown = [], []
    without: dict[str, list[str]] = {}  # reason → sections
    for name, section in sections.items():
        if isinstance(section, Missing):
            without.setdefault(str(section), []).append(name)
            continue
        anchor = re.sub(r"\W+", "-", name.lower())
        links.append(tag("a", name, href=f"#{anchor}"))
        shown.append(tag("section", tag("h2", name), section, id=anchor))
    for reason, names in without.items():
        absent = tag("b", ", ".join(names))
        shown.append(tag("p", absent, f" left out: {reason}", class_="missing"))
    header = tag("header", tag("h1", title), note(subtitle), tag("nav", *links))
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    made = f"This page was made by Piston {piston.__version__} on {platform.node()}, {date}."
    body = tag("main", header, tag("div", *cards, class_="cards"), *shown, tag("footer", made))
    head = tag(
        "head",
        lone_tag("meta", charset="utf-8"),
        lone_tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Nothing is ever fetched: no icon either.
        lone_tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(Path(__file__).with_name("style.css").read_text("utf-8"))),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", body), lang="en")
