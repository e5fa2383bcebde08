"""`piston serve DIR`: a checkpoint behind openpi's websocket protocol."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from piston.cli.command import Command, named, read_robot_option
from piston.serving import MOST_IN_A_BATCH, ServerConfig, run_server

if TYPE_CHECKING:
    from piston.inference.policy import Policy
    from piston.inference.recording import RecordingPolicy

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ServeArguments:
    """Serve a policy to robots over a websocket.

    The `openpi-client` package works unchanged.
    """

    # A folder that `piston train` wrote, any checkpoint (folder or location) with --preset, or a
    # file that `piston export` wrote.
    checkpoint: Annotated[str | None, tyro.conf.Positional, named("[CHECKPOINT]")] = None
    # The robot, for checkpoints that do not say it themselves.
    preset: str | None = None
    # One of the robots that the checkpoint was trained with: that of requests that do not say it.
    # Or a file that describes the robot, in place of the preset's or for other keys. A checkpoint
    # that was trained with such a file contains it.
    robot: str | None = None
    # Serve a tiny model with random weights for the preset's robot, to try the wiring.
    random_weights: bool = False
    # What weights are held in; by default as they are stored. int8, on CPUs only, takes half the
    # memory of bfloat16 and is faster where the CPU has products of eight-bit numbers (VNNI).
    dtype: Literal["float32", "bfloat16", "int8"] | None = None
    # cpu, cuda, cuda:1 …; by default a GPU where there is one.
    device: str | None = None
    # Compile the model for all shapes that robots can send, before the server is ready; π0, π0.5.
    compile: bool = False
    # Denoising steps per chunk; by default as many as the checkpoint was made for (10, or fewer
    # after `piston distill`), or an exported file was compiled for.
    num_steps: int | None = None
    # Chunks that are computed for each request, from different noise. Sent is the one that agrees
    # most with the others.
    candidates: int = 1
    # The prompt of requests that bring none.
    default_prompt: str | None = None
    # Seed of the noise, for requests without a seed of their own.
    seed: int | None = None
    # How long a policy that writes its subtask keeps it: chunks (4) or seconds (2.5s).
    subtask_interval: str = "1"
    # How real-time chunking corrects: through the network, or (cheaper) past it.
    rtc_jacobian: Literal["full", "identity"] = "full"
    # Write what is asked and answered to this folder, as a LeRobot data set. For one robot.
    record: Path | None = None
    # Inferences per second that the recording declares (10 if not given).
    record_fps: float | None = None
    # The server itself.
    server: Annotated[ServerConfig, tyro.conf.arg(name="")] = ServerConfig()


def serve(arguments: ServeArguments) -> None:
    _check(arguments)
    from piston.inference.recording import RecordingPolicy  # imports torch

    policy = _make_policy(arguments)
    logger.info("%s on %s", policy.model.config.family, policy.device)
    name = arguments.checkpoint or f"random weights for {arguments.preset}"
    if arguments.checkpoint is not None and "://" not in name:
        name = str(Path(name).resolve())
    server = dataclasses.replace(arguments.server, name=arguments.server.name or name)
    with contextlib.ExitStack() as stack:
        served: Policy | RecordingPolicy = policy
        if arguments.record is not None:
            if len(policy.robots) > 1:
                raise ValueError("--record is for one robot, but the checkpoint is of several.")
            served = RecordingPolicy(policy, arguments.record, arguments.record_fps or 10.0)
            stack.callback(served.close)
            # One robot, which keeps its connection however long it pauses.
            server = dataclasses.replace(server, max_connections=1, idle_timeout=math.inf)
        finished = run_server(served, server, warm_up=policy.warm_up, best_batch=policy.best_batch)
    if not finished:
        # A thread is still inside torch, which would abort an ordinary exit.
        logging.shutdown()
        os._exit(0)


run_serve = Command("serve", ServeArguments, serve)


def _check(arguments: ServeArguments) -> None:
    """Raise ValueError for options that do not fit together, before the model is loaded."""
    arguments.server.tls()
    arguments.server.find_api_key()
    if arguments.record is None and arguments.record_fps is not None:
        raise ValueError("--record-fps says how a recording is made; give --record as well.")
    usual = (1, ServerConfig.max_connections)
    if arguments.record is not None and arguments.server.max_connections not in usual:
        raise ValueError("--record is for one robot: leave out --max-connections.")
    if arguments.random_weights and (arguments.dtype or arguments.device):
        raise ValueError(
            "--random-weights serves a tiny float32 model on the CPU: leave out --dtype, --device."
        )
    if arguments.random_weights and (arguments.checkpoint or not arguments.preset):
        raise ValueError("--random-weights takes a --preset and no checkpoint.")
    if not arguments.random_weights and arguments.checkpoint is None:
        raise ValueError(
            "Which checkpoint? Give the folder of a step that `piston train` wrote (`piston runs` "
            "lists them), or another checkpoint with --preset. To try the wiring without one: "
            "piston serve --preset pi0_aloha_sim --random-weights"
        )


def _make_policy(arguments: ServeArguments) -> Policy:
    import torch

    from piston.inference.loading import load_policies, random_policy
    from piston.inference.policy import Policy

    names = (
        "default_prompt",
        "num_steps",
        "candidates",
        "seed",
        "rtc_jacobian",
        "subtask_interval",
    )
    options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    if arguments.compile:
        options |= {"compile": True, "max_batch": arguments.server.max_batch or MOST_IN_A_BATCH}
    robot = read_robot_option(arguments.robot)
    if arguments.checkpoint is None:
        assert arguments.preset is not None
        torch.manual_seed(arguments.seed or 0)
        return random_policy(arguments.preset, robot=robot, **options)
    if not isinstance(robot, str):
        options["robot"], robot = robot, None
    for name in ("preset", "device", "dtype"):
        options[name] = getattr(arguments, name)
    policies = load_policies(arguments.checkpoint, default_robot=robot, **options)
    return policies[""] if "" in policies else Policy.join(policies, robot)
