"""The page of a run or of several: what is shown, in order, in one file that opens anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from piston.data.protocol import Dataset
from piston.files import write_text
from piston.inference import Policy, load_policy
from piston.report import comparison
from piston.report.dataset import dataset, open_sets, robot_sets
from piston.report.document import Card, Missing, attempt, page_text
from piston.report.evaluation import executed, find_evaluations, success, videos
from piston.report.figures import duration, short
from piston.report.inspection import why
from piston.report.prediction import Prediction, chunk, denoising, predict
from piston.report.timings import timings
from piston.report.training import Run, origin, read_run, training, validation
from piston.report.transforms import Sample, choose_sample, transforms
from piston.sim.recording import simulated_task
from piston.sim.scores import Evaluation
from piston.stages import Stages, read_stages


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

    def load(sample: Sample) -> Policy:
        if not use_policy or opened.checkpoint is None:
            raise Missing("the policy was not loaded. Leave out --no-policy.")
        return load_policy(opened.checkpoint, robot=sample.pipeline.entry or None)

    sets = attempt(open_sets, opened)
    sample = attempt(choose_sample, opened, sets)
    policy = attempt(load, sample)
    prediction = attempt(predict, policy, sample)
    answered = None if isinstance(prediction, Missing) else prediction
    sections: dict[str, Markup | Missing] = {"Evaluation": _how_to_evaluate(opened, sets)}
    if evaluated:
        sections = {
            "Success per seed": attempt(success, evaluated),
            "Videos": attempt(videos, evaluated),
        }
    sections |= {
        "Training": attempt(training, opened),
        "Validation": attempt(validation, opened),
        "Data set": attempt(dataset, opened, sets),
    }
    if evaluated:
        sections["Chunks and what was executed"] = attempt(executed, evaluated)
    sections |= {
        "Why it does that": attempt(why, policy, evaluated),
        "Action chunk": attempt(chunk, sample, prediction),
        "Denoising": attempt(denoising, sample, prediction),
        "Transforms": attempt(transforms, sample, answered.back if answered else ()),
        "Timings": attempt(timings, measured, opened, evaluated, answered),
        "How it was started": attempt(origin, opened),
    }
    config = opened.config
    title = f"{config.name} · {config.exp_name}"
    subtitle = f"{config.model.family} on {config.data.robot}, {opened.folder}"
    cards = list(_cards(opened, evaluated, measured, answered))
    out = out or run / "report.html"
    write_text(out, page_text(title, subtitle, cards, sections))
    return out


def write_comparison(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one page of several runs, by default `comparison.html` in the folder that has them."""
    runs = comparison.named([read_run(folder) for folder in folders])
    sections = {
        "Results": attempt(comparison.results, runs),
        "Curves": attempt(comparison.curves, runs),
        "Validation error per dimension": attempt(comparison.error_per_dim, runs),
        "Different settings": attempt(comparison.settings, runs),
    }
    base = comparison.common_folder(folders)
    out = out or base / "comparison.html"
    write_text(out, page_text(f"{len(runs)} runs", ", ".join(runs), [], sections))
    return out


def _how_to_evaluate(run: Run, sets: Sequence[Dataset] | Missing) -> Missing:
    """Return why there is no evaluation; the advice fits the robot that the data came from."""
    checkpoint = run.checkpoint or run.folder / "STEP"
    advice = f"To try it on the robot: piston serve {checkpoint}"
    robots = attempt(robot_sets, run, sets)
    first = None if isinstance(robots, Missing) else robots[0]
    task = None if first is None else simulated_task(first.source.metadata.root)
    if first is not None and task is not None:
        robot = f" --robot {first.pipeline.entry}" if first.pipeline.entry else ""
        advice = (
            f"Run: piston eval {task} --policy {checkpoint}{robot} --video "
            f"--out {run.folder / 'eval'}"
        )
    return Missing(f"there are no results of trials with this policy. {advice}")


def _cards(
    run: Run,
    evaluations: Sequence[Evaluation],
    stages: Stages | None,
    prediction: Prediction | None,
) -> Iterator[Card]:
    """Yield a card for each headline number that is known."""
    for evaluation in evaluations:
        rate = evaluation.success
        low, high = rate.interval
        interval = f"95\N{NO-BREAK SPACE}% interval {low:.0%} to {high:.0%}"
        remark = f"{rate.successes} of {rate.episodes} episodes; {interval}"
        name = "success" if len(evaluations) == 1 else f"success, {evaluation.name}"
        name = "done against the sentence" if evaluation.opposite else name
        yield Card(name, f"{rate.value:.0%}", remark)
    steps, losses = run.curve("loss")
    if len(steps):
        yield Card("loss", f"{losses[-1]:.3g}", f"at step {steps[-1] + 1:,.0f}")
        if (error := run.last("validation/action_error")) is not None:
            yield Card("action error", f"{error:.3g}", "on held-out episodes, normalised units")
        samples = (steps[-1] + 1) * run.config.batch_size
        yield Card("training", duration(run.training_seconds), f"{samples:,.0f} samples")
    if prediction is not None:
        number = prediction.policy.num_parameters
        yield Card("parameters", short(number), f"{run.config.model.family}, {number:,}")
    if evaluations and evaluations[0].latency_ms:
        median = f"{evaluations[0].latency_ms['p50']:.0f} ms"
        yield Card("a request", median, "median, as the robot waited")
    if stages is not None and stages.peak_memory_bytes:
        gigabytes = f"{stages.peak_memory_bytes / 1e9:.2f} GB"
        yield Card("peak memory", gigabytes, f"of {stages.peak_memory_of}")
