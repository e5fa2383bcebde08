"""What the parts of `make stress` share: the rows of the table, and what a part is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from piston.progress import Progress


class Row(NamedTuple):
    """One line of the table: what was tried how often, what came of it, and what had to."""

    attempt: str
    count: int
    found: str
    required: str
    ok: bool


class Part(NamedTuple):
    """A function that tries to break something for about `seconds`.

    It is called with its seconds, a seed and where to report the seconds that have passed, and it
    returns the rows of the table.
    """

    name: str
    run: Callable[[float, int, Progress], list[Row]]
    seconds: float


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing: parts that cause thousands of warnings count them instead."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
