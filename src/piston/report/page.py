"""The page of a run: what is shown, in order, in one file that opens anywhere."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import piston
from piston.inference import load_policy
from piston.report.evaluation import executed, find_evaluations, success, videos
from piston.report.markup import Markup, Missing, duration, lone_tag, note, short, tag
from piston.report.prediction import Prediction, chunk, denoising, predict
from piston.report.timings import Stages, read_stages, timings
from piston.report.training import Run, read_run, training
from piston.report.transforms import Sample, choose_sample, read_pipeline, transforms
from piston.sim.scores import Evaluation

logger = logging.getLogger(__name__)


def write_report(
    run: Path,
    out: Path | None = None,
    *,
    evaluations: Sequence[Path] = (),
    stages: Path | None = None,
    use_policy: bool = True,
) -> Path:
    """Write the page of a run, by default as `report.html` in its folder; return its path."""
    contents = gather(run, evaluations, stages, use_policy=use_policy)
    out = out or run / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(contents), encoding="utf-8")
    return out


@dataclasses.dataclass(frozen=True)
class Contents:
    run: Run
    evaluations: tuple[Evaluation, ...]
    stages: Stages | None
    sample: Sample | Missing
    prediction: Prediction | Missing

    @property
    def hint(self) -> str:
        """How to evaluate the run."""
        checkpoint = self.run.checkpoint or self.run.folder / "STEP"
        return (
            f"Run: piston eval TASK --policy {checkpoint} --video --out {self.run.folder / 'eval'}"
        )


def gather(
    folder: Path,
    evaluations: Sequence[Path] = (),
    stages: Path | None = None,
    *,
    use_policy: bool = True,
) -> Contents:
    run = read_run(folder)
    sample, prediction = _read_policy(run, use_policy)
    return Contents(
        run=run,
        evaluations=tuple(find_evaluations(folder, evaluations)),
        stages=None if stages is None else read_stages(stages),
        sample=sample,
        prediction=prediction,
    )


def _read_policy(run: Run, use_policy: bool) -> tuple[Sample | Missing, Prediction | Missing]:
    if run.checkpoint is None:
        missing = Missing(
            "the run has no whole checkpoint yet. Train on, with --resume; the last step is saved."
        )
        return missing, missing
    if run.config.data_config().fake:
        missing = Missing("the run trained on random samples, which cannot be shown.")
        return missing, missing
    try:
        pipeline = read_pipeline(run.config, run.checkpoint)
        sample = choose_sample(run.config, pipeline)
    except (OSError, ValueError, KeyError) as error:
        # Everything else of the run can be shown all the same; the page says what this was.
        logger.warning("No sample of the run's data set: %s", error)
        missing = Missing(f"no sample of the run's data set. {error}")
        return missing, missing
    if not use_policy:
        return sample, Missing("the policy was not loaded. Leave out --no-policy.")
    policy = load_policy(run.checkpoint)
    return sample, predict(policy, pipeline, sample)


def render(contents: Contents) -> str:
    config = contents.run.config
    title = f"{config.name} · {config.exp_name}"
    links, sections = [], []
    for name, section in _sections(contents).items():
        if isinstance(section, Missing):
            text = f" left out: {section.why}"
            sections.append(tag("p", tag("b", name), text, class_="missing"))
        else:
            anchor = re.sub(r"\W+", "-", name.lower())
            links.append(tag("a", name, href=f"#{anchor}"))
            sections.append(tag("section", tag("h2", name), section, id=anchor))
    subtitle = note(f"{config.model.family} on {config.data.robot}, {contents.run.folder}")
    header = tag("header", tag("h1", title), subtitle, tag("nav", *links))
    cards = (
        tag("div", tag("h3", what), tag("b", number), tag("p", remark), class_="card")
        for what, number, remark in _figures(contents)
    )
    footer = tag("footer", f"Piston {piston.__version__}. Every number here was measured.")
    body = tag("main", header, tag("div", *cards, class_="cards"), *sections, footer)
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


def _sections(contents: Contents) -> dict[str, Markup | Missing]:
    """Return every section in order, or why it is missing."""
    evaluations, hint = contents.evaluations, contents.hint
    sections: dict[str, Markup | Missing] = {
        "Success per seed": success(evaluations, hint),
        "Videos": videos(evaluations, hint),
        "Training": training(contents.run),
        "Chunks and what was executed": executed(evaluations, hint),
    }
    sample, prediction = contents.sample, contents.prediction
    if isinstance(sample, Missing):
        names = ("Action chunk", "Denoising", "Transforms")
        sections |= dict.fromkeys(names, sample)
    elif isinstance(prediction, Missing):
        sections |= dict.fromkeys(("Action chunk", "Denoising"), prediction)
        sections["Transforms"] = transforms(sample, ())
    else:
        sections["Action chunk"] = chunk(sample, prediction)
        sections["Denoising"] = denoising(sample, prediction)
        shown = prediction.denoising
        sections["Transforms"] = transforms(sample, () if shown is None else shown.trace)
    sections["Timings"] = timings(contents.stages, contents.run, evaluations, prediction)
    return sections


def _figures(contents: Contents) -> list[tuple[str, str, str]]:
    """Return (what, number, remark) for each number that is known."""
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
