"""The page of a run or of several: what is shown, in order, in one file that opens anywhere."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import piston
from piston.data.dataset import LeRobotDataset
from piston.inference import load_policy
from piston.report import comparison
from piston.report.dataset import dataset, open_sets
from piston.report.evaluation import executed, find_evaluations, success, videos
from piston.report.markup import Markup, Missing, duration, lone_tag, note, short, tag
from piston.report.prediction import Prediction, chunk, denoising, predict
from piston.report.timings import Stages, read_stages, timings
from piston.report.training import Run, origin, read_run, training, validation
from piston.report.transforms import Sample, choose_sample, transforms
from piston.sim.recording import simulated_task
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
    opened, evaluated = read_run(run), find_evaluations(run, evaluations)
    measured = None if stages is None else read_stages(stages)

    def ask_policy(sample: Sample) -> Prediction:
        if not use_policy or opened.checkpoint is None:
            raise Missing("the policy was not loaded. Leave out --no-policy.")
        return predict(load_policy(opened.checkpoint), sample)

    sets = _attempt(open_sets, opened)
    sample = _attempt(choose_sample, opened, sets)
    prediction = _attempt(ask_policy, sample)
    answered = None if isinstance(prediction, Missing) else prediction
    sections: dict[str, Markup | Missing] = {"Evaluation": _how_to_evaluate(opened, sets)}
    if evaluated:
        sections = {
            "Success per seed": _attempt(success, evaluated),
            "Videos": _attempt(videos, evaluated),
        }
    sections |= {
        "Training": _attempt(training, opened),
        "Validation": _attempt(validation, opened),
        "Data set": _attempt(dataset, opened, sets),
    }
    if evaluated:
        sections["Chunks and what was executed"] = _attempt(executed, evaluated)
    sections |= {
        "Action chunk": _attempt(chunk, sample, prediction),
        "Denoising": _attempt(denoising, sample, prediction),
        "Transforms": _attempt(transforms, sample, answered.back if answered else ()),
        "Timings": _attempt(timings, measured, opened, evaluated, answered),
        "How it was started": _attempt(origin, opened),
    }
    config = opened.config
    title = f"{config.name} · {config.exp_name}"
    subtitle = f"{config.model.family} on {config.data.robot}, {opened.folder}"
    cards = list(_cards(opened, evaluated, measured, answered))
    return _write(out or run / "report.html", title, subtitle, cards, sections)


def write_comparison(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one page of several runs, by default `comparison.html` in the folder that has them."""
    runs = comparison.named([read_run(folder) for folder in folders])
    sections = {
        "Results": _attempt(comparison.results, runs),
        "Curves": _attempt(comparison.curves, runs),
        "Validation error per dimension": _attempt(comparison.error_per_dim, runs),
        "Different settings": _attempt(comparison.settings, runs),
    }
    base = comparison.common_folder(folders)
    out = out or base / "comparison.html"
    return _write(out, f"{len(runs)} runs", ", ".join(runs), [], sections)


def _how_to_evaluate(run: Run, sets: Sequence[LeRobotDataset] | Missing) -> Missing:
    """Return why there is no evaluation; the advice fits the robot that the data came from."""
    checkpoint = run.checkpoint or run.folder / "STEP"
    task = None if isinstance(sets, Missing) else simulated_task(sets[0].metadata.root)
    advice = f"To try it on the robot: piston serve {checkpoint}"
    if task is not None:
        advice = (
            f"Run: piston eval {task} --policy {checkpoint} --video --out {run.folder / 'eval'}"
        )
    return Missing(f"there are no results of trials with this policy. {advice}")


def _attempt(make: Callable[..., T], *arguments: Any) -> T | Missing:
    """Call `make`; return the Missing that it raises, or the first one among its arguments."""
    for argument in arguments:
        if isinstance(argument, Missing):
            return argument
    try:
        return make(*arguments)
    except Missing as missing:
        return missing


def _write(
    out: Path,
    title: str,
    subtitle: str,
    cards: Sequence[Markup],
    sections: Mapping[str, Markup | Missing],
) -> Path:
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
    out.parent.mkdir(parents=True, exist_ok=True)
    page = "<!doctype html>\n" + tag("html", head, tag("body", body), lang="en")
    out.write_text(page, encoding="utf-8")
    return out


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
        if (error := run.last("validation/action_error")) is not None:
            yield card("action error", f"{error:.3g}", "on held-out episodes, normalised units")
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
