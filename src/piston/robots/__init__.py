"""Robots: from a robot's own keys to the model's inputs, and from the model's actions back.

Most robots are tables: a `RobotInputs`, named by a subclass of `RobotDataConfig`. Keys and shapes
are checked here; `Normalize` refuses values that are not finite. A robot emits the cameras that it
has; `FillCameras` adds the model's others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from piston.config import DataConfig, DataConfigFactory
from piston.models.configs import ModelConfig
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


@dataclasses.dataclass(frozen=True)
class RobotInputs:
    """From a robot's own keys to the model's."""

    # The robot's name, for messages.
    name: str
    # The robot's name of a camera → the model's camera slot.
    cameras: Mapping[str, str]
    # The keys whose numbers make up the state, in order, and how many each has.
    state: Mapping[str, int]
    action_dim: int
    # The key of the dictionary that holds the images; None: they are beside the other keys.
    images: str | None = None
    # Cameras that may be absent.
    optional: Collection[str] = ()
    # Cameras whose images are accepted and not used.
    unused: Collection[str] = ()
    # A data set's columns for the cameras, the state's keys and "actions", where they are called
    # otherwise there; None: the robot has no data set.
    columns: Mapping[str, str] | None = None
    # Which action dimensions are trained relative to the state; None: none.
    relative: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        if len(set(self.cameras.values())) < len(self.cameras):
            slots = dict(self.cameras)
            raise ValueError(f"{self.name}: two cameras are mapped to one slot: {slots}.")
        known = {*self.cameras, *self.state, "actions"}
        if unknown := (self.columns or {}).keys() - known:
            raise ValueError(
                f"{self.name}: 'columns' names {listed(unknown)}; the robot has {listed(known)}."
            )

    def __call__(self, data: Data) -> Data:
        images = self._images(data)  # first: cameras tell best which robot sent the observation
        state = self._state(data)
        pixels = {}
        for name, slot in self.cameras.items():
            if name in images or name not in self.optional:
                pixels[slot] = to_uint8_hwc(require(images, name, self.name), name)
                self._check_batch(name, pixels[slot], 3, state)
        seen = {
            "image": pixels,
            "image_mask": {slot: np.ones(state.shape[:-1], bool)[()] for slot in pixels},
            "state": state,
            **{key: data[key] for key in ALWAYS_KEPT if key in data},
        }
        if "actions" in data:
            seen["actions"] = require_numbers(data, "actions", self.name, self.action_dim, axes=2)
            self._check_batch("actions", seen["actions"], 2, state)
        return seen

    def _check_batch(self, key: str, values: np.ndarray, axes: int, state: np.ndarray) -> None:
        if values.shape[:-axes] != state.shape[:-1]:
            raise ValueError(
                f"{self.name}: {key!r} has shape {values.shape}, the state {state.shape}; their "
                f"batch axes must agree: all but the last {axes}, and all but the last one."
            )

    @property
    def outputs(self) -> RobotOutputs:
        return RobotOutputs(self.name, self.action_dim)

    def repack(self, columns: Mapping[str, str]) -> RepackTransform:
        """Return the renaming of a data set's columns to the robot's keys."""
        cameras, rest = (
            {key: columns.get(key, key) for key in keys}
            for keys in (self.cameras, (*self.state, "actions"))
        )
        return RepackTransform({**self._nested(cameras), **rest})

    def _nested(self, images: Data) -> Data:
        return images if self.images is None else {self.images: images}

    def example(self) -> Data:
        """Return a random observation in the robot's own keys, for tests and to try a policy."""
        random = np.random.default_rng(0)
        images = {
            name: random.integers(256, size=(224, 224, 3), dtype="u1") for name in self.cameras
        }
        state = {key: random.random(dim, np.float32) for key, dim in self.state.items()}
        return {**self._nested(images), **state, "prompt": "do something"}

    def _state(self, data: Data) -> np.ndarray:
        parts: list[np.ndarray] = []
        for key, dim in self.state.items():
            value = np.asarray(require(data, key, self.name))
            if dim == 1 and parts and value.shape == parts[0].shape[:-1]:
                value = value[..., np.newaxis]  # a number instead of a vector of one
            parts.append(require_numbers({key: value}, key, self.name, dim))
        if len({part.shape[:-1] for part in parts}) > 1:
            shapes = {key: part.shape for key, part in zip(self.state, parts)}
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

    def __call__(self, data: Data) -> Data:
        actions = require_numbers(data, "actions", self.name, axes=2)
        if actions.shape[-1] < self.action_dim:
            found = f"{self.name}: 'actions' has shape {actions.shape}"
            raise ValueError(f"{found}; expected at least {self.action_dim} dimensions.")
        return {"actions": actions[..., : self.action_dim]}


@dataclasses.dataclass(frozen=True)
class RobotDataConfig(DataConfigFactory):
    """A robot that is described by a table."""

    inputs: ClassVar[RobotInputs]

    def __init_subclass__(cls) -> None:
        cls.robot = cls.inputs.name

    def robot_inputs(self, model_config: ModelConfig) -> RobotInputs:  # noqa: ARG002
        """Return the table for this model and these options; by default always the same."""
        return self.inputs

    def example(self) -> Data:
        return self.inputs.example()

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        table = self.robot_inputs(model_config)
        transforms, relative = Group([table], [table.outputs]), table.relative
        if relative is not None:
            transforms = transforms.push([DeltaActions(relative)], [AbsoluteActions(relative)])
        config = self.create_base_config(assets_dirs, model_config)
        config = dataclasses.replace(config, data_transforms=transforms)
        if table.columns is None:
            return config
        keys, chunks = (
            Group([table.repack(table.columns)]),
            (table.columns.get("actions", "actions"),),
        )
        return dataclasses.replace(config, repack_transforms=keys, action_sequence_keys=chunks)
