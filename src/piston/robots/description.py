"""A robot that a TOML file describes, instead of a class.

The file is a `RobotInputs` in about ten lines; `piston init-robot SET` writes one from a data set.
The robot's own keys are those of its data set. The description is a field of the configuration, so
that every checkpoint contains it.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tyro

from piston.config import DataConfigFactory, TrainConfig
from piston.robots import Dims, RobotDataConfig, RobotInputs, Span
from piston.serialization import register
from piston.suggestions import did_you_mean

# What a file may contain: each key with what it is, for messages.
FIELDS = {
    "name": "the robot's name in quotes",
    "rate": "the number of control steps per second",
    "prompt": "a sentence in quotes",
    "relative": "a list of the names of action dimensions",
    "cameras": "a table: the data set's key = the model's slot",
    "state": "a table: the data set's key = the names of its dimensions, or their number",
    "actions": "a table: the data set's key = the names of its dimensions, or their number",
    "grippers": "a table: a dimension's name = { open = NUMBER, closed = NUMBER }",
}
_OPTIONAL = ("rate", "prompt", "relative", "grippers")
_ENDS = {"open", "closed"}


@register("robot")
@dataclasses.dataclass(frozen=True)
class DescribedRobotDataConfig(RobotDataConfig):
    """Data sets of the robot that `--robot FILE` describes."""

    # The robot; None until a file is given.
    description: tyro.conf.Suppress[RobotInputs | None] = None

    @property
    def table(self) -> RobotInputs:
        if self.description is None:
            raise ValueError(
                "This preset is for a robot of your own: describe it with --robot FILE. `piston "
                "init-robot SET` writes such a file from a data set."
            )
        return self.description

    @property
    def robot(self) -> str:
        return "your robot (--robot)" if self.description is None else self.description.name


def with_robot(config: TrainConfig, robot: RobotInputs) -> TrainConfig:
    """Return the configuration for another robot.

    What belongs to the robot of before is left out: its data set, statistics, prompt, metadata.
    """
    if not isinstance(config.data, DataConfigFactory):
        raise ValueError(
            f"{config.name} mixes {config.data.robot}; a file describes one robot. Choose a preset "
            "of one robot, or write a mixture of your own (docs/recipe.md)."
        )
    left_out = ("repo_id", "assets", "default_prompt", "prompt_from_task")
    kept = {f.name for f in dataclasses.fields(DataConfigFactory)} - set(left_out)
    options = {name: getattr(config.data, name) for name in kept}
    data = DescribedRobotDataConfig(**options, prompt_from_task=True, description=robot)
    return dataclasses.replace(config, data=data, policy_metadata=None)


def read_robot(path: str | Path) -> RobotInputs:
    """Read a description. Raise ValueError that names the file and the key if it is not one."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"There is no file {path} to describe the robot. `piston init-robot SET --output "
            f"{path}` writes one from a data set."
        )
    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}.") from error
    try:
        return _robot(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _robot(content: Mapping[str, Any]) -> RobotInputs:
    for key in content:
        if key not in FIELDS:
            raise ValueError(
                f"{key!r} is no key of a robot's description.{did_you_mean(key, FIELDS)} Known are "
                f"{', '.join(FIELDS)}."
            )
    for key in FIELDS.keys() - set(_OPTIONAL):
        if key not in content:
            raise ValueError(f"{key!r} is missing: {FIELDS[key]}.")
    tables = {
        key: dict(_flat(_checked(content.get(key, {}), dict, key)))
        for key in ("cameras", "state", "actions", "grippers")
    }
    relative = _checked(content.get("relative", []), list, "relative")
    rate = content.get("rate")
    return RobotInputs(
        name=_checked(content["name"], str, "name"),
        cameras={
            k: _checked(v, str, f"cameras.{k}", "cameras") for k, v in tables["cameras"].items()
        },
        state={key: _dims(value, "state", key) for key, value in tables["state"].items()},
        actions={key: _dims(value, "actions", key) for key, value in tables["actions"].items()},
        columns={},
        relative=tuple(_checked(name, str, "relative") for name in relative),
        grippers={name: _span(value, name) for name, value in tables["grippers"].items()},
        rate=None if rate is None else float(_checked(rate, (int, float), "rate")),
        prompt=_checked(content["prompt"], str, "prompt") if "prompt" in content else None,
    )


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys as they are called in a data set: without quotes, TOML reads a.b as a table."""
    for key, value in table.items():
        if isinstance(value, dict) and not _ENDS & value.keys():
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _checked(value: Any, kind: Any, where: str, field: str | None = None) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where!r} is {value!r}; expected {FIELDS[field or where]}.")
    return value


def _dims(value: Any, field: str, key: str) -> Dims:
    where = f"{field}.{key}"
    if isinstance(value, list):
        return tuple(_checked(name, str, where, field) for name in value)
    dim: int = _checked(value, int, where, field)
    return dim


def _span(value: Any, name: str) -> Span:
    where = f"grippers.{name}"
    if not isinstance(value, dict) or value.keys() != _ENDS:
        raise ValueError(f"{where!r} is {value!r}; expected {FIELDS['grippers']}.")
    opened, closed = (
        _checked(value[end], (int, float), where, "grippers") for end in ("open", "closed")
    )
    return float(opened), float(closed)
