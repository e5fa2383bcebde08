"""What the benchmarks share: options, errors, and how long a call takes."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import tyro

from piston.cli import run_command

Options = TypeVar("Options")


def main(benchmark: Callable[[Options], int | None], options: type[Options]) -> NoReturn:
    """Run a benchmark with the options of the command line, and exit with its code."""
    sys.exit(run_command(lambda: benchmark(tyro.cli(options))))


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    return statistics.median(seconds_of(call) for _ in range(repeats))
