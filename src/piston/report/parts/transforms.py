"""The chain of transforms with one real sample: what every key is after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from piston.report import pictures
from piston.report.contents import Contents, Missing
from piston.report.markup import Markup, join, lone_tag, table, tag
from piston.report.sample import TraceStep
from piston.transforms.base import Data
from piston.transforms.keys import flatten_dict

_THUMBNAIL = 112
_LONGEST_TEXT = 80


def transforms(contents: Contents) -> Markup | Missing:
    sample, prediction = contents.sample, contents.prediction
    if isinstance(sample, Missing):
        return sample
    note = (
        f"Episode {sample.episode}, frame {sample.frame} of {sample.repo_id}, from the data set to "
        "what the model sees. Shown are the keys that a transform changes or adds; the others are "
        "folded away."
    )
    parts = [tag("p", note, class_="note"), _chain(sample.trace, "an item of the data set")]
    if not isinstance(prediction, Missing) and prediction.denoising is not None:
        parts.append(tag("h3", "And back to the robot"))
        parts.append(_chain(prediction.denoising.trace, "the model's actions"))
    return join(parts)


def _chain(trace: Sequence[TraceStep], first: str) -> Markup:
    before: Data = {}
    steps = []
    for step in trace:
        after = flatten_dict(step.data)
        steps.append(_step(step, step.name or first, before, after))
        before = after
    return tag("ol", *steps, class_="chain")


def _step(step: TraceStep, name: str, before: Data, after: Data) -> Markup:
    changed = [key for key in after if key not in before or not _same(before[key], after[key])]
    unchanged = [key for key in after if key not in changed]
    gone = [key for key in before if key not in after]
    settings = tag("code", step.settings) if step.settings else None
    title = tag("h4", name, " ", settings, tag("span", step.stage, class_="stage"))
    thumbnails = [_thumbnail(key, after[key]) for key in changed if _is_image(after[key])]
    folded = None
    if unchanged:
        count = f"{len(unchanged)} unchanged key{'s' * (len(unchanged) > 1)}"
        folded = tag("details", tag("summary", count), _keys(unchanged, after))
    return tag(
        "li",
        title,
        _keys(changed, after) if changed else tag("p", "changes nothing here", class_="note"),
        tag("div", *thumbnails, class_="thumbnails") if thumbnails else None,
        tag("p", "dropped: ", ", ".join(gone), class_="note") if gone else None,
        folded,
    )


def _keys(names: Sequence[str], data: Data) -> Markup:
    rows = ((tag("code", name), *_described(data[name])) for name in names)
    return tag("div", table(("key", "type", "shape", "values"), rows), class_="scrolls")


def _described(value: Any) -> tuple[str, str, str]:
    """Type, shape and range of values."""
    array = np.asarray(value)
    shape = " × ".join(map(str, array.shape)) or "–"
    if array.dtype.kind in "US":
        return "text", shape, _shortened(repr(str(array) if array.ndim == 0 else array.tolist()))
    if array.dtype.kind == "b":
        told = str(bool(array)) if array.ndim == 0 else f"{array.sum()} of {array.size} true"
        return "bool", shape, told
    if array.dtype.kind not in "iuf" or not array.size:
        return str(array.dtype), shape, _shortened(repr(value))
    if array.ndim == 0:
        return str(array.dtype), shape, f"{array.item():.5g}"
    return str(array.dtype), shape, f"{array.min():.4g} … {array.max():.4g}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _same(one: Any, other: Any) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))


def _is_image(value: Any) -> bool:
    array = np.asarray(value)
    return array.dtype == np.uint8 and array.ndim == 3 and 3 in (array.shape[0], array.shape[-1])


def _thumbnail(key: str, value: Any) -> Markup:
    image = np.asarray(value)
    image = image if image.shape[-1] == 3 else np.moveaxis(image, 0, -1)
    source = pictures.png(np.ascontiguousarray(image), longest=_THUMBNAIL)
    height, width = image.shape[:2]
    text = f"{key}, {height} × {width}"
    return tag("figure", lone_tag("img", src=source, alt=text), tag("figcaption", text))
