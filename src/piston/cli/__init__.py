"""The command line: `piston VERB …`. The module of a verb is imported only when it is used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

import piston
from piston.cli.console import UsageError, fail, stdout_closed_early
from piston.extras import needed_for
from piston.logs import init_logging
from piston.suggestions import did_you_mean

# verb → the module with its function `run_VERB(args)`, and what it does; in the order of use.
VERBS = {
    "demo": ("demo", "record, train, serve and evaluate a small policy, in one go"),
    "presets": ("presets", "list the named configurations, or show one in full"),
    "data": ("data", "check a data set, or show what it holds"),
    "init-robot": ("robots", "describe a robot of your own in a file, from a data set of it"),
    "stats": ("stats", "compute the normalisation statistics of a data set"),
    "record": ("sim", "let a scripted expert show a simulated robot's task"),
    "train": ("train", "train a preset's model on a data set"),
    "distill": ("train", "teach a trained policy to denoise in one step"),
    "serve": ("serve", "serve a checkpoint to robots over a websocket"),
    "export": ("export", "compile a checkpoint for this machine, into one file"),
    "eval": ("sim", "let a policy drive a simulated robot and count successes"),
    "inspect": ("inspect", "show why a policy does what it does, by changing its inputs"),
    "runs": ("runs", "list runs with their step, loss and checkpoint"),
    "report": ("runs", "show a run as one HTML page, or compare several"),
    "summary": ("models", "show what a model is made of, its mask and its memory"),
    "convert": ("models", "read a checkpoint of any known format and write ours"),
    "client": ("client", "measure the round trip to a policy server (client ping)"),
    "verify": ("models", "replay reference cases and print every error"),
    "completion": ("completion", "print a script that completes words in your shell"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"piston {piston.__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        hint = did_you_mean(verb, VERBS)
        return fail(f"No verb is named {verb!r}.{hint}\n\n{_help()}", code=2)
    return run_command(lambda: find(verb)(rest))


def find(verb: str) -> Callable[[Sequence[str]], int | None]:
    """Return the function of a verb, which takes the words after it."""
    module = importlib.import_module(f"piston.cli.{VERBS[verb][0]}")
    run: Callable[[Sequence[str]], int | None] = getattr(module, f"run_{verb.replace('-', '_')}")
    return run


def run_command(command: Callable[[], int | None]) -> int:
    """Return the exit code of a command; errors that a user can cause become one clear message."""
    init_logging()
    try:
        if os.environ.get("PISTON_PRESETS"):
            # Before any verb: a checkpoint names the classes that such a module defines.
            importlib.import_module("piston.presets").import_user_presets()
        with needed_for("This command"):
            return int(command() or 0)
    except BrokenPipeError:
        return stdout_closed_early()
    except (ValueError, KeyError, OSError, ImportError) as error:
        if os.environ.get("PISTON_TRACEBACK"):
            raise
        return fail(error, code=2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt as stop:
        return fail("\n".join(["Stopped.", *getattr(stop, "__notes__", [])]), code=130)


def _help() -> str:
    width = max(map(len, VERBS))
    rows = "\n".join(f"  {verb:<{width}}  {what}" for verb, (_, what) in VERBS.items())
    more = "`piston VERB --help` says more; PISTON_TRACEBACK=1 shows where an error arose."
    return f"usage: piston VERB … | --version\n\n{rows}\n\n{more}"
