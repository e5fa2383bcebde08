"""The page of a run: what is shown, in order, in one file that opens anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import piston
from piston.inference import load_policy
from piston.report.evaluation import executed, find_evaluations, success, videos
from piston.report.markup import Markup, Missing, duration, lone_tag, note, short, tag
from piston.report.prediction import Prediction, chunk, denoising, predict
from piston.report.timings import Stages, read_stages, timings
from piston.report.training import Run, read_run, training
from piston.report.transforms import Sample, choose_sample, transforms
from piston.sim.scores import Evaluation

T = TypeVar("T")


def write_report(
    run: Path,
    out: Path | None = None,
    *,
    evaluations: Sequence[Path] = (),
    stages: Path | None = None,
    use_policy: bool = True,
) -> Path:
    """Write the page of a run, by default as `report.html` in its folder; return its path."""
    out = out or run / "report.html"
    opened, evaluated = read_run(run), find_evaluations(run, evaluations)
    measured = None if stages is None else read_stages(stages)

    def ask_policy(sample: Sample) -> Prediction:
        if not use_policy or opened.checkpoint is None:
            raise Missing("the policy was not loaded. Leave out --no-policy.")
        return predict(load_policy(opened.checkpoint), sample)

    sample = _attempt(choose_sample, opened)
    prediction = _attempt(ask_policy, sample)
    answered = None if isinstance(prediction, Missing) else prediction
    hint = (
        f"Run: piston eval TASK --policy {opened.checkpoint or run / 'STEP'} --video "
        f"--out {run / 'eval'}"
    )
    sections = {
        "Success per seed": _attempt(success, evaluated, hint),
        "Videos": _attempt(videos, evaluated, hint),
        "Training": _attempt(training, opened),
        "Chunks and what was executed": _attempt(executed, evaluated, hint),
        "Action chunk": _attempt(chunk, sample, prediction),
        "Denoising": _attempt(denoising, sample, prediction),
        "Transforms": _attempt(transforms, sample, answered.back if answered else ()),
        "Timings": _attempt(timings, measured, opened, evaluated, answered),
    }
    cards = list(_cards(opened, evaluated, measured, answered))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_page(opened, cards, sections), encoding="utf-8")
    return out


def _attempt(make: Callable[..., T], *arguments: Any) -> T | Missing:
    """Call `make`; return the Missing that it raises, or the first one among its arguments."""
    for argument in arguments:
        if isinstance(argument, Missing):
            return argument
    try:
        return make(*arguments)
    except Missing as missing:
        return missing


def _page(run: Run, cards: Sequence[Markup], sections: dict[str, Markup | Missing]) -> str:
    config = run.config
    title = f"{config.name} · {config.exp_name}"
    links, shown = [], []
    for name, section in sections.items():
        if isinstance(section, Missing):
            shown.append(tag("p", tag("b", name), f" left out: {section}", class_="missing"))
            continue
        anchor = re.sub(r"\W+", "-", name.lower())
        links.append(tag("a", name, href=f"#{anchor}"))
        shown.append(tag("section", tag("h2", name), section, id=anchor))
    subtitle = note(f"{config.model.family} on {config.data.robot}, {run.folder}")
    header = tag("header", tag("h1", title), subtitle, tag("nav", *links))
    footer = tag("footer", f"Piston {piston.__version__}. Every number here was measured.")
    body = tag("main", header, tag("div", *cards, class_="cards"), *shown, footer)
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


def _cards(
    run: Run,
    evaluations: Sequence[Evaluation],
    stages: Stages | None,
    prediction: Prediction | None,
) -> Iterator[Markup]:
    """Yield a card for each headline number that is known."""

    def card(what: str, number: str, remark: str) -> Markup:
        return tag("div", tag("h3", what), tag("b", number), tag("p", remark), class_="card")

    for evaluation in evaluations:
        rate = evaluation.success
        low, high = rate.interval
        interval = f"95\N{NO-BREAK SPACE}% interval {low:.0%} to {high:.0%}"
        remark = f"{rate.successes} of {rate.episodes} episodes; {interval}"
        name = "success" if len(evaluations) == 1 else f"success, {evaluation.name}"
        name = "done against the sentence" if evaluation.opposite else name
        yield card(name, f"{rate.value:.0%}", remark)
    steps, losses = run.curve("loss")
    if len(steps):
        yield card("loss", f"{losses[-1]:.3g}", f"at step {steps[-1] + 1:,.0f}")
        samples = (steps[-1] + 1) * run.config.batch_size
        yield card("training", duration(run.training_seconds), f"{samples:,.0f} samples")
    if prediction is not None:
        number = prediction.num_parameters
        yield card("parameters", short(number), f"{run.config.model.family}, {number:,}")
    if evaluations and evaluations[0].latency_ms:
        median = f"{evaluations[0].latency_ms['p50']:.0f} ms"
        yield card("a request", median, "median, as the robot waited")
    if stages is not None and stages.peak_memory_bytes:
        gigabytes = f"{stages.peak_memory_bytes / 1e9:.2f} GB"
        yield card("peak memory", gigabytes, f"of {stages.peak_memory_of}")
