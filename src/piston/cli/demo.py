"""`piston demo NAME`: the main job from end to end.

    record ─▶ stats ─▶ train ─▶ serve ◀─ ws:// ─ eval ─▶ report

Every stage is a public command, run as a process of its own. Demos are data: a `DemoPlan` in
`PLANS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from subprocess import CalledProcessError, Popen, TimeoutExpired
from typing import IO, Annotated, Any

import tyro
from rich.markup import escape

from piston.cli.command import Command, named
from piston.cli.console import console, fail, table
from piston.files import read_json_lines
from piston.signals import exit_on_sigterm
from piston.stages import LARGEST_PROCESS, Stages, read_stages
from piston.suggestions import did_you_mean

# Its presence says that a folder is a demo's own, whose contents the next one may delete.
STATE = "piston-demo.json"
# What the server of the demo logs.
LOG = "serve.log"
_CONTENTS = (
    *("data", "assets", "checkpoints", "eval", "cache"),
    *("report.html", "animation.webp", LOG),
)
# Episodes whose last requests the report shows.
_NUM_FAILURES = 3
_SECONDS_TO_START, _SECONDS_TO_STOP = 120.0, 60.0
_QUICK_TRAINING = (
    *("--num-train-steps", "40", "--log-interval", "5", "--ema-decay", "0.8"),
    *("--batch-size", "8", "--noise-draws", "4"),
    *("--lr-schedule.warmup-steps", "5", "--lr-schedule.decay-steps", "40"),
)
_QUICK_NOTE = (
    "--quick shows that every stage works. No success is to be expected: 3 episodes and 40 steps "
    "are too few to learn the task."
)


@dataclasses.dataclass(frozen=True)
class DemoPlan:
    task: str
    preset: str
    # Demonstrations.
    episodes: int
    # Arguments of `piston eval`. Results go to a folder of the name.
    trials: Mapping[str, tuple[str, ...]]
    # Overrides of the preset, as on the command line.
    training: tuple[str, ...] = ()

    def quick(self) -> DemoPlan:
        """Return the short form: too little to learn from, enough to pass through every stage."""
        return dataclasses.replace(
            self,
            episodes=3,
            trials={name: (*words, "--episodes", "4") for name, words in self.trials.items()},
            training=(*self.training, *_QUICK_TRAINING),
        )


# Of metaworld:tiny, the two pairs in the same start scene.
_OPPOSITE = (
    "metaworld:drawer-open-halfway,drawer-close-halfway,window-open-halfway,window-close-halfway"
)
PLANS = {
    "aloha": DemoPlan(
        "aloha_transfer_cube",
        "tiny_aloha_sim",
        episodes=150,
        # After half a chunk the closing fingers hide the cube from the camera: a bad moment to
        # predict again.
        trials={"asked": ("aloha_transfer_cube", "--seeds", "0..49", "--execute-horizon", "96")},
    ),
    "metaworld": DemoPlan(
        "metaworld:tiny",
        "tiny_metaworld",
        episodes=300,
        trials={
            "asked": ("metaworld:tiny", "--seeds", "0..124", "--execute-horizon", "4"),
            "opposite": (_OPPOSITE, "--opposite", "--seeds", "0..39", "--execute-horizon", "4"),
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class DemoArguments:
    """Record demonstrations, train a small policy, serve it, evaluate it, and report."""

    # Which demo: aloha or metaworld.
    name: Annotated[str, tyro.conf.Positional, named("[NAME]")] = "aloha"
    # Few episodes and steps, in under 90 seconds: to see that every stage works. No success is to
    # be expected.
    quick: bool = False
    # The folder for everything; what an earlier demo left there is deleted.
    out: Path | None = None
    # Seed of the training.
    seed: int = 0
    # Go on after the last stage that was finished.
    resume: bool = False


def demo(arguments: DemoArguments) -> int:
    name = arguments.name
    if name not in PLANS:
        hint = did_you_mean(name, PLANS)
        raise ValueError(f"No demo is named {name!r}.{hint} There are: {', '.join(PLANS)}.")
    plan = PLANS[name].quick() if arguments.quick else PLANS[name]
    folder = "runs/demo" if name == "aloha" else f"runs/demo-{name}"
    out = (arguments.out or Path(folder)).absolute()
    description = {"demo": name, "seed": arguments.seed, **dataclasses.asdict(plan)}
    job = begin(out, description, resume=arguments.resume)
    stages, screen = job.stages, console()
    if arguments.quick:
        screen.print(_QUICK_NOTE)
    try:
        try:
            with exit_on_sigterm():
                run_stages(job, plan, arguments.seed)
        finally:
            done = [(stage["name"], stage["seconds"], stage["result"]) for stage in stages.finished]
            done += [(stage, spent, "not finished") for stage, spent in stages.unfinished.items()]
            done.append(("all", sum(seconds for _, seconds, _ in done), ""))
            rows = [(stage, f"{seconds:.1f}", result) for stage, seconds, result in done]
            columns = ("stage", "seconds", "result")
            screen.print(table(columns, rows, title=f"piston demo {name}", right=("seconds",)))
    except CalledProcessError as failure:  # the command has printed its error itself
        # A process that a signal ended has its negative number; shells report it like this.
        code = failure.returncode if failure.returncode > 0 else 128 - failure.returncode
        message = f"The stage {failure.cmd!r} failed with exit code {code}."
        return fail(f"{message} Finished stages are kept: --resume goes on.", code)
    except KeyboardInterrupt:
        print(
            "Stopped. Finished stages are kept: the same command with --resume goes on, without "
            "it everything is deleted and begins again.",
            file=sys.stderr,
        )
        return 130
    from piston.sim.scores import read_evaluation  # not for --help, which must be quick

    for trial in plan.trials:
        evaluation = read_evaluation(out / "eval" / trial)
        asked = "the opposite sentence" if evaluation.opposite else "success"
        screen.print(
            f"{evaluation.task}, {asked}: [bold]{evaluation.success}[/bold] (95 % interval)"
        )
    if arguments.quick:
        screen.print(_QUICK_NOTE)
    gigabytes = stages.peak_memory_bytes / 1e9
    screen.print(f"peak memory of {stages.peak_memory_of}: {gigabytes:.2f} GB")
    screen.print(f"see {os.path.relpath(out / 'report.html')}", soft_wrap=True, highlight=False)
    return 0


run_demo = Command("demo", DemoArguments, demo)


def run_stages(job: Job, plan: DemoPlan, seed: int) -> None:
    from piston.data import Metadata
    from piston.sim.scores import read_evaluation

    out = job.out
    data, run, page = out / "data", out / "checkpoints" / plan.preset / "demo", out / "report.html"
    evaluations = {name: out / "eval" / name for name in plan.trials}

    def recorded() -> str:
        metadata = Metadata.read(data)
        return f"{len(metadata.episodes)} episodes, {metadata.total_frames:,} frames"

    def trained() -> str:
        lines = read_json_lines(run / "metrics.jsonl")
        last = [row for _, row in lines if row and "loss" in row][-1]
        return f"{last['step'] + 1:,} steps, loss {last['loss']:.4f}"

    config = (
        *(plan.preset, "--exp-name", "demo", *plan.training),
        *("--data.repo-id", data, "--data.assets.asset-id", job.stages.job["demo"]),
        *("--assets-base-dir", out / "assets", "--checkpoint-base-dir", out / "checkpoints"),
    )
    recording = (plan.task, "--episodes", plan.episodes, "--out", data, "--workers", 2)
    job.do("record", recording, recorded)
    job.do("stats", config, lambda: "norm_stats.json")
    job.do("train", (*config, "--seed", seed, "--resume"), trained)
    names = {f"eval {name}" if len(evaluations) > 1 else "eval": name for name in evaluations}
    with contextlib.ExitStack() as stack:
        uri = ""
        if any(job.stages.get(stage) is None for stage in names):
            newest = max(int(path.name) for path in run.glob("*") if path.name.isdecimal())
            uri = stack.enter_context(job.serve(run / str(newest)))
        for stage, name in names.items():
            folder = evaluations[name]
            words = (*plan.trials[name], "--video", "--policy", uri, "--out", folder)
            if "--opposite" not in words:
                words = (*words, "--inspect-failures", _NUM_FAILURES)
            job.do(stage, words, lambda: str(read_evaluation(folder).success))  # noqa: B023
    report = (
        *(run, "--eval", *evaluations.values(), "--stages", out / STATE, "--out", page),
        *("--animation", out / "animation.webp"),
    )
    job.do("report", report, lambda: f"{page.stat().st_size / 1e6:.1f} MB", again=True)


def begin(out: Path, job: Mapping[str, Any], *, resume: bool) -> Job:
    """Return the job in a cleared folder, or with `resume` in the one where it was stopped."""
    job = json.loads(json.dumps(job))  # as it is read back: JSON has no tuples
    state = out / STATE
    if state.is_file():
        stages = read_stages(state)
        if resume:
            other = [
                f"{key} ({old} there, {new} now)" if isinstance(new, int | str) else key
                for key, new in job.items()
                if (old := stages.job.get(key)) != new
            ]
            if not other:
                return Job(out, stages)
            raise ValueError(
                f"{out} holds another demo. It differs in {', '.join(other)}. Leave out --resume "
                "to delete it and begin again, or give another --out."
            )
    elif out.exists() and any(out.iterdir()):
        raise FileExistsError(
            f"{out} was not made by `piston demo` (it holds no {STATE}), so nothing in it is "
            "deleted. Give another --out."
        )
    for path in (out / name for name in _CONTENTS):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    Stages(job).write(state)
    return Job(out, Stages(job))


@dataclasses.dataclass
class Job:
    """Runs stages one after another. `stages` and its file hold what is finished."""

    out: Path
    stages: Stages

    def do(
        self, stage: str, words: Iterable[Any], result: Callable[[], str], *, again: bool = False
    ) -> None:
        """Run `piston VERB words…`, where the verb is the stage's first word; once, or `again`."""
        if self.stages.get(stage) is not None and not again:
            return
        with self._run(stage, words) as (process, finish):
            if process.wait():
                raise CalledProcessError(process.returncode, stage)
            finish(result())

    @contextlib.contextmanager
    def serve(self, checkpoint: Path) -> Iterator[str]:
        """Run a server in the background; yield its address once it is ready."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        deadline = time.monotonic() + _SECONDS_TO_START
        # Its lines would break the progress bar of the evaluation, which is another process.
        log = self.out / LOG
        with (
            log.open("wb") as file,
            self._run("serve", (checkpoint, "--port", port), file) as (process, finish),
        ):
            while not _is_healthy(port):
                if process.poll() is not None:
                    sys.stderr.write(log.read_text("utf-8", "replace"))
                    raise CalledProcessError(process.returncode or 1, "serve")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"No server within {_SECONDS_TO_START:.0f} s.")
                time.sleep(0.1)
            finish(f"ready at ws://127.0.0.1:{port}")
            yield f"ws://127.0.0.1:{port}"

    @contextlib.contextmanager
    def _run(
        self, stage: str, words: Iterable[Any], log: IO[bytes] | None = None
    ) -> Iterator[tuple[Popen[bytes], Callable[[str], None]]]:
        """Start a command; yield its process and the function that takes the stage's result.

        Its messages go to the terminal or to the file `log`.
        When the block is left, the process is ended and the stage is saved.
        """
        command = [stage.split()[0], *map(str, words)]
        screen = console()
        screen.rule(f"[bold]{stage}[/bold]", align="left")
        shown = escape(f"piston {shlex.join(command)}")
        screen.print(f"[dim]$ {shown}[/dim]", soft_wrap=True, highlight=False)
        if log is not None:
            screen.print(f"[dim]its log: {escape(os.path.relpath(log.name))}[/dim]", soft_wrap=True)
        # Decoded frames too stay in the demo's folder, to be deleted with it.
        environment = {**os.environ, "PISTON_HOME": str(self.out / "cache")}
        words = [sys.executable, "-P", "-m", "piston.cli", *command]
        process = Popen(words, env=environment, stderr=log)
        began, before = time.monotonic(), self.stages.get(stage)
        try:
            yield process, lambda result: self.stages.add(stage, time.monotonic() - began, result)
        finally:
            # The terminal sends Ctrl-C to the process too, which finishes what it is writing.
            if not isinstance(sys.exception(), KeyboardInterrupt):
                process.terminate()
            try:
                process.wait(_SECONDS_TO_STOP)
            except TimeoutExpired:
                process.kill()
                process.wait()
            if self.stages.get(stage) is before:
                self.stages.add(stage, time.monotonic() - began, None)
            peak = _peak_memory_of_children()
            if peak > self.stages.peak_memory_bytes:
                self.stages.peak_memory_bytes, self.stages.peak_memory_of = peak, LARGEST_PROCESS
            self.stages.write(self.out / STATE)


def _peak_memory_of_children() -> int:
    """Return the bytes of the largest process that has ended; 0 on Windows, which does not say."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    return False
