"""The loss over the steps, the learning rate below it, and the first batch as the model saw it."""

from __future__ import annotations

import numpy as np
from PIL import Image

from piston.report import pictures
from piston.report.contents import Contents, Missing
from piston.report.markup import Markup, join, lone_tag, tag
from piston.report.plots import Frame, Line, is_wide, plot
from piston.report.run import FIRST_BATCH, Run


def training(contents: Contents) -> Markup | Missing:
    run = contents.run
    steps, losses = run.curve("loss")
    if len(steps) < 2:
        return Missing(
            f"metrics.jsonl has {len(steps)} line(s) with a loss. Train on, or log more often: "
            "--log-interval 10"
        )
    lines = [Line(steps, losses, "accent", "training loss")]
    validated, validation = run.curve("validation/loss")
    if len(validated):
        lines.append(Line(validated, validation, "second", "loss on held-out episodes"))
    log = is_wide(np.concatenate([losses, validation]))
    scale = "loss (log)" if log else "loss"
    curves = tag(
        "div",
        plot(lines, Frame(960, 300, "", scale, log=log, markers=True)),
        _small(run, "learning_rate", "learning rate", last=False),
        _small(run, "gradient_norm", "gradient norm", last=True),
        class_="scrolls wide",
    )
    return join([curves, _skipped(run), _first_batch(run)])


def _small(run: Run, name: str, label: str, last: bool) -> Markup:
    steps, values = run.curve(name)
    log = name == "gradient_norm" and is_wide(values)
    frame = Frame(
        *(960, 130 if last else 110),
        "step" if last else "",
        label,
        log=log,
        markers=True,
        num_y_ticks=3,
    )
    return plot([Line(steps, values, "quiet", label)], frame)


def _skipped(run: Run) -> Markup | None:
    count = int(sum(run.curve("skipped_steps")[1]))
    return tag("p", f"{count} steps were skipped: not finite.", class_="note") if count else None


def _first_batch(run: Run) -> Markup | None:
    path = run.folder / FIRST_BATCH
    if not path.is_file():
        return None
    with Image.open(path) as image:
        source = pictures.png(np.asarray(image.convert("RGB")), longest=480)
    picture = lone_tag("img", src=source, alt="the first batch", loading="lazy")
    return tag(
        "details",
        tag("summary", "The first batch, as the model got it"),
        tag("p", "A row per sample, a column per camera.", class_="note"),
        picture,
    )
