"""`piston client ping HOST`: what a policy server expects, and how long it takes to answer."""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from piston.cli.command import Command, named
from piston.cli.console import console, fail, table
from piston_client import Client, Percentiles, ServerError
from piston_client.examples import example_observation, leaves

if TYPE_CHECKING:
    from rich.table import Table

    from piston.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Ping:
    """Show what a policy server expects and returns, and how long it takes to answer.

    It is asked many times with a random observation.
    """

    # Name, address, or a whole ws:// or wss:// location.
    host: Annotated[str, tyro.conf.Positional, named("[HOST]")] = "127.0.0.1"
    # The server's; 8000 where the host names none.
    port: int | None = None
    # Send observations of this preset's robot, for servers that do not say what they expect.
    preset: str | None = None
    # Which robot asks, if the policy drives several. By default the server's own choice or the
    # first one, and what all of them send is shown.
    robot: str | None = None
    # Requests to measure.
    count: int = 100
    # Requests before them that are not measured.
    warm_up: int = 3
    # Seconds to wait for a reply.
    timeout: float = 30.0
    # Seconds to wait for the server to come up.
    connect_timeout: float = 10.0
    # The key that the server expects, if any; by default the environment's PISTON_API_KEY. Other
    # users of this machine can see options: prefer the variable or --api-key-file.
    api_key: str | None = None
    # A file that contains the key.
    api_key_file: Path | None = None
    # The certificate of the authority that signed the server's, for wss://.
    ca_file: Path | None = None


def ping(settings: Ping) -> int:
    try:
        return _measure(settings)
    except ServerError as error:
        kind = f"an observation of {settings.preset}" if settings.preset else "its own example"
        return fail(f"The server refused {kind}: {error}")


run_client = Command("client", {"ping": Ping}, ping)


def _measure(settings: Ping) -> int:
    if settings.count < 1:
        raise ValueError(f"--count is {settings.count}; expected at least 1.")
    from piston import presets  # not for --help, which must be quick

    observation = None
    if settings.preset:
        observation = example_of(presets.get(settings.preset), settings.robot)
    client = Client(
        settings.host,
        settings.port,
        api_key=settings.api_key,
        api_key_file=settings.api_key_file,
        timeout=settings.timeout,
        connect_timeout=settings.connect_timeout,
        ca_file=settings.ca_file,
        robot=settings.robot,
    )
    with client:
        try:
            asked = client.metadata
        except ServerError as error:  # no such robot: nothing has been asked yet
            return fail(str(error))
        about = asked.get("piston")
        kind = f"Piston {about['version']}" if isinstance(about, Mapping) else "openpi's protocol"
        screen = console()
        robots = {settings.robot: asked}
        if settings.robot is None and asked.get("robots"):
            robots = asked["robots"]
        # Without a robot that the server takes for granted, the first one asks.
        asking = settings.robot if "observation" in asked else next(iter(robots))
        of = f" of {settings.preset or asking}" if settings.preset or asking else ""
        screen.print(f"{client.uri} ({kind}), {settings.count} observations{of}")
        for name, metadata in robots.items():
            if "observation" in metadata:
                screen.print(observation_table(metadata, name))
        if observation is None:
            if "observation" not in robots.get(asking, asked):
                raise ValueError(
                    f"{client.uri} does not say which observation it expects. Name a preset with "
                    "the robot that it serves: --preset pi0_aloha"
                )
            observation = example_observation(robots.get(asking, asked))
        observation |= {} if asking is None else {"robot": asking}
        for _ in range(settings.warm_up):
            client.infer(observation)
        totals, inferences = [], []  # seconds; a server may report the latter
        for _ in range(settings.count):
            begin = time.perf_counter()
            reply = client.infer(observation)
            totals.append(time.perf_counter() - begin)
            timing = reply.get("server_timing")
            if isinstance(timing, Mapping) and "infer_ms" in timing:
                inferences.append(timing["infer_ms"] / 1e3)
    if "subtask" in reply:
        screen.print(f"subtask of the last reply: {reply['subtask']!r}", markup=False)
    kinds = {"round trip": totals}
    if len(inferences) == len(totals):
        kinds["inference, by the server's clock"] = inferences
        kinds["everything else"] = list(map(operator.sub, totals, inferences))
    rows = [[name, *(f"{value:.2f}" for value in Percentiles.of(kinds[name]))] for name in kinds]
    screen.print(table(("milliseconds", "median", "90 %", "99 %", "worst"), rows))
    return 0


def observation_table(metadata: Mapping[str, Any], robot: str | None = None) -> Table:
    """Return a table of what a policy expects and returns, in 80 columns or more.

    `robot` is its name in a policy that drives several.
    """
    rows = []
    for path, entry in leaves(metadata["observation"]):
        shape = ["any" if size is None else size for size in entry.get("shape", ())]
        about = "" if entry["required"] else "optional"
        rows.append([" → ".join(path), _type(entry["dtype"], shape), about or _names(entry)])
    actions = metadata.get("actions")
    if isinstance(actions, Mapping):
        rows.append(
            ["returns: actions", _type(actions["dtype"], actions["shape"]), _names(actions)]
        )
    if metadata.get("subtasks"):
        rows.append(["returns: subtask", "str", "written before the actions, or as it is given"])
    hz = metadata.get("control_hz")
    rate = f", {hz:g} steps per second" if isinstance(hz, int | float) else ""
    title = f"Observations of {robot or metadata.get('robot', 'the robot')}{rate}"
    made = table(("key", "type", ""), rows, title=title)
    # The names of dimensions are wrapped first, keys only if they are very long.
    made.columns[0].min_width = min(40, max(len(key) for key, *_ in rows))
    made.columns[1].no_wrap = True
    return made


def _type(dtype: str, shape: Sequence[int | str]) -> str:
    return f"{dtype} ({', '.join(map(str, shape))})" if shape else dtype


def _names(entry: Mapping[str, Any]) -> str:
    return ", ".join(entry.get("names", ()))


def example_of(preset: TrainConfig, robot: str | None = None) -> dict[str, Any]:
    """A random observation in the keys of the preset's robot, or of one of several."""
    if robot is not None and "" not in preset.data.entries:
        preset = preset.for_robot(robot)
    metadata = preset.data_config().robot_metadata
    if not metadata:
        raise ValueError(
            f"{preset.name} has no robot with an example observation. Choose a preset with a "
            "robot, such as pi0_aloha_sim."
        )
    return example_observation(metadata)
