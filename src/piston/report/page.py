"""The page: its parts in order, in one file that opens anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import piston
from piston.report.contents import Contents, Missing, gather
from piston.report.markup import Markup, join, lone_tag, tag
from piston.report.parts.chunk import chunk, denoising
from piston.report.parts.executed import executed
from piston.report.parts.headline import headline
from piston.report.parts.success import success, videos
from piston.report.parts.timings import timings
from piston.report.parts.training import training
from piston.report.parts.transforms import transforms
from piston.report.style import STYLE

_PARTS: dict[str, Callable[[Contents], Markup | Missing]] = {
    "Success per seed": success,
    "Videos": videos,
    "Training": training,
    "Chunks and what was executed": executed,
    "Action chunk": chunk,
    "Denoising": denoising,
    "Transforms": transforms,
    "Timings": timings,
}


def write_report(
    run: Path,
    out: Path | None = None,
    *,
    evaluations: Sequence[Path] = (),
    stages: Path | None = None,
    use_policy: bool = True,
) -> Path:
    """Write the page of a run, by default as `report.html` in its folder; where it went."""
    contents = gather(run, evaluations, stages, use_policy=use_policy)
    out = out or run / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(contents), encoding="utf-8")
    return out


def render(contents: Contents) -> str:
    config = contents.run.config
    title = f"{config.name} · {config.exp_name}"
    built = {name: part(contents) for name, part in _PARTS.items()}
    links = (
        tag("a", name, href=f"#{_anchor(name)}")
        for name, part in built.items()
        if not isinstance(part, Missing)
    )
    subtitle = f"{config.model.family} on {config.data.robot}, {contents.run.folder}"
    header = tag("header", tag("h1", title), tag("p", subtitle, class_="note"), tag("nav", *links))
    sections = (_section(name, part) for name, part in built.items())
    footer = tag("footer", f"Piston {piston.__version__}. Every number here was measured.")
    return _document(title, tag("main", header, headline(contents), *sections, footer))


def _section(name: str, part: Markup | Missing) -> Markup:
    if isinstance(part, Missing):
        return tag("p", tag("b", name), f" left out: {part.why}", class_="missing")
    return tag("section", tag("h2", name), part, id=_anchor(name))


def _anchor(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower())


def _document(title: str, body: Markup) -> str:
    head = tag(
        "head",
        lone_tag("meta", charset="utf-8"),
        lone_tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Nothing is ever fetched: no icon either.
        lone_tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    return "<!doctype html>\n" + tag("html", join([head, tag("body", body)]), lang="en")
