"""`piston bench WHAT …`: what is fast, measured on this machine. One file per thing measured."""

from __future__ import annotations

import importlib
from difflib import get_close_matches

from piston.cli.screen import fail

# what → what it measures; its file is piston/cli/bench_<what>.py with `run(args)`.
BENCHMARKS = {
    "inference": "one chunk of a full-size model, against the machine's own limit",
    "serve": "round trips, load and batching of the policy server",
    "data": "reading a data set: naive, cold, warm, cached",
    "stats": "normalisation statistics, on made-up columns",
    "train": "training steps of a mid-size model, through the whole loop",
}


def run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, rest = args[0], args[1:]
    if name not in BENCHMARKS:
        nearest = get_close_matches(name, BENCHMARKS, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        return fail(f"No benchmark is named {name!r}.{hint}\n\n{_help()}", code=2)
    return int(importlib.import_module(f"piston.cli.bench_{name}").run(rest) or 0)


def _help() -> str:
    width = max(map(len, BENCHMARKS))
    rows = (f"  {name:<{width}}  {what}" for name, what in BENCHMARKS.items())
    return "\n".join(["usage: piston bench WHAT …", "", *rows])
