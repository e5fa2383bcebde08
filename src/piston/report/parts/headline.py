"""The numbers that people look for first."""

from __future__ import annotations

from piston.report.amounts import duration, short
from piston.report.contents import Contents, Missing
from piston.report.markup import Markup, tag


def headline(contents: Contents) -> Markup:
    return tag("div", *(_card(*numbers) for numbers in _numbers(contents)), class_="cards")


def _numbers(contents: Contents) -> list[tuple[str, str, str]]:
    """(what, number, remark), as far as they are known."""
    run, found = contents.run, []
    for evaluation in contents.evaluations:
        rate = evaluation.success
        low, high = rate.interval
        interval = f"95\N{NO-BREAK SPACE}% interval {low:.0%} to {high:.0%}"
        remark = f"{rate.successes} of {rate.episodes} episodes; {interval}"
        name = "success" if len(contents.evaluations) == 1 else f"success, {evaluation.name}"
        name = "done against the sentence" if evaluation.opposite else name
        found.append((name, f"{rate.value:.0%}", remark))
    steps, losses = run.curve("loss")
    if len(steps):
        found.append(("loss", f"{losses[-1]:.3g}", f"at step {steps[-1] + 1:,.0f}"))
        seconds = run.training_seconds
        samples = (steps[-1] + 1) * run.config.batch_size
        found.append(("training", duration(seconds), f"{samples:,.0f} samples"))
    if not isinstance(contents.prediction, Missing):
        number = contents.prediction.num_parameters
        found.append(("parameters", short(number), f"{run.config.model.family}, {number:,}"))
    if contents.evaluations and contents.evaluations[0].latency_ms:
        latency = contents.evaluations[0].latency_ms
        found.append(("a request", f"{latency['p50']:.0f} ms", "median, as the robot waited"))
    if contents.stages is not None and contents.stages.peak_memory_bytes:
        gigabytes = contents.stages.peak_memory_bytes / 1e9
        found.append(("peak memory", f"{gigabytes:.2f} GB", f"of {contents.stages.peak_memory_of}"))
    return found


def _card(what: str, number: str, remark: str) -> Markup:
    return tag("div", tag("h3", what), tag("b", number), tag("p", remark), class_="card")
