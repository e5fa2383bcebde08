"""`piston demo NAME`: the main job from end to end.

    record ─▶ stats ─▶ train ─▶ serve ◀─ ws:// ─ eval ─▶ report

Every stage is a verb that one could type oneself, run as a process of its own. Demos are data: a
`DemoPlan` in `PLANS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from piston.cli.console import console, fail
from piston.cli.demo_job import Job, StageFailed, begin
from piston.data import Metadata
from piston.report.evaluations import read_evaluation
from piston.report.run import read_run
from piston.signals import exit_on_sigterm
from piston.training.checkpoint import saved_steps


@dataclasses.dataclass(frozen=True)
class Trial:
    """One evaluation of the served policy."""

    # Also the folder of its results.
    name: str
    seeds: str
    # None: what was recorded.
    task: str | None = None
    # With the sentence that asks for the opposite of what is counted.
    opposite: bool = False


@dataclasses.dataclass(frozen=True)
class DemoPlan:
    """A demo in numbers."""

    task: str
    preset: str
    # Demonstrations.
    episodes: int
    trials: tuple[Trial, ...]
    # Steps of a chunk that are executed before the next is asked for.
    execute_horizon: int
    # Side of the camera images; None: the environment's own.
    pixels: int | None = None
    # Overrides of the preset, as on the command line.
    training: tuple[str, ...] = ()
    # Where everything goes by default.
    folder: str = "runs/demo"
    # The short form: too little to learn anything, enough to pass through every stage.
    quick_episodes: int = 4
    quick_seeds: str = "0..3"
    quick_training: tuple[str, ...] = (
        *("--num-train-steps", "40", "--log-interval", "5", "--ema-decay", "0.8"),
        *("--batch-size", "8", "--noise-draws", "4"),
        *("--lr-schedule.warmup-steps", "5", "--lr-schedule.decay-steps", "40"),
    )

    def quick(self) -> DemoPlan:
        return dataclasses.replace(
            self,
            episodes=self.quick_episodes,
            trials=tuple(dataclasses.replace(t, seeds=self.quick_seeds) for t in self.trials),
            training=(*self.training, *self.quick_training),
        )


# Of metaworld:tiny, the two pairs in the same start scene.
_WITH_OPPOSITE = (
    "metaworld:drawer-open-halfway,drawer-close-halfway,window-open-halfway,window-close-halfway"
)

PLANS = {
    "aloha": DemoPlan(
        task="aloha_transfer_cube",
        preset="tiny_aloha_sim",
        episodes=150,
        trials=(Trial("asked", "0..49"),),
        # After half a chunk the fingers are closing around the cube and hide it from the camera: a
        # bad moment to look again.
        execute_horizon=96,
    ),
    "metaworld": DemoPlan(
        task="metaworld:tiny",
        preset="tiny_metaworld",
        episodes=300,
        trials=(
            Trial("asked", "0..124"),
            Trial("opposite", "0..39", task=_WITH_OPPOSITE, opposite=True),
        ),
        execute_horizon=4,
        folder="runs/demo-metaworld",
        quick_episodes=5,
    ),
}


@dataclasses.dataclass(frozen=True)
class DemoArguments:
    """Record demonstrations, train a small policy, serve it, let it drive the robot, and report."""

    # Which demo.
    name: Annotated[str, tyro.conf.Positional] = "aloha"
    # Few episodes and steps: to see that every stage works, in under 90 seconds.
    quick: bool = False
    # The folder for everything; what an earlier demo left there is deleted.
    out: Path | None = None
    # Seed of the training.
    seed: int = 0
    # Go on after the last stage that was finished.
    resume: bool = False


def run_demo(args: list[str]) -> int:
    arguments = tyro.cli(DemoArguments, args=args, prog="piston demo")
    plan = find_plan(arguments.name)
    plan = plan.quick() if arguments.quick else plan
    out = (arguments.out or Path(plan.folder)).absolute()
    description = {"demo": arguments.name, "seed": arguments.seed, **_what_is_done(plan)}
    # As it is read back: JSON knows no tuples.
    job = begin(out, json.loads(json.dumps(description)), resume=arguments.resume)
    try:
        with exit_on_sigterm():
            _do_all(job, plan, arguments.seed)
    except StageFailed as failure:
        _show_table(job)
        return fail(f"{failure} Finished stages are kept: --resume goes on.", failure.code)
    except KeyboardInterrupt:
        _show_table(job)
        print(
            "Stopped. Finished stages are kept: the same command with --resume goes on, without "
            "it everything is deleted and begins again.",
            file=sys.stderr,
        )
        return 130
    _show_end(job, plan)
    return 0


def _what_is_done(plan: DemoPlan) -> dict[str, Any]:
    """All but where it goes by default and what its short form would be."""
    fields = dataclasses.asdict(plan).items()
    return {k: v for k, v in fields if k != "folder" and not k.startswith("quick_")}


def find_plan(name: str) -> DemoPlan:
    if name not in PLANS:
        nearest = difflib.get_close_matches(name, PLANS, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"No demo is named {name!r}.{hint} There are: {', '.join(PLANS)}.")
    return PLANS[name]


def _do_all(job: Job, plan: DemoPlan, seed: int) -> None:
    data, run_folder = job.out / "data", _run_folder(job.out, plan)
    configuration = (
        *(plan.preset, "--exp-name", "demo", *plan.training),
        *("--data.repo-id", data, "--data.assets.asset-id", job.stages.job["demo"]),
        *("--assets-base-dir", job.out / "assets"),
        *("--checkpoint-base-dir", job.out / "checkpoints"),
    )
    recording = (plan.task, "--episodes", plan.episodes, "--out", data, "--workers", 2)
    job.do("record", (*recording, *_pixels(plan)), lambda: _recorded(data))
    job.do("stats", configuration, lambda: "norm_stats.json")
    job.do("train", (*configuration, "--seed", seed, "--resume"), lambda: _trained(run_folder))

    trials = [trial for trial in plan.trials if not job.is_finished(_stage(plan, trial))]
    if trials:
        with job.serve(run_folder / str(saved_steps(run_folder)[-1])) as uri:
            for trial in trials:
                _try(job, plan, trial, uri)

    page = job.out / "report.html"
    evaluations = [_results(job.out, trial) for trial in plan.trials]
    words = (
        *(run_folder, "--eval", *evaluations, "--stages", job.state_file, "--out", page),
        *("--animation", job.out / "animation.webp"),
    )
    job.do("report", words, lambda: f"{page.stat().st_size / 1e6:.1f} MB", again=True)


def _try(job: Job, plan: DemoPlan, trial: Trial, uri: str) -> None:
    results = _results(job.out, trial)
    words = (
        *(trial.task or plan.task, "--policy", uri, "--seeds", trial.seeds, *_pixels(plan)),
        *("--execute-horizon", plan.execute_horizon, "--video", "--out", results),
        *(("--opposite",) if trial.opposite else ()),
    )
    job.do(_stage(plan, trial), words, lambda: str(read_evaluation(results).success))


def _stage(plan: DemoPlan, trial: Trial) -> str:
    return f"eval {trial.name}" if len(plan.trials) > 1 else "eval"


def _pixels(plan: DemoPlan) -> tuple[Any, ...]:
    return () if plan.pixels is None else ("--pixels", plan.pixels)


def _run_folder(out: Path, plan: DemoPlan) -> Path:
    return out / "checkpoints" / plan.preset / "demo"


def _results(out: Path, trial: Trial) -> Path:
    return out / "eval" / trial.name


def _recorded(data: Path) -> str:
    metadata = Metadata.read(data)
    return f"{len(metadata.episodes)} episodes, {metadata.total_frames:,} frames"


def _trained(run_folder: Path) -> str:
    steps, losses = read_run(run_folder).curve("loss")
    return f"{steps[-1] + 1:,.0f} steps, loss {losses[-1]:.4f}"


def _show_table(job: Job) -> None:
    table = Table(title=f"piston demo {job.stages.job['demo']}", title_justify="left")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("result")
    for stage in job.stages.finished:
        table.add_row(stage.name, f"{stage.seconds:.1f}", stage.result)
    for name, seconds in job.stages.unfinished.items():
        table.add_row(name, f"{seconds:.1f}", "not finished")
    total = sum(stage.seconds for stage in job.stages.finished)
    total += sum(job.stages.unfinished.values())
    table.add_row("all", f"{total:.1f}", "", style="bold")
    console().print(table)


def _show_end(job: Job, plan: DemoPlan) -> None:
    _show_table(job)
    screen = console()
    for trial in plan.trials:
        evaluation = read_evaluation(_results(job.out, trial))
        asked = "the opposite sentence" if trial.opposite else "success"
        screen.print(
            f"{evaluation.task}, {asked}: [bold]{evaluation.success}[/bold] (95 % interval)"
        )
    gigabytes = job.stages.peak_memory_bytes / 1e9
    screen.print(f"peak memory of {job.stages.peak_memory_of}: {gigabytes:.2f} GB")
    _print_path(screen, job.out / "report.html")


def _print_path(screen: Any, path: Path) -> None:
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    screen.print(f"see {path}", soft_wrap=True, highlight=False)
