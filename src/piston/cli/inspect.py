"""`piston inspect CHECKPOINT --data SET`: how observations influence what a policy does."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from piston.cli.command import Command, named, read_robot_option
from piston.cli.console import console, table
from piston.files import write_text
from piston.progress import ProgressBar

if TYPE_CHECKING:
    from piston.inference.policy import Policy
    from piston.inspection import Frames, Overview

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class InspectArguments:
    """Show why a policy does what it does, by changing its inputs and asking it again.

    Without --html and --json, a page in the browser answers questions.
    """

    # A folder that `piston train` wrote, or any checkpoint (folder or location) with --preset.
    checkpoint: Annotated[str, tyro.conf.Positional, named("CHECKPOINT")]
    # A data set of the robot (folder or owner/name); by default that of the training.
    data: str | None = None
    # What the robot sends now, to be compared with --data: a recording of `piston serve --record`,
    # or another data set.
    live: str | None = None
    # Of the data set, only these episodes: 0:50 or 3,7,9.
    episodes: str | None = None
    # Frames in which every input is changed.
    frames: int = 10
    # Noise that each question is asked with.
    seeds: int = 8
    # Frames with a map of where the policy looks, for each camera. 0 saves their time.
    maps: int = 3
    # Write the overview as one HTML page; nothing is served then.
    html: Path | None = None
    # Write the numbers of the overview; nothing is served then.
    json: Path | None = None
    # Where the page is served; by default for this computer only.
    host: str = "127.0.0.1"
    # By default 8050, or any free one where that is taken.
    port: int | None = None
    # Open the page in a browser.
    browser: bool = True
    # The robot, for checkpoints that do not say it themselves.
    preset: str | None = None
    # One of the robots that the checkpoint was trained with. Or a file that describes the robot, in
    # place of the preset's or for other keys.
    robot: str | None = None
    # What weights are held in; by default as they are stored.
    dtype: Literal["float32", "bfloat16", "int8"] | None = None
    # cpu, cuda, cuda:1 …; by default a GPU where there is one.
    device: str | None = None
    # Denoising steps per chunk; by default as many as the checkpoint was made for.
    num_steps: int | None = None


def inspect(arguments: InspectArguments) -> None:
    _check(arguments)
    from piston.inspection import Frames, Plan, as_json, compute
    from piston.report.inspection import inspection_page

    listener = None
    if arguments.html is None and arguments.json is None:
        # The extra that is missing, or the port that is taken, is told before minutes of work.
        from piston.viewer import listen, run
        from piston.viewer.inspector import make_inspector

        listener = listen(arguments.host, arguments.port)
    policy = _load(arguments)
    frames = _open(policy, arguments)
    live = None
    if arguments.live is not None:
        live = Frames.open(policy, arguments.live, needs_cameras=False)
    plan = Plan(frames=arguments.frames, seeds=arguments.seeds, maps=arguments.maps)
    with ProgressBar("inspecting", "questions", after=0) as bar:
        overview = compute(
            policy, frames, live=live, name=arguments.checkpoint, plan=plan, progress=bar.show
        )
    _show(overview)
    written = []
    if arguments.html is not None:
        write_text(arguments.html, inspection_page(overview))
        written.append(arguments.html)
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(as_json(overview)) + "\n")
        written.append(arguments.json)
    for path in written:
        console().print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", highlight=False)
    if not written:
        title = f"{arguments.checkpoint}, {overview.about['data']}"
        overview_html = inspection_page(overview)
        app = make_inspector(policy, frames, overview_html, title=title, host=arguments.host)
        if not run(app, host=arguments.host, listener=listener, open_browser=arguments.browser):
            # A thread is still inside torch, which would abort an ordinary exit.
            logging.shutdown()
            os._exit(0)


run_inspect = Command("inspect", InspectArguments, inspect)


def _check(arguments: InspectArguments) -> None:
    """Raise ValueError for options that cannot work, before the model is loaded."""
    served = arguments.html is None and arguments.json is None
    where = ("host", "port", "browser")
    given = [one for one in where if getattr(arguments, one) != getattr(InspectArguments, one)]
    if not served and given:
        raise ValueError(
            "--html and --json write files and serve nothing: leave out --host, --port and "
            "--no-browser."
        )
    for name in ("frames", "seeds"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} is {getattr(arguments, name)}; expected at least 1.")
    if arguments.maps < 0:
        raise ValueError(f"--maps is {arguments.maps}; expected 0 or more.")
    if arguments.seeds == 1:
        raise ValueError(
            "--seeds is 1; expected at least 2: effects are compared with what noise changes."
        )
    for path in (arguments.html, arguments.json):
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder; expected the name of a file to write.")


def _load(arguments: InspectArguments) -> Policy:
    from piston.inference.loading import is_exported, load_policy  # imports torch

    if is_exported(arguments.checkpoint):
        raise ValueError(
            f"{arguments.checkpoint} is a compiled file, which cannot be looked into. Inspect the "
            "checkpoint that it was made from."
        )
    names = ("preset", "device", "dtype", "num_steps")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    robot = read_robot_option(arguments.robot)
    return load_policy(arguments.checkpoint, robot=robot, **options)


def _open(policy: Policy, arguments: InspectArguments) -> Frames:
    from piston.inspection import Frames

    data = arguments.data or policy.data.repo_id
    if data is None:
        raise ValueError("The checkpoint names no data set: give one of its robot, --data SET.")
    try:
        frames = Frames.open(policy, data, arguments.episodes)
    except (OSError, KeyError, ValueError) as error:
        if arguments.data is None:
            error.add_note(
                f"The checkpoint was trained on {data}. If it is elsewhere now, or to use another "
                "data set of the robot, give --data SET."
            )
        elif isinstance(error, KeyError):
            error.add_note(_other_robot(policy))
        raise
    try:
        policy.prepare(frames[next(iter(frames.episodes)), 0].observation)
    except (KeyError, ValueError) as error:
        error.add_note(_other_robot(policy))
        raise
    return frames


def _other_robot(policy: Policy) -> str:
    robot = policy.metadata.get("robot", "an unknown robot")
    return f"The policy is for {robot}; --data has to be a data set of that robot."


def _show(overview: Overview) -> None:
    """Print the verdicts."""
    screen = console()
    about = overview.about
    count = len(overview.moments)
    screen.print(f"{about['policy']}, {count} frame{'s' * (count != 1)} of {about['data']}")
    if not overview.verdicts:
        screen.print("Nothing was found that looks wrong.")
        return
    rows = [(one.severity, one.sentence, f"{one.number:.3g}") for one in overview.verdicts]
    columns = ("", "what was found", "number")
    screen.print(table(columns, rows, right=("number",), drop=("number",)))
