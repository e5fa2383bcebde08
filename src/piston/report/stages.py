"""How long each stage of a job took and what came out, as a file that a job adds to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piston.files import read_json, write_json

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

    def after(self, name: str, seconds: float, result: str | None) -> Stages:
        """Return the stages after an attempt at one; `result` is None if it did not finish.

        A stage done again replaces its former self.
        """
        seconds += self.unfinished.get(name, 0.0)
        if result is None:
            return dataclasses.replace(self, unfinished={**self.unfinished, name: seconds})
        finished = [stage for stage in self.finished if stage.name != name]
        return dataclasses.replace(
            self,
            finished=(*finished, Stage(name, seconds, result)),
            unfinished={key: old for key, old in self.unfinished.items() if key != name},
        )

    def write(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self), indent=2)


def read_stages(path: Path) -> Stages:
    try:
        found = read_json(path)
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
