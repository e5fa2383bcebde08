"""Sections, made from the templates in `templates/`, and the page of them in one file.

A section is a function that computes its numbers and gives them to a template with `render`; it
raises `Missing` if there is nothing to show. What templates use besides Jinja2's own filters is in
`_environment`.
"""

from __future__ import annotations

import datetime
import functools
import math
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jinja2
from markupsafe import Markup

import piston
from piston.report import figures

TEMPLATES = Path(__file__).with_name("templates")
T = TypeVar("T")


class Missing(Exception):
    """Why a section is not shown, and how to get it."""


class Card(NamedTuple):
    """One of the headline numbers of a page."""

    title: str
    number: str
    remark: str


def make_environment(*folders: Path) -> jinja2.Environment:
    """Return an environment with the templates of these folders, then those of the reports."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals |= {"plot": plot, "small_plot": small_plot, "wide_plot": wide_plot}
    environment.tests["finite"] = math.isfinite
    environment.filters |= {
        "at": "{:.1f}".format,
        "duration": figures.duration,
        "data_uri": figures.data_uri,
        "effect": figures.effect,
        "percent": figures.percent,
        "png": figures.png,
        "repr": repr,
        "short": figures.short,
        "spoken": figures.spoken,
        "two_digits": figures.two_digits,
    }
    return environment


_environment = functools.cache(make_environment)


def render(template: str, /, **values: Any) -> Markup:
    return Markup(_environment().get_template(template).render(**values))


def plot(lines: Sequence[figures.Line], *args: Any, **options: Any) -> Markup:
    """Draw curves in one frame, with a legend if several have names; see `figures.lay_out`."""
    return render("plot.html", drawn=figures.lay_out(lines, *args, **options))


def wide_plot(lines: Sequence[figures.Line], height: float, y_label: str, **axis: bool) -> Markup:
    """Draw a plot over the steps that is as wide as the page and scrolls on narrow screens."""
    ticks = (6, 4 if height > 200 else 3)
    return Markup('<div class="scrolls wide">{}</div>').format(
        plot(lines, 960, height, "step", y_label, markers=True, num_ticks=ticks, **axis)
    )


def small_plot(
    name: str,
    lines: Sequence[figures.Line],
    x_label: str = "seconds",
    *,
    value: str = "",
    widest: float = 0.0,
    min_span: float = 0.0,
    from_zero: bool = False,
) -> Markup:
    """Draw the figure of one action dimension; `widest` is the largest range of all of them."""
    # Curves that have names are in the legend of all plots.
    lines = [line._replace(name="") for line in lines]
    least = max(figures.LEAST_SHARE * widest, min_span)
    options: dict[str, Any] = {"min_span": least, "from_zero": from_zero, "num_ticks": (4, 3)}
    drawn = figures.lay_out(lines, 280, 150, x_label, **options)
    return render("small_plot.html", name=name, value=value, drawn=drawn)


def attempt(make: Callable[..., T], *arguments: Any) -> T | Missing:
    """Call `make`; return the Missing that it raises, or the first one among its arguments."""
    for argument in arguments:
        if isinstance(argument, Missing):
            return argument
    try:
        return make(*arguments)
    except Missing as missing:
        return missing


def page_text(
    title: str,
    subtitle: str,
    cards: Sequence[Card],
    sections: Mapping[str, Markup | Missing],
) -> str:
    """Return a page with links to its sections; those that are missing are named at its end."""
    without: dict[str, list[str]] = {}  # reason → sections
    for name, section in sections.items():
        if isinstance(section, Missing):
            without.setdefault(str(section), []).append(name)
    return render(
        "report.html",
        title=title,
        subtitle=subtitle,
        cards=cards,
        sections=[
            (re.sub(r"\W+", "-", name.lower()), name, section)
            for name, section in sections.items()
            if not isinstance(section, Missing)
        ],
        without=without,
        version=piston.__version__,
        machine=platform.node(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
