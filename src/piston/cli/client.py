"""`piston client ping HOST`: how long a policy server takes to answer, and how much is overhead."""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import tyro

from piston import presets
from piston.cli.console import console, fail, table
from piston.client import Client, Percentiles, ServerError
from piston.config import TrainConfig
from piston.transforms import Data


@dataclasses.dataclass(frozen=True)
class Ping:
    """Ask a policy server many times with a random observation; print round-trip percentiles."""

    # Name, address, or a whole ws:// or wss:// location.
    host: Annotated[str, tyro.conf.Positional] = "127.0.0.1"
    # The server's; 8000 where the host names none.
    port: int | None = None
    # Whose robot's observations to send: what the server was started with.
    preset: str = "pi0_aloha"
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


def run_client(args: list[str]) -> int:
    """Parse the one sub-command, `ping`; without it, show the help."""
    settings: Ping = tyro.extras.subcommand_cli_from_dict(
        {"ping": Ping}, args=args or ["--help"], prog="piston client"
    )
    try:
        return ping(settings)
    except ServerError as error:
        return fail(f"The server refused an observation of {settings.preset}: {error}")


def ping(settings: Ping) -> int:
    if settings.count < 1:
        raise ValueError(f"--count is {settings.count}; expected at least 1.")
    observation = example_of(presets.get(settings.preset))
    client = Client(
        settings.host,
        settings.port,
        api_key=settings.api_key,
        api_key_file=settings.api_key_file,
        timeout=settings.timeout,
        connect_timeout=settings.connect_timeout,
        ca_file=settings.ca_file,
    )
    with client:
        about = client.metadata.get("piston")
        kind = f"Piston {about['version']}" if isinstance(about, Mapping) else "openpi's protocol"
        screen = console()
        screen.print(f"{client.uri} ({kind}), {settings.count} observations of {settings.preset}")
        for _ in range(settings.warm_up):
            client.infer(observation)
        totals, inferences = [], []  # seconds; a server may report the latter
        for _ in range(settings.count):
            begin = time.perf_counter()
            timing = client.infer(observation).get("server_timing")
            totals.append(time.perf_counter() - begin)
            if isinstance(timing, Mapping) and "infer_ms" in timing:
                inferences.append(timing["infer_ms"] / 1e3)
    kinds = {"round trip": totals}
    if len(inferences) == len(totals):
        kinds["inference, by the server's clock"] = inferences
        kinds["everything else"] = list(map(operator.sub, totals, inferences))
    rows = [[name, *(f"{value:.2f}" for value in Percentiles.of(kinds[name]))] for name in kinds]
    screen.print(table(("milliseconds", "median", "90 %", "99 %", "worst"), rows))
    return 0


def example_of(preset: TrainConfig) -> Data:
    """A random observation in the keys of the preset's robot."""
    example = preset.data.example()
    if "images" in example and len(preset.model.cameras) == 1:
        # A model of one camera refuses the others.
        first = next(iter(example["images"]))
        example["images"] = {first: example["images"][first]}
    return example
