"""How a verb is made: tyro parses its arguments, then its function runs with them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from piston.cli.console import UsageError
from piston.suggestions import did_you_mean

if TYPE_CHECKING:
    from piston.robots import RobotInputs


def named(metavar: str) -> Any:
    """Name a positional argument: `Annotated[Path, tyro.conf.Positional, named("FOLDER")]`."""
    return tyro.conf.arg(metavar=metavar)


def read_robot_option(robot: str | None) -> RobotInputs | str | None:
    """Return the description in the file that --robot gives, or the name of a robot as it is."""
    if robot is None or not (Path(robot).suffix == ".toml" or Path(robot).is_file()):
        return robot
    from piston.robots.description import read_robot

    return read_robot(robot)


@dataclasses.dataclass(frozen=True)
class Command:
    """`piston VERB`: called with the words after the verb, it returns the exit code."""

    verb: str
    # A dataclass of arguments, a function with arguments, or several of them as sub-commands.
    target: Any
    # What runs with an instance of the dataclass.
    run: Callable[[Any], int | None] | None = None

    def __call__(self, args: Sequence[str]) -> int | None:
        parsed = self._parse(list(args))
        result: int | None = parsed() if self.run is None else self.run(parsed)
        return result

    def _parse(self, args: list[str]) -> Any:
        prog = f"piston {self.verb}"
        if not isinstance(self.target, dict):
            return parse(_deferred(self.target), args, prog)
        if args and not args[0].startswith("-") and args[0] not in self.target:
            raise UsageError(
                f"`{prog}` has no sub-command {args[0]!r}.{did_you_mean(args[0], self.target)} "
                f"There are: {', '.join(self.target)}."
            )
        targets = {name: _deferred(target) for name, target in self.target.items()}
        # Without a sub-command, the help.
        return parse(targets, args or ["--help"], prog)


def _deferred(target: Any) -> Any:
    """A dataclass as it is; a function as one that returns itself with the arguments bound.

    tyro calls what it parses for. A verb must run after that, because its errors are not tyro's.
    """
    if isinstance(target, type):
        return target

    @functools.wraps(target)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(target, *args, **kwargs)

    return bind


def parse(target: Any, args: Sequence[str], prog: str, **options: Any) -> Any:
    """Return what tyro makes of the words; a dictionary is one of sub-commands.

    An error that a configuration raises when it is built is shown as it is: tyro's frame around it
    names classes and fields instead of options.
    """
    shown = io.StringIO()
    cli: Any = tyro.extras.subcommand_cli_from_dict if isinstance(target, dict) else tyro.cli
    try:
        with contextlib.redirect_stderr(shown):
            return cli(target, args=list(args), prog=prog, **options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except SystemExit as stop:
        where = re.search(r"Error parsing (\S+):", shown.getvalue())
        cause = stop.__context__
        if where is not None and not where[1].startswith("--"):
            while cause is not None and not isinstance(cause, ValueError):
                cause = cause.__context__
            if cause is not None:
                raise UsageError(str(cause)) from cause
        sys.stderr.write(shown.getvalue())
        raise
