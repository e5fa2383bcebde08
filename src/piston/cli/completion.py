"""`piston completion SHELL`: tyro's completion script for all verbs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

import tyro

from piston import cli, presets
from piston.cli.command import Command, named
from piston.cli.stats import StatsArguments
from piston.cli.train import TrainArguments


def _completion(
    shell: Annotated[Literal["bash", "zsh", "fish", "tcsh"], tyro.conf.Positional, named("SHELL")],
) -> None:
    """Print a script with which Tab completes verbs, presets and options.

    bash: piston completion bash > ~/.piston.bash; in ~/.bashrc: . ~/.piston.bash

    zsh: piston completion zsh > ~/.zfunc/_piston, where ~/.zfunc is in $fpath

    Args:
        shell: bash, zsh, fish or tcsh.
    """
    configs = {name: presets.get(name) for name in presets.names()}
    targets: dict[str, Any] = {
        "train": _choice({name: TrainArguments(preset) for name, preset in configs.items()}),
        "stats": _choice({name: StatsArguments(preset) for name, preset in configs.items()}),
        # The others of its options depend on the checkpoint.
        "distill": dataclasses.make_dataclass("Distill", [("exp_name", str), ("resume", bool)]),
    }
    for verb in cli.VERBS:
        run = cli.find(verb)
        if isinstance(run, Command):
            several = isinstance(run.target, dict)
            targets[verb] = _choice(run.target) if several else run.target
    tyro.extras.subcommand_cli_from_dict(
        {verb: targets[verb] for verb in cli.VERBS},
        args=["--tyro-print-completion", shell],
        prog="piston",
        config=(tyro.conf.AvoidSubcommands,),
    )


def _choice(targets: Mapping[str, Any]) -> type:
    """Return a type with one field, a sub-command: a function, a class, or an instance's fields."""
    members: list[Any] = [Annotated[None, tyro.conf.Suppress]]  # a union has at least two
    for name, target in targets.items():
        made: Any = {"constructor": target} if callable(target) else {"default": target}
        kind: Any = Any if callable(target) else type(target)
        members.append(Annotated[kind, tyro.conf.subcommand(name, **made)])
    kind = Annotated[Union[tuple(members)], tyro.conf.arg(name="")]  # noqa: UP007
    return dataclasses.make_dataclass("Choice", [("command", kind)])


run_completion = Command("completion", _completion)
