"""How long each stage of a job took and what came out, as a file that a job adds to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    result: str


@dataclasses.dataclass(frozen=True)
class Stages:
    """Finished stages in order. `job` says which job they belong to."""

    job: Mapping[str, Any]
    finished: tuple[Stage, ...] = ()
    # Of the largest process so far.
    peak_memory_bytes: int = 0

    def get(self, name: str) -> Stage | None:
        return next((stage for stage in self.finished if stage.name == name), None)

    def with_stage(self, stage: Stage, peak_memory_bytes: int) -> Stages:
        """A stage that was done again replaces its former self."""
        others = tuple(one for one in self.finished if one.name != stage.name)
        peak = max(self.peak_memory_bytes, peak_memory_bytes)
        return dataclasses.replace(self, finished=(*others, stage), peak_memory_bytes=peak)

    def write(self, path: Path) -> None:
        fresh = path.with_suffix(".partial")
        fresh.write_text(json.dumps(dataclasses.asdict(self), indent=2))
        fresh.replace(path)


def read_stages(path: Path) -> Stages:
    try:
        found = json.loads(path.read_text())
        finished = tuple(Stage(**stage) for stage in found["finished"])
        return Stages(found["job"], finished, found["peak_memory_bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no list of stages as `piston demo` writes it.") from error
