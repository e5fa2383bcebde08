"""`piston train PRESET` and `piston distill CHECKPOINT`.

They take a preset, or a checkpoint's own configuration, and overrides of its options.

They end with 0 after the last step; with 130 or 143 when Ctrl-C or SIGTERM stopped them, everything
saved; with 1 after an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from piston import presets
from piston.cli.command import parse as parse_words
from piston.cli.console import UsageError, fail
from piston.config import TrainConfig
from piston.models.configs import Pi0Config
from piston.older_configs import FIELDS, Renamed
from piston.robots.description import read_robot, with_robot

Arguments = TypeVar("Arguments")


def run_train(args: list[str]) -> int:
    return _train(parse, args)


def run_distill(args: list[str]) -> int:
    return _train(parse_distilled, args)


def _train(parse: Callable[[Sequence[str]], TrainConfig], args: list[str]) -> int:
    is_first = int(os.environ.get("RANK", 0)) == 0
    if not is_first:  # the first process of torchrun logs for all of them
        logging.getLogger().setLevel(logging.WARNING)
    config = parse(args)
    from piston.training.loop import TrainingStopped, train_loop  # imports torch

    try:
        checkpoint = train_loop(config)
    except TrainingStopped as stopped:
        return fail(str(stopped), code=stopped.exit_code)
    if is_first:
        served = shlex.quote(str(checkpoint))
        print(f"Done. Serve it with: piston serve {served}", file=sys.stderr)
    return 0


@dataclasses.dataclass(frozen=True)
class TrainArguments:
    """Train a preset's model on a data set, from the start or with --resume."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    # A file that describes the robot (`piston init-robot` writes one), in place of the preset's.
    robot: Path | None = None


@dataclasses.dataclass(frozen=True)
class DistillArguments:
    """Teach a trained flow policy to denoise a chunk in one step, or in a few.

    It trains on the data of the checkpoint, with its own options and half of its steps and
    learning rate. Half of the samples of noise train ordinary denoising, so that ten steps still
    work; in the others one large step learns to lead where ten ordinary ones lead. Images and
    prompt are read by frozen weights.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]


def parse(args: Sequence[str]) -> TrainConfig:
    """Return a preset with overrides of any of its fields: `pi0_aloha --batch-size 10`."""
    return parse_preset("piston train", TrainArguments, args).config


def parse_preset(
    prog: str, kind: Callable[..., Arguments], args: Sequence[str], **changes: Any
) -> Arguments:
    """Parse the name of a preset, which gets the changes, and overrides of what `kind` holds."""
    _check_renamed(args)
    width = max(map(len, presets.names()))
    rows = (f"  {name:<{width}}  {_about(presets.get(name))}" for name in presets.names())
    listed = "\n".join(["\n\npresets:", *rows])
    first, words = _split(prog, "PRESET", kind, args, listed)
    preset = dataclasses.replace(presets.get(first), **changes)
    # Which options there are for the data depends on the robot.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--robot", nargs="?")
    robot = parser.parse_known_args(words)[0].robot
    if robot is not None:
        preset = with_robot(preset, read_robot(robot))
    return _override(kind(preset), preset, words, f"{prog} {first}")


def parse_distilled(args: Sequence[str]) -> TrainConfig:
    """Return the configuration that distils a checkpoint: `CHECKPOINT --exp-name NAME`."""
    first, words = _split("piston distill", "CHECKPOINT", DistillArguments, args)
    from piston import assets
    from piston.inference.loading import find_config  # imports torch
    from piston.training.distill import distilled

    folder = assets.resolve(first)
    advice = "Fine-tune it with `piston train PRESET --weights …` first, and distil the result."
    config = distilled(find_config(folder, advice=advice), folder)
    default = DistillArguments(config)
    config = _override(default, config, words, f"piston distill {first}").config
    if not isinstance(config.model, Pi0Config) or config.model.distilled_steps is None:
        raise ValueError("--model.distilled-steps is None: there would be nothing to learn.")
    return config


def _split(
    prog: str, noun: str, kind: Any, args: Sequence[str], more: str = ""
) -> tuple[str, list[str]]:
    """Return what comes first on the command line, and its options; print help without any."""
    first, *words = args or ["--help"]
    if first in ("-h", "--help"):
        paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
        description = "\n\n".join(textwrap.fill(paragraph, 79) for paragraph in paragraphs)
        print(f"usage: {prog} {noun} [OPTIONS]\n\n{description}{more}")
        print(f"\n`{prog} {noun} --help` lists the options.")
        raise SystemExit(0)
    if first.startswith("-"):
        raise UsageError(f"The {noun.lower()} comes first: {prog} {noun} {shlex.join(args)}")
    return first, words


def _override(
    default: Arguments, config: TrainConfig, words: Sequence[str], prog: str
) -> Arguments:
    """Return the arguments with the options that the words give. `config` is for the help."""
    overridden: Arguments = parse_words(
        type(default),
        words,
        prog,
        default=default,
        description=f"{inspect.getdoc(default)}\n\n{_about(config)}",
        config=(tyro.conf.AvoidSubcommands,),
    )
    return overridden


def _about(config: TrainConfig) -> str:
    return f"{config.model.family} on {config.data.robot} ({presets.purpose(config)})"


def _check_renamed(args: Sequence[str]) -> None:
    """Raise UsageError for an option of version 0.1.0 that has another name now."""
    options = {word.partition("=")[0].replace("_", "-") for word in args}
    for old, change in FIELDS.items():
        flag = old.replace("_", "-")
        if isinstance(change, Renamed) and options & {f"--{flag}", f"--data.{flag}"}:
            new = change.new.replace("_", "-")
            raise UsageError(f"The option {flag} of version 0.1.0 is named {new} now.")
