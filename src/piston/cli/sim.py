"""`piston record TASK` and `piston eval TASK`: simulated robots, shown by experts or by a policy.

`piston record` ends with 130 or 143 when Ctrl-C or SIGTERM stopped it; what is recorded by then is
a data set. Simulators and data sets are imported where they are used: --help does without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from piston.cli.command import Command, named
from piston.cli.console import console, table
from piston.files import json_line
from piston.progress import ProgressBar
from piston.signals import exit_on_sigterm

if TYPE_CHECKING:
    from piston.sim.scores import Evaluation, Outcome


def _record(
    task: Annotated[str, tyro.conf.Positional, named("TASK")],
    /,
    episodes: int,
    out: Path,
    workers: int = 2,
    seed: int = 0,
    pixels: int | None = None,
    codec: Literal["h264", "av1"] = "h264",
) -> None:
    """Record scripted demonstrations as a LeRobot data set.

    After a stop, the same command continues.

    Args:
        task: For example aloha_transfer_cube, aloha_insertion, metaworld:tiny, metaworld:door-open.
        episodes: Record until the data set has this many. Only successful episodes are kept.
        out: The data set's folder.
        workers: Processes that simulate. The result does not depend on it.
        seed: Another seed gives other initial states; evaluation never uses any of them.
        pixels: Side of the camera images; by default the environment's own.
        codec: h264 is quick to write, av1 is smaller.
    """
    from piston.data.format import INFO, read_info
    from piston.sim.recording import Recording, record

    began = time.monotonic()
    there = read_info(out)["total_episodes"] if (out / INFO).exists() else 0
    recording = Recording(task, seed, pixels)
    bar = ProgressBar(f"recording {task}", "episodes", episodes, done=there, after=0)
    with exit_on_sigterm(), bar:
        recorded, tried = record(
            recording, episodes, out, workers=workers, codec=codec, progress=bar.show
        )
    console().print(
        f"{out} holds {recorded} episode{'s' * (recorded != 1)} of {task}: "
        f"{tried} {'try' if tried == 1 else 'tries'}, {time.monotonic() - began:.1f} s."
    )


@dataclasses.dataclass(frozen=True)
class EvalArguments:
    """Let a policy drive a simulated robot on fixed seeds and count successes."""

    # The environment, such as aloha_transfer_cube or metaworld:tiny.
    task: Annotated[str, tyro.conf.Positional, named("TASK")]
    # A checkpoint's folder, or the address of a server (ws://127.0.0.1:8000).
    policy: str
    # Which robot of the policy this is, if it was trained with several.
    robot: str | None = None
    # How long a checkpoint's policy that writes its subtask keeps it: chunks (4) or seconds (2.5s).
    subtask_interval: str = "1"
    # Seeds of the initial states, one episode each: a range 0..49 or a list 3,7,9. By default as
    # many as --episodes, or 0..49.
    seeds: str | None = None
    # Use only the first seeds, this many.
    episodes: int | None = None
    # Denoising steps of a checkpoint's policy; by default as many as it was made for.
    num_steps: int | None = None
    # Chunks that a checkpoint's policy computes for each request; the best is executed.
    candidates: int = 1
    # Steps of a chunk that are executed before the next is requested; by default half of them.
    execute_horizon: int | None = None
    # Control steps that pass between a request and its answer.
    delay: int = 0
    # As many control steps pass as the policy really takes; one environment at a time.
    real_time: bool = False
    # What the robot does meanwhile: wait, go on with its chunk (async), or go on with real-time
    # chunking, which the policy was trained for (trained) or is guided to (guided).
    execution: Literal["wait", "async", "guided", "trained"] = "wait"
    # Environments that run side by side; their requests form one batch.
    num_environments: int = 8
    # The side of the camera images; by default the environment's own.
    pixels: int | None = None
    # Use the prompt that asks for the opposite of the task that is scored.
    opposite: bool = False
    # Write videos of the first failures and successes.
    video: bool = False
    # Write what the policy saw before the first failures, this many, as a data set: failures/ in
    # --out, for `piston report` and `piston inspect`.
    inspect_failures: int = 0
    # Where results go.
    out: Path = Path("runs/eval")


# Options of the policy of a checkpoint.
_OF_POLICY = ("subtask_interval", "num_steps", "candidates")


def _eval(arguments: EvalArguments) -> None:
    from piston.sim.rollouts import VideoWriter, evaluate, infer_with_server
    from piston.sim.scores import FAILURES

    seeds = _seeds(arguments.seeds, arguments.episodes)
    if arguments.inspect_failures and arguments.opposite:
        raise ValueError(
            "--inspect-failures is for the task that was asked for; with --opposite, not doing "
            "what is scored is right. Leave out one of them."
        )
    if arguments.delay < 0 or (arguments.delay and arguments.real_time):
        raise ValueError(
            f"--delay is {arguments.delay}; expected 0 or more, and none with --real-time."
        )
    num_environments = arguments.num_environments
    if arguments.real_time:
        if num_environments not in (1, EvalArguments.num_environments):
            raise ValueError("--real-time runs one environment at a time: --num-environments 1.")
        num_environments = 1
    out = arguments.out
    writer = VideoWriter(out / "videos")
    # The episodes that have ended, for the case that the evaluation breaks. What an earlier one
    # has left there stays until this one has an episode of its own.
    kept, num_ended, num_successes = out / "outcomes.jsonl", 0, 0

    def on_outcome(outcome: Outcome) -> None:
        nonlocal num_ended, num_successes
        with kept.open("a" if num_ended else "w", encoding="utf-8") as file:
            file.write(json_line(dataclasses.asdict(outcome)))
        num_ended += 1
        num_successes += outcome.success
        bar.advance(1, f"{num_successes} succeeded")

    with contextlib.ExitStack() as stack:
        if arguments.policy.startswith(("ws://", "wss://")):
            for name in _OF_POLICY:
                if getattr(arguments, name) != getattr(EvalArguments, name):
                    flag = name.replace("_", "-")
                    raise ValueError(
                        f"--{flag} is for a checkpoint; a server has its own. Give it to `piston "
                        "serve`."
                    )
            connections = min(num_environments, len(seeds))
            server = infer_with_server(arguments.policy, connections, arguments.robot)
            infer, policy_name, metadata = stack.enter_context(server)
        else:
            from piston.inference import load_policy  # imports torch

            policy_name = arguments.policy
            options = {name: getattr(arguments, name) for name in _OF_POLICY}
            policy = load_policy(policy_name, robot=arguments.robot, **options)
            infer, metadata = policy.infer_batch, policy.metadata
        out.mkdir(parents=True, exist_ok=True)
        failures = None
        if arguments.inspect_failures:
            from piston.sim.failures import recording_failures  # imports torch

            recording = recording_failures(out / FAILURES, arguments.inspect_failures)
            failures = stack.enter_context(recording)
        bar = stack.enter_context(ProgressBar(arguments.task, "episodes", len(seeds), after=0))
        try:
            evaluation = evaluate(
                arguments.task,
                infer,
                seeds,
                execute_horizon=arguments.execute_horizon,
                policy_name=policy_name,
                metadata=metadata,
                num_environments=num_environments,
                execution=arguments.execution,
                delay=None if arguments.real_time else arguments.delay,
                pixels=arguments.pixels,
                opposite=arguments.opposite,
                videos=writer if arguments.video else None,
                failures=failures,
                on_outcome=on_outcome,
            )
            for kind in ("success", "failure"):  # of an earlier one, whose results are replaced
                for path in (out / "videos").glob(f"{kind}_seed*.mp4"):
                    if path not in writer.written:
                        path.unlink()
            evaluation = dataclasses.replace(
                evaluation,
                videos=tuple(writer.written),
                failures=out / FAILURES if failures and failures.num_written else None,
            )
            evaluation.write(out)
        except BaseException as error:
            if num_ended:
                error.add_note(f"The {num_ended} episodes that had ended are in {kept}.")
            raise
    kept.unlink(missing_ok=True)
    _show(evaluation, out)


def _seeds(text: str | None, count: int | None) -> Sequence[int]:
    """Parse `0..49` (0 to 49) or a list such as `3,7,9`, and take the first `count`."""
    if count is not None and count < 1:
        raise ValueError(f"--episodes is {count}; expected at least 1.")
    if text is None:
        return range(50 if count is None else count)
    try:
        first, dots, last = text.partition("..")
        seeds = range(int(first), int(last) + 1) if dots else [int(one) for one in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"Seeds are {text!r}; expected a range such as 0..49 or a list 3,7,9.")
    if count is not None and count > len(seeds):
        raise ValueError(f"--episodes is {count}, but --seeds names only {len(seeds)}.")
    return seeds[:count]


def _show(evaluation: Evaluation, out: Path) -> None:
    from piston.sim.scores import RESULTS, Rate

    sentence = ", prompt asks for the opposite" if evaluation.opposite else ""
    screen = console()
    screen.print(f"{evaluation.task}, {evaluation.policy}{sentence}", soft_wrap=True, markup=False)
    rows = [("succeeded", str(evaluation.success)), ("held to the end", str(evaluation.held))]
    groups = evaluation.by_prompt
    if len(groups) > 1:
        rows += [(f"  {prompt}", str(Rate.of(outcomes))) for prompt, outcomes in groups.items()]
    successes = "result (of rates: 95 % interval)"
    if evaluation.control_hz is not None and evaluation.success.successes:
        seconds = evaluation.mean_of("success_step") / evaluation.control_hz
        rows.append(("mean time to success", f"{seconds:.2f} s"))
    if not math.isnan(jump := evaluation.mean_of("seam_jump")):
        within = evaluation.mean_of("inner_jump")
        rows.append(("jump onto a new chunk", f"{jump:.4f} ({within:.4f} within chunks)"))
    if waited := evaluation.mean_of("waited"):
        rows.append(("steps that it waited", f"{waited:.1f}"))
    screen.print(table(("", successes), rows, right=(successes,)))
    failed = [str(outcome.seed) for outcome in evaluation.outcomes if not outcome.success]
    screen.print(f"failed seeds: {', '.join(failed) or 'none'}")
    if evaluation.failures is not None:
        advice = f"piston inspect CHECKPOINT --data {shlex.quote(str(evaluation.failures))}"
        screen.print(f"what was seen before failures: {advice}", soft_wrap=True)
    times = "  ".join(f"{p[1:]} % {ms:.0f} ms" for p, ms in evaluation.latency_ms.items())
    screen.print(f"time per request: {times}")
    screen.print(f"every episode with its seed and initial state: {out / RESULTS}")


run_record = Command("record", _record)
run_eval = Command("eval", EvalArguments, _eval)
