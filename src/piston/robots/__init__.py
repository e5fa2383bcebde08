"""Robots: from a robot's own keys to the model's inputs, and from the model's actions back.

Most robots are tables: a `RobotInputs`, named by a subclass of `RobotDataConfig` or read from a
file (`piston.robots.description`). Keys and shapes are checked here; `Normalize` refuses values
that are not finite. A robot emits the cameras that it has; `FillCameras` adds the model's others.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from piston.config import DataConfig, DataConfigFactory
from piston.models.configs import ModelConfig
from piston.serialization import register
from piston.suggestions import did_you_mean
from piston.transforms import (
    ALWAYS_KEPT,
    Data,
    Group,
    RepackTransform,
    listed,
    require,
    require_mapping,
    require_numbers,
)
from piston.transforms.actions import AbsoluteActions, DeltaActions
from piston.transforms.images import to_uint8_hwc
from piston_client.examples import example_observation

# How many numbers a key has, or the name of each.
Dims = int | tuple[str, ...]
# Two of a robot's numbers: those that are the model's 0 and 1.
Span = tuple[float, float]


def names_of(parts: Iterable[Dims]) -> list[str]:
    """Return the name of each number; those without are called by their position: dim_3."""
    names: list[str] = []
    for part in parts:
        if isinstance(part, int):
            part = tuple(f"dim_{len(names) + i}" for i in range(part))
        names += part
    return names


@register("robot_inputs")
@dataclasses.dataclass(frozen=True)
class RobotInputs:
    """From a robot's own keys to the model's."""

    # The robot's name.
    name: str
    # The robot's name of a camera → the model's camera slot.
    cameras: Mapping[str, str]
    # The keys whose numbers make up the state, in order.
    state: Mapping[str, Dims]
    # The same of the actions. A policy's answer has them in one array, "actions".
    actions: Mapping[str, Dims]
    # The key of the dictionary that holds the images; None: they are beside the other keys.
    images: str | None = None
    # Cameras that may be absent.
    optional: tuple[str, ...] = ()
    # Cameras whose images are accepted and not used.
    unused: tuple[str, ...] = ()
    # A data set's columns for the keys above, where they are called otherwise there; None: the
    # robot has no data set.
    columns: Mapping[str, str] | None = None
    # Action dimensions that are trained relative to the dimension of the state of the same name.
    relative: tuple[str, ...] = ()
    # A gripper's name among the dimensions → its numbers when open and when closed, which become
    # 0 and 1 in the state and in the actions, as in the data of the base models.
    grippers: Mapping[str, Span] = dataclasses.field(default_factory=dict)
    # Control steps per second.
    rate: float | None = None
    # The prompt of observations that bring none.
    prompt: str | None = None

    def __post_init__(self) -> None:
        if len(set(self.cameras.values())) < len(self.cameras):
            slots = dict(self.cameras)
            raise ValueError(f"{self.name}: two cameras are mapped to one slot: {slots}.")
        known = {*self.cameras, *self.state, *self.actions}
        if len(known) < len(self.cameras) + len(self.state) + len(self.actions):
            raise ValueError(
                f"{self.name}: a key may occur once among the cameras, the state and the actions."
            )
        if unknown := (self.columns or {}).keys() - known:
            raise ValueError(
                f"{self.name}: 'columns' names {listed(unknown)}; the robot has {listed(known)}."
            )
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"{self.name}: 'rate' is {self.rate}; expected steps per second.")
        self._check_dimensions()

    def _check_dimensions(self) -> None:
        """Raise ValueError if dimensions are missing, not unique, or named but not known."""
        for kind, keys in (("state", self.state), ("actions", self.actions)):
            if not keys or not all(names_of([part]) for part in keys.values()):
                raise ValueError(f"{self.name}: '{kind}' needs a key, and each key a dimension.")
            counts = Counter(names_of(keys.values()))
            if twice := [name for name, count in counts.items() if count > 1]:
                raise ValueError(
                    f"{self.name}: '{kind}' has more than one dimension named {listed(twice)}."
                )
        state, actions = self.state_names, self.action_names
        for name in self.relative:
            self._require_name("relative", name, "action", actions)
            self._require_name("relative", name, "state", state)
        for name, (opened, closed) in self.grippers.items():
            self._require_name("grippers", name, "state or action", [*state, *actions])
            if opened == closed or not math.isfinite(opened - closed):
                raise ValueError(
                    f"{self.name}: gripper {name!r} is open at {opened} and closed at {closed}; "
                    "expected two different numbers, in the robot's units."
                )

    def _require_name(self, field: str, name: str, kind: str, known: Iterable[str]) -> None:
        known = dict.fromkeys(known)
        if name not in known:
            raise ValueError(
                f"{self.name}: '{field}' names {name!r}, but there is no such {kind} dimension."
                f"{did_you_mean(name, known)} Found {', '.join(known)}."
            )

    @property
    def state_names(self) -> list[str]:
        return names_of(self.state.values())

    @property
    def action_names(self) -> list[str]:
        return names_of(self.actions.values())

    @property
    def action_dim(self) -> int:
        return len(self.action_names)

    def __call__(self, data: Data) -> Data:
        images = self._images(data)  # first: cameras tell best which robot sent the observation
        state = self._joined(data, self.state)
        pixels = {}
        for name, slot in self.cameras.items():
            if name in images or name not in self.optional:
                pixels[slot] = to_uint8_hwc(require(images, name, self.name), name)
                self._check_batch(name, pixels[slot], 3, state)
        seen = {
            "image": pixels,
            "image_mask": {slot: np.ones(state.shape[:-1], bool)[()] for slot in pixels},
            "state": _with_spans(state, self._spans(self.state_names), fraction),
            **{key: data[key] for key in ALWAYS_KEPT if key in data},
        }
        if (actions := self._actions(data)) is not None:
            self._check_batch("actions", actions, 2, state)
            seen["actions"] = _with_spans(actions, self._spans(self.action_names), fraction)
        return seen

    def _actions(self, data: Data) -> np.ndarray | None:
        """Return the actions of a data set's columns, or of a chunk of this robot, if any."""
        if "actions" in data and not self.actions.keys() <= data.keys():
            return require_numbers(data, "actions", self.name, self.action_dim, axes=2)
        if not any(key in data for key in self.actions):
            return None
        return self._joined(data, self.actions, axes=2)

    def _check_batch(self, key: str, values: np.ndarray, axes: int, state: np.ndarray) -> None:
        if values.shape[:-axes] != state.shape[:-1]:
            raise ValueError(
                f"{self.name}: {key!r} has shape {values.shape}, the state {state.shape}; their "
                f"batch axes must agree: all but the last {axes}, and all but the last one."
            )

    def _spans(self, names: Sequence[str]) -> dict[int, Span]:
        return {i: self.grippers[name] for i, name in enumerate(names) if name in self.grippers}

    @property
    def outputs(self) -> RobotOutputs:
        return RobotOutputs(self.name, self.action_dim, self._spans(self.action_names))

    def delta_actions(self) -> tuple[tuple[bool, ...], tuple[int, ...]] | None:
        """Return which action dimensions are relative, and to which of the state; None: none."""
        if not self.relative:
            return None
        state, actions = self.state_names, self.action_names
        mask = tuple(name in self.relative for name in actions)
        return mask, tuple(state.index(n) if n in self.relative else -1 for n in actions)

    def repack(self, columns: Mapping[str, str]) -> RepackTransform:
        """Return the renaming of a data set's columns to the robot's keys."""
        cameras, rest = (
            {key: columns.get(key, key) for key in keys}
            for keys in (self.cameras, (*self.state, *self.actions))
        )
        return RepackTransform({**self._nested(cameras), **rest})

    def _nested(self, images: Data) -> Data:
        return images if self.images is None else {self.images: images}

    def example(self) -> Data:
        """Return a random observation in the robot's own keys, for tests and to try a policy."""
        return example_observation(
            {"observation": self._expected(self.cameras.values(), 224, False)}
        )

    def metadata(self, model: ModelConfig, has_prompt: bool) -> dict[str, Any]:
        """Return what clients are told: the observation that is expected, names, the rate.

        `observation` has the structure of an observation. An image may have any size.
        """
        about = {
            "robot": self.name,
            "observation": self._expected(model.cameras, model.image_size, not has_prompt),
            "actions": _numbers(*self.actions.values()),
        }
        return about if self.rate is None else {**about, "control_hz": self.rate}

    def _expected(self, slots: Iterable[str], pixels: int, needs_prompt: bool) -> dict[str, Any]:
        image = {"dtype": "uint8", "shape": [None, None, 3], "resized_to": [pixels, pixels]}
        cameras = {
            name: {**image, "slot": slot, "required": name not in self.optional}
            for name, slot in self.cameras.items()
            if slot in slots
        }
        state = {key: {**_numbers(part), "required": True} for key, part in self.state.items()}
        prompt = {"dtype": "str", "required": needs_prompt}
        return {**self._nested(cameras), **state, "prompt": prompt}

    def _joined(self, data: Data, keys: Mapping[str, Dims], axes: int = 1) -> np.ndarray:
        parts: list[np.ndarray] = []
        for key, named in keys.items():
            value, dim = np.asarray(require(data, key, self.name)), len(names_of([named]))
            if dim == 1 and parts and value.shape == parts[0].shape[:-1]:
                value = value[..., np.newaxis]  # a number instead of a vector of one
            parts.append(require_numbers({key: value}, key, self.name, dim, axes))
        if len({part.shape[:-1] for part in parts}) > 1:
            shapes = {key: part.shape for key, part in zip(keys, parts)}
            raise ValueError(f"{self.name}: the shapes are {shapes}; their batch axes must agree.")
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def _images(self, data: Data) -> Mapping[str, Any]:
        """Return the images under the robot's names; raise ValueError for an unknown camera."""
        images = data if self.images is None else require_mapping(data, self.images, self.name)
        known = {*self.cameras, *self.unused}
        unknown = images.keys() - known
        if self.images is None:  # among the robot's other keys, an image is what looks like one
            arrays = {name: np.asarray(images[name]) for name in unknown}
            unknown = {n for n, array in arrays.items() if array.ndim > 2 and array.dtype == "u1"}
        if unknown:
            raise ValueError(
                f"{self.name}: camera {listed(unknown)} is not expected; this robot has "
                f"{listed(known)}. Leave it out, or map it to a slot of the model in `cameras`."
            )
        return images


@dataclasses.dataclass(frozen=True)
class RobotOutputs:
    """The robot's own action dimensions, without the model's padding."""

    # The robot's name, for messages.
    name: str
    action_dim: int
    # The dimensions of grippers, with the robot's numbers for 0 and 1.
    spans: Mapping[int, Span] = dataclasses.field(default_factory=dict)

    def __call__(self, data: Data) -> Data:
        actions = require_numbers(data, "actions", self.name, axes=2)
        if actions.shape[-1] < self.action_dim:
            found = f"{self.name}: 'actions' has shape {actions.shape}"
            raise ValueError(f"{found}; expected at least {self.action_dim} dimensions.")
        return {"actions": _with_spans(actions[..., : self.action_dim], self.spans, spread)}


def fraction(values: np.ndarray, span: Span) -> np.ndarray:
    """Return 0 for the first end of the span, 1 for the second."""
    return (values - span[0]) / (span[1] - span[0])


def spread(values: np.ndarray, span: Span) -> np.ndarray:
    """Invert `fraction`."""
    return values * (span[1] - span[0]) + span[0]


def _with_spans(
    values: np.ndarray, spans: Mapping[int, Span], convert: Callable[[np.ndarray, Span], np.ndarray]
) -> np.ndarray:
    """Return the values with some dimensions converted."""
    if not spans:
        return values
    converted = values.astype(np.result_type(values, np.float32))
    for dim, span in spans.items():
        converted[..., dim] = convert(converted[..., dim], span)
    return converted


def _numbers(*parts: Dims) -> dict[str, Any]:
    """Describe a vector to clients, with the names of its dimensions where all have one."""
    names = names_of(parts)
    about = {"dtype": "float32", "shape": [len(names)]}
    named = not any(isinstance(part, int) for part in parts)
    return {**about, "names": names} if named else about


@dataclasses.dataclass(frozen=True)
class RobotDataConfig(DataConfigFactory):
    """A robot that is described by a table."""

    inputs: ClassVar[RobotInputs]

    @property
    def robot(self) -> str:
        return self.inputs.name

    def robot_inputs(self, model_config: ModelConfig) -> RobotInputs:  # noqa: ARG002
        """Return the table for this model and these options; by default always the same."""
        return self.inputs

    def conversions(self) -> Group:
        """Return transforms between the table's state and actions and the model's.

        They are for numbers that a table cannot convert, and see all of them with batch axes.
        """
        return Group()

    def transforms(self, table: RobotInputs) -> Group:
        """Return the transforms between the robot's keys and the model's, with absolute actions."""
        own = self.conversions()
        return Group([table], [table.outputs]).push(own.inputs, own.outputs)

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        table = self.robot_inputs(model_config)
        for name, slot in table.cameras.items():
            if slot not in model_config.cameras and name not in table.optional:
                raise ValueError(
                    f"{table.name}: camera {name!r} is mapped to {slot!r}, which is no slot of "
                    f"this model.{did_you_mean(slot, model_config.cameras)} It has "
                    f"{', '.join(model_config.cameras)}."
                )
        transforms = self.transforms(table)
        if (delta := table.delta_actions()) is not None:
            transforms = transforms.push([DeltaActions(*delta)], [AbsoluteActions(*delta)])
        prompt = table.prompt if self.default_prompt is None else self.default_prompt
        base = dataclasses.replace(self, default_prompt=prompt)
        config = dataclasses.replace(
            base.create_base_config(assets_dirs, model_config),
            data_transforms=transforms,
            robot_metadata=table.metadata(model_config, prompt is not None),
        )
        if table.columns is None:
            return config
        return dataclasses.replace(
            config,
            repack_transforms=Group([table.repack(table.columns)]),
            action_sequence_keys=tuple(table.columns.get(key, key) for key in table.actions),
        )
