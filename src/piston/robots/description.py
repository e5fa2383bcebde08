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
from piston.models.configs import ModelConfig
from piston.robots import Dims, RobotDataConfig, RobotInputs
from piston.serialization import from_json, register
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
_TYPES: dict[str, Any] = {"name": str, "rate": float, "prompt": str, "relative": tuple[str, ...]}
# What the entries of tables are.
_ENTRY_TYPES = {"cameras": str, "state": Dims, "actions": Dims, "grippers": dict[str, float]}


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

    def robot_inputs(self, model_config: ModelConfig) -> RobotInputs:  # noqa: ARG002
        return self.table

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
    fields = {key: _checked(content[key], _TYPES[key], key) for key in _TYPES if key in content}
    for key, kind in _ENTRY_TYPES.items():
        table = content.get(key, {})
        if not isinstance(table, dict):
            raise _misfit(table, key)
        fields[key] = {name: _checked(entry, kind, key, name) for name, entry in _flat(table)}
    for name, ends in fields["grippers"].items():
        if ends.keys() != _ENDS:
            raise _misfit(ends, "grippers", name)
        fields["grippers"][name] = (float(ends["open"]), float(ends["closed"]))
    if "rate" in fields:
        fields["rate"] = float(fields["rate"])
    return RobotInputs(columns={}, **fields)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys as they are called in a data set: without quotes, TOML reads a.b as a table."""
    for key, value in table.items():
        if isinstance(value, dict) and not _ENDS & value.keys():
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _checked(value: Any, kind: Any, field: str, entry: str | None = None) -> Any:
    try:
        return from_json(value, kind)
    except ValueError:
        raise _misfit(value, field, entry) from None


def _misfit(value: Any, field: str, entry: str | None = None) -> ValueError:
    place = field if entry is None else f"{field}.{entry}"
    return ValueError(f"{place!r} is {value!r}; expected {FIELDS[field]}.")
