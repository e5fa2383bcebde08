"""How long each stage of a job took and what came out, as a file that a job adds to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What a peak of memory can be of.
LARGEST, TOGETHER = "the largest process", "all processes together"


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    result: str


@dataclasses.dataclass(frozen=True)
class Stages:
    """Finished stages in order. `job` says which job they belong to.

    A stage may take several attempts: its seconds are those of all of them.
    """

    job: Mapping[str, Any]
    finished: tuple[Stage, ...] = ()
    # So far, unfinished attempts included.
    peak_memory_bytes: int = 0
    # Whose memory that is, as in "peak memory of …".
    peak_memory_of: str = LARGEST
    # Stage → seconds of attempts that did not finish it.
    unfinished: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> Stage | None:
        return next((stage for stage in self.finished if stage.name == name), None)

    def with_stage(self, stage: Stage, peak_memory_bytes: int) -> Stages:
        """With its unfinished attempts. A stage done again replaces its former self."""
        others = tuple(one for one in self.finished if one.name != stage.name)
        unfinished = dict(self.unfinished)
        seconds = stage.seconds + unfinished.pop(stage.name, 0.0)
        return dataclasses.replace(
            self,
            finished=(*others, dataclasses.replace(stage, seconds=seconds)),
            unfinished=unfinished,
            peak_memory_bytes=max(self.peak_memory_bytes, peak_memory_bytes),
        )

    def with_attempt(self, name: str, seconds: float, peak_memory_bytes: int) -> Stages:
        """After an attempt that did not finish the stage."""
        seconds += self.unfinished.get(name, 0.0)
        return dataclasses.replace(
            self,
            unfinished={**self.unfinished, name: seconds},
            peak_memory_bytes=max(self.peak_memory_bytes, peak_memory_bytes),
        )

    def write(self, path: Path) -> None:
        fresh = path.with_suffix(".partial")
        fresh.write_text(json.dumps(dataclasses.asdict(self), indent=2))
        fresh.replace(path)


def read_stages(path: Path) -> Stages:
    try:
        found = json.loads(path.read_text())
        finished = tuple(Stage(**stage) for stage in found["finished"])
        return Stages(
            found["job"],
            finished,
            found["peak_memory_bytes"],
            # Older files have neither.
            found.get("peak_memory_of", LARGEST),
            found.get("unfinished", {}),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no list of stages as `piston demo` writes it.") from error
