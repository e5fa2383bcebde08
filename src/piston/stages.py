"""The stages of a job with their times, as a file that a job adds to and a report reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piston.files import read_json, write_json

LARGEST_PROCESS = "the largest process"


@dataclasses.dataclass
class Stages:
    """The stages of a job so far. The seconds of a stage are those of all attempts at it."""

    # Which job it is.
    job: Mapping[str, Any]
    # {"name", "seconds", "result"} of each stage, in order.
    finished: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # So far, unfinished attempts included; and whose memory that is.
    peak_memory_bytes: int = 0
    peak_memory_of: str = LARGEST_PROCESS
    # Stage → seconds of attempts that did not finish it.
    unfinished: dict[str, float] = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> dict[str, Any] | None:
        return next((stage for stage in self.finished if stage["name"] == name), None)

    def add(self, name: str, seconds: float, result: str | None) -> None:
        """Add an attempt at a stage, which replaces a former one; `result` is None if it failed."""
        seconds += self.unfinished.pop(name, 0.0)
        if result is None:
            self.unfinished[name] = seconds
            return
        self.finished = [stage for stage in self.finished if stage["name"] != name]
        self.finished.append({"name": name, "seconds": seconds, "result": result})

    def write(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self), indent=2)


def read_stages(path: Path) -> Stages:
    try:
        return Stages(**read_json(path))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no list of stages as `piston demo` writes it.") from error
