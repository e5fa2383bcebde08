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
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape

from piston.cli.console import console, fail, table
from piston.data import Metadata
from piston.files import read_json_lines
from piston.report.timings import LARGEST, TOGETHER, Stages, read_stages
from piston.signals import exit_on_sigterm
from piston.sim.scores import read_evaluation
from piston.suggestions import did_you_mean

# Its presence says that a folder is a demo's own, whose contents the next one may delete.
STATE = "piston-demo.json"
_CONTENTS = ("data", "assets", "checkpoints", "eval", "cache", "report.html", "animation.webp")
_SECONDS_TO_START, _SECONDS_TO_STOP = 120.0, 60.0
# Reading the memory of a process of one gigabyte takes some 15 ms.
_SECONDS_BETWEEN_SAMPLES = 1.0
_PROC = Path("/proc")
# Fields of a plan that do not change what a demo does.
_NOT_WORK = ("folder", "quick_episodes")
_QUICK_TRAINING = (
    *("--num-train-steps", "40", "--log-interval", "5", "--ema-decay", "0.8"),
    *("--batch-size", "8", "--noise-draws", "4"),
    *("--lr-schedule.warmup-steps", "5", "--lr-schedule.decay-steps", "40"),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One evaluation of the served policy. Its results go to a folder of its name."""

    name: str
    seeds: str
    # None: the task that was recorded.
    task: str | None = None
    # With the sentence that asks for the opposite of what is counted.
    opposite: bool = False


@dataclasses.dataclass(frozen=True)
class DemoPlan:
    task: str
    preset: str
    # Demonstrations.
    episodes: int
    trials: tuple[Trial, ...]
    # Steps of a chunk that are executed before the next is asked for.
    execute_horizon: int
    # Overrides of the preset, as on the command line.
    training: tuple[str, ...] = ()
    # Where everything goes by default.
    folder: str = "runs/demo"
    quick_episodes: int = 4

    def quick(self) -> DemoPlan:
        """Return the short form: too little to learn from, enough to pass through every stage."""
        return dataclasses.replace(
            self,
            episodes=self.quick_episodes,
            trials=tuple(dataclasses.replace(trial, seeds="0..3") for trial in self.trials),
            training=(*self.training, *_QUICK_TRAINING),
        )

    def stage(self, trial: Trial) -> str:
        return f"eval {trial.name}" if len(self.trials) > 1 else "eval"


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
        # After half a chunk the closing fingers hide the cube from the camera: a bad moment to
        # predict again.
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
    name = arguments.name
    if name not in PLANS:
        hint = did_you_mean(name, PLANS)
        raise ValueError(f"No demo is named {name!r}.{hint} There are: {', '.join(PLANS)}.")
    plan = PLANS[name].quick() if arguments.quick else PLANS[name]
    work = {k: v for k, v in dataclasses.asdict(plan).items() if k not in _NOT_WORK}
    # As it is read back: JSON has no tuples.
    description = json.loads(json.dumps({"demo": name, "seed": arguments.seed, **work}))
    out = (arguments.out or Path(plan.folder)).absolute()
    job = begin(out, description, resume=arguments.resume)
    try:
        with exit_on_sigterm():
            run_stages(job, plan, arguments.seed)
    except StageFailed as failure:
        job.show()
        return fail(f"{failure} Finished stages are kept: --resume goes on.", failure.code)
    except KeyboardInterrupt:
        job.show()
        print(
            "Stopped. Finished stages are kept: the same command with --resume goes on, without "
            "it everything is deleted and begins again.",
            file=sys.stderr,
        )
        return 130
    job.show()
    screen = console()
    for trial in plan.trials:
        evaluation = read_evaluation(out / "eval" / trial.name)
        asked = "the opposite sentence" if trial.opposite else "success"
        screen.print(
            f"{evaluation.task}, {asked}: [bold]{evaluation.success}[/bold] (95 % interval)"
        )
    gigabytes = job.stages.peak_memory_bytes / 1e9
    screen.print(f"peak memory of {job.stages.peak_memory_of}: {gigabytes:.2f} GB")
    screen.print(f"see {os.path.relpath(out / 'report.html')}", soft_wrap=True, highlight=False)
    return 0


def run_stages(job: Job, plan: DemoPlan, seed: int) -> None:
    data, run = job.out / "data", job.out / "checkpoints" / plan.preset / "demo"
    evaluations = {trial: job.out / "eval" / trial.name for trial in plan.trials}
    page = job.out / "report.html"

    def recorded() -> str:
        metadata = Metadata.read(data)
        return f"{len(metadata.episodes)} episodes, {metadata.total_frames:,} frames"

    def trained() -> str:
        lines = read_json_lines(run / "metrics.jsonl")
        last = [row for _, row in lines if row and "loss" in row][-1]
        return f"{last['step'] + 1:,} steps, loss {last['loss']:.4f}"

    recording = (plan.task, "--episodes", plan.episodes, "--out", data, "--workers", 2)
    config = (
        *(plan.preset, "--exp-name", "demo", *plan.training),
        *("--data.repo-id", data, "--data.assets.asset-id", job.stages.job["demo"]),
        *("--assets-base-dir", job.out / "assets"),
        *("--checkpoint-base-dir", job.out / "checkpoints"),
    )
    job.do("record", recording, recorded)
    job.do("stats", config, lambda: "norm_stats.json")
    job.do("train", (*config, "--seed", seed, "--resume"), trained)
    trials = [trial for trial in plan.trials if not job.is_finished(plan.stage(trial))]
    with contextlib.ExitStack() as stack:
        if trials:
            newest = max(int(path.name) for path in run.glob("*") if path.name.isdecimal())
            uri = stack.enter_context(job.serve(run / str(newest)))
        for trial in trials:
            words = (
                *(trial.task or plan.task, "--policy", uri, "--seeds", trial.seeds, "--video"),
                *("--execute-horizon", plan.execute_horizon, "--out", evaluations[trial]),
                *(("--opposite",) if trial.opposite else ()),
            )
            job.do(plan.stage(trial), words, partial(_success_rate, evaluations[trial]))
    report = (
        *(run, "--eval", *evaluations.values(), "--stages", job.state_file, "--out", page),
        *("--animation", job.out / "animation.webp"),
    )
    job.do("report", report, lambda: f"{page.stat().st_size / 1e6:.1f} MB", again=True)


def _success_rate(evaluation: Path) -> str:
    return str(read_evaluation(evaluation).success)


def begin(out: Path, job: Mapping[str, Any], *, resume: bool) -> Job:
    """Return the job in a cleared folder, or with `resume` in the one where it was stopped."""
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


class StageFailed(RuntimeError):
    """A command ended with an error, which it has printed itself."""

    def __init__(self, stage: str, code: int) -> None:
        # A process that a signal ended has its negative number; shells report it like this.
        self.code = 128 - code if code < 0 else code
        super().__init__(f"The stage {stage!r} failed with exit code {self.code}.")


class Job:
    """Runs stages one after another. `stages` and its file hold what is finished."""

    def __init__(self, out: Path, stages: Stages) -> None:
        self.out, self.stages, self.state_file = out, stages, out / STATE

    def is_finished(self, stage: str) -> bool:
        return self.stages.get(stage) is not None

    def do(
        self, stage: str, words: Iterable[Any], result: Callable[[], str], *, again: bool = False
    ) -> None:
        """Run `piston VERB words…`, where the verb is the stage's first word; once, or `again`."""
        if self.is_finished(stage) and not again:
            return
        with self._measured(stage) as results, self._process(stage, words) as process:
            while process.poll() is None:
                self._sample_memory()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS_BETWEEN_SAMPLES)
            if process.returncode:
                raise StageFailed(stage, process.returncode)
            results.append(result())

    @contextlib.contextmanager
    def serve(self, checkpoint: Path) -> Iterator[str]:
        """Run a server in the background; yield its address once it is ready."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with self._process("serve", (checkpoint, "--port", port)) as process:
            with self._measured("serve") as results:
                deadline = time.monotonic() + _SECONDS_TO_START
                while not _is_healthy(port):
                    self._sample_memory()
                    if process.poll() is not None:
                        raise StageFailed("serve", process.returncode or 1)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"No server within {_SECONDS_TO_START:.0f} s.")
                    time.sleep(0.1)
                results.append(f"ready at ws://127.0.0.1:{port}")
            yield f"ws://127.0.0.1:{port}"

    @contextlib.contextmanager
    def _process(self, stage: str, words: Iterable[Any]) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command; end it when the block is left."""
        command = [stage.split()[0], *map(str, words)]
        screen = console()
        screen.rule(f"[bold]{stage}[/bold]", align="left")
        shown = escape(f"piston {shlex.join(command)}")
        screen.print(f"[dim]$ {shown}[/dim]", soft_wrap=True, highlight=False)
        # Decoded frames too stay in the demo's folder, to be deleted with it.
        environment = {**os.environ, "PISTON_HOME": str(self.out / "cache")}
        process = subprocess.Popen([sys.executable, "-m", "piston.cli", *command], env=environment)
        interrupted = False
        try:
            yield process
        except KeyboardInterrupt:
            interrupted = True  # the terminal has told it as well: it finishes what it is writing
            raise
        finally:
            if not interrupted:
                process.terminate()
            try:
                process.wait(_SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @contextlib.contextmanager
    def _measured(self, stage: str) -> Iterator[list[str]]:
        """Save the time of a stage, with the result that the block adds; without, as unfinished."""
        results: list[str] = []
        began = time.monotonic()
        try:
            yield results
        finally:
            self._sample_memory()
            result = results[0] if results else None
            self.stages = self.stages.after(stage, time.monotonic() - began, result)
            self.stages.write(self.state_file)

    def _sample_memory(self) -> None:
        if _PROC.exists():
            found, whose = memory_of_tree(os.getpid()), TOGETHER
        else:  # known of processes that have ended
            unit = 1 if sys.platform == "darwin" else 1024
            found, whose = unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, LARGEST
        peak = max(self.stages.peak_memory_bytes, found)
        self.stages = dataclasses.replace(self.stages, peak_memory_bytes=peak, peak_memory_of=whose)

    def show(self) -> None:
        """Print the stages with their seconds and results."""
        done = [(stage.name, stage.seconds, stage.result) for stage in self.stages.finished]
        done += [(name, spent, "not finished") for name, spent in self.stages.unfinished.items()]
        done.append(("all", sum(seconds for _, seconds, _ in done), ""))
        rows = [(name, f"{seconds:.1f}", result) for name, seconds, result in done]
        title = f"piston demo {self.stages.job['demo']}"
        columns = ("stage", "seconds", "result")
        console().print(table(columns, rows, title=title, right=("seconds",)))


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    return False


def process_tree(root: int) -> list[int]:
    """Return the ids of a process and all below it, on Linux."""
    children: dict[int, list[int]] = {}
    for process in (int(path.name) for path in _PROC.iterdir() if path.name.isdecimal()):
        with contextlib.suppress(OSError):  # it has ended
            # After the name, which may hold anything: state, parent …
            words = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(words[1]), []).append(process)
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def memory_of_tree(root: int) -> int:
    """Return the bytes of a process and all below it; what several share is counted once."""
    total = 0
    for process in process_tree(root):
        folder = _PROC / str(process)
        with contextlib.suppress(OSError):  # it has ended
            try:
                shares = re.findall(r"\nPss: +(\d+) kB", (folder / "smaps_rollup").read_text())
                total += 1024 * sum(map(int, shares))
            except OSError:  # old kernels have no such file
                total += int((folder / "statm").read_text().split()[1]) * resource.getpagesize()
    return total
