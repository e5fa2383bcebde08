"""Frames of a data set as a robot would send them to a policy, with what was recorded after them.

Dims: n frames, h steps of a chunk, a action dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from piston.config import DataConfig
from piston.data.dataset import LeRobotDataset
from piston.data.format import read_features, read_info
from piston.data.location import locate
from piston.data.metadata import Metadata
from piston.data.open import PADDING_KEY, repacked
from piston.data.pipeline import action_names, open_source
from piston.data.samples import PromptFromItem
from piston.inference.policy import Policy
from piston.inference.recording import ACTION, CHUNK, NO_PROMPT, recorded_column
from piston.inspection.results import evenly
from piston.transforms import Data, Group, RepackTransform, compose, flatten_dict


class StateDim(NamedTuple):
    """One number of the state: its name, the observation's key that has it, and where in it."""

    name: str
    key: str
    position: int

    def of(self, observation: Mapping[str, Any]) -> float:
        return float(np.ravel(observation[self.key])[self.position])


@dataclasses.dataclass(frozen=True)
class Frame:
    """One moment of an episode."""

    episode: int
    frame: int
    # In the robot's own keys, with the prompt.
    observation: Data
    # What the robot did from here on, in its own units; past the episode's end it is made up. In a
    # recording of a server it is the chunk that was answered.
    recorded: Float[np.ndarray, "h a"]
    is_real: Bool[np.ndarray, " h"]

    @property
    def prompt(self) -> str:
        return str(self.observation.get("prompt", ""))

    def error(self, chunks: Float[np.ndarray, "*n h a"]) -> Float[np.ndarray, "*n h a"]:
        """Return chunks minus what was recorded; past the episode's end it is not a number."""
        if chunks.shape[-2:] != self.recorded.shape:
            raise ValueError(
                f"The policy's chunks are {chunks.shape[-2:]} (steps, dimensions), the recorded "
                f"ones {self.recorded.shape}: they cannot be compared."
            )
        return np.where(self.is_real[:, None], chunks - self.recorded, np.nan)


class Frames:
    """`frames[episode, frame]`: the episode's number in the data set, and the frame in it."""

    def __init__(self, source: LeRobotDataset, pipeline: DataConfig) -> None:
        self.source, self.pipeline = source, pipeline
        tasks = (PromptFromItem(),) if pipeline.prompt_from_task else ()
        self._repack = compose((*tasks, *pipeline.repack_transforms.inputs))
        keys = pipeline.action_sequence_keys
        self._renamed = repacked(pipeline) or {key: key for key in source.keys}
        # What the robot is told, which it does not send; a policy writes its subtask itself.
        told = (name for name, key in self._renamed.items() if key in keys)
        self._told = {PADDING_KEY, "subtask", *told}
        bounds = zip(source.episodes, source.episode_bounds.tolist())
        self._bounds = {episode.index: (begin, end) for episode, (begin, end) in bounds}
        dim = sum(int(np.prod(source.metadata.features[key].shape)) for key in keys)
        self.action_names = action_names(source, pipeline, dim)

    @classmethod
    def open(
        cls,
        policy: Policy,
        repo_id: str | Path,
        episodes: str | None = None,
        *,
        needs_cameras: bool = True,
    ) -> Frames:
        """Open a data set of the policy's robot, or a recording of a server.

        Raises KeyError or ValueError if it does not have what the policy's pipeline takes from it.
        Without `needs_cameras`, the cameras that it does not have are left out.
        """
        pipeline = dataclasses.replace(
            policy.data,
            repo_id=str(repo_id),
            episodes=episodes,
            extra_datasets=(),
            set_shares=(),
            not_readable=None,
            subtasks=False,  # labels need not be there
        )
        root = locate(repo_id)
        if CHUNK in (features := read_features(read_info(root))):
            pipeline = _of_recording(policy, pipeline, features)
        if not needs_cameras:
            pipeline = _with_cameras(policy, pipeline, Metadata.read(root).cameras)
        source = open_source(pipeline, policy.model.config)
        assert isinstance(source, LeRobotDataset)  # its info has been read above
        return cls(source, pipeline)

    @property
    def is_recording(self) -> bool:
        """Whether a server recorded this: its frames are requests, not control steps."""
        return CHUNK in self.source.keys

    @property
    def episodes(self) -> dict[int, int]:
        """The number of frames of each episode."""
        return {index: end - begin for index, (begin, end) in self._bounds.items()}

    @property
    def fps(self) -> float:
        return self.source.fps

    @functools.cached_property
    def actions(self) -> Float[np.ndarray, "n a"]:
        """The recorded action of every frame of all episodes, in the robot's units."""
        columns = (self.source.column(key) for key in self.pipeline.action_sequence_keys)
        return np.concatenate([column.reshape(len(self.source), -1) for column in columns], axis=-1)

    def actions_of(self, episode: int) -> Float[np.ndarray, "n a"]:
        return self.actions[slice(*self._bounds_of(episode))]

    def item(self, episode: int, number: int) -> Data:
        """Return the data set's own item of a frame, with the chunk's padding."""
        begin, end = self._bounds_of(episode)
        if not 0 <= number < end - begin:
            raise LookupError(
                f"Episode {episode} has no frame {number}; it has 0 to {end - begin - 1}."
            )
        item = self.source[begin + number]
        return {**item, PADDING_KEY: item[f"{self.pipeline.action_sequence_keys[0]}_is_pad"]}

    def __getitem__(self, place: tuple[int, int]) -> Frame:
        return self.frame_of(self.item(*place))

    def frame_of(self, item: Data) -> Frame:
        """Return what the robot sent and did at an item that `item` returned."""
        padding = np.asarray(item[PADDING_KEY])
        own = self._repack(item)
        keys = self.pipeline.action_sequence_keys
        parts = [np.asarray(item[key], np.float32).reshape(len(padding), -1) for key in keys]
        recorded, is_real = np.concatenate(parts, axis=-1), ~padding
        if self.is_recording:
            recorded = np.asarray(item[CHUNK], np.float32)
            is_real = np.ones(len(recorded), bool)
            if own["prompt"] == NO_PROMPT:
                del own["prompt"]
        return Frame(
            episode=int(item["episode_index"]),
            frame=int(item["frame_index"]),
            observation={key: value for key, value in own.items() if key not in self._told},
            recorded=recorded,
            is_real=is_real,
        )

    @property
    def tasks(self) -> list[str]:
        """The sentences of the episodes."""
        known = self.source.metadata.tasks
        numbers = np.unique(self.source.column("task_index"))
        found = [known[number] for number in numbers.tolist() if number in known]
        return [task for task in found if not (self.is_recording and task == NO_PROMPT)]

    def action_scale(self) -> Float[np.ndarray, " a"]:
        """Return the standard deviation of every action, in the robot's units.

        It is at least `norm_floor`, as in training.
        """
        return np.maximum(self.actions.std(0, dtype=np.float64), self.pipeline.norm_floor)

    def state_values(self, dim: StateDim) -> Float[np.ndarray, " n"] | None:
        """Return a number of the state in all frames; None if it is not a column of the set."""
        key = self._renamed.get(dim.key)
        if key not in self.source.keys:
            return None
        column = self.source.column(key)
        return column.reshape(len(column), -1)[:, dim.position].astype(np.float64)

    def _bounds_of(self, episode: int) -> tuple[int, int]:
        if episode not in self._bounds:
            known = f"{min(self._bounds)} to {max(self._bounds)}"
            raise LookupError(f"There is no episode {episode}; the data set has {known}.")
        return self._bounds[episode]

    def spread_out(self, count: int) -> list[tuple[int, int]]:
        """Return places from as many episodes as possible, at varying moments in them."""
        episodes = list(self._bounds)
        chosen = evenly(len(episodes), count)
        places = []
        for number in range(count):
            episode = episodes[chosen[number % len(chosen)]]
            begin, end = self._bounds[episode]
            # The golden ratio spreads any number of moments evenly over the episodes' lengths.
            share = (0.5 + number * 0.6180339887) % 1
            places.append((episode, int(share * (end - begin))))
        return sorted(set(places))


def _of_recording(policy: Policy, pipeline: DataConfig, features: Mapping[str, Any]) -> DataConfig:
    """Return the pipeline for the columns that a server records of the policy's robot."""

    def columns(described: Mapping[str, Any], path: str = "") -> Data:
        found: Data = {}
        for name, about in described.items():
            if "dtype" not in about:
                found[name] = columns(about, f"{path}{name}/")
            elif about["dtype"] != "str":
                column = recorded_column(f"{path}{name}", is_image="slot" in about)
                if about["required"] or column in features:
                    found[name] = column
        return found

    if "observation" not in policy.metadata:
        raise ValueError(
            f"{pipeline.repo_id} is a recording of a server, but the policy does not describe its "
            "robot's observation, which is needed to read it."
        )
    structure = {**columns(policy.metadata["observation"]), "actions": ACTION}
    about = {key: value for key, value in pipeline.robot_metadata.items() if key != "control_hz"}
    return dataclasses.replace(
        pipeline,
        repack_transforms=Group([RepackTransform(structure)]),
        action_sequence_keys=(ACTION,),
        prompt_from_task=True,
        robot_metadata=about,  # a recording has as many frames per second as there were requests
    )


def _with_cameras(policy: Policy, pipeline: DataConfig, cameras: Sequence[str]) -> DataConfig:
    """Return the pipeline without the cameras that a data set does not have."""
    transforms = pipeline.repack_transforms.inputs
    if not transforms or not isinstance(transforms[0], RepackTransform):
        return pipeline
    paths = camera_paths(policy).values()

    def kept(structure: Mapping[str, Any], path: str = "") -> Data:
        found: Data = {}
        for name, key in structure.items():
            if not isinstance(key, Mapping):
                if f"{path}{name}" not in paths or key in cameras:
                    found[name] = key
            elif inner := kept(key, f"{path}{name}/"):
                found[name] = inner
        return found

    repack = RepackTransform(kept(transforms[0].structure))
    return dataclasses.replace(pipeline, repack_transforms=Group([repack, *transforms[1:]]))


def state_dims(policy: Policy, observation: Mapping[str, Any]) -> list[StateDim]:
    """Return the numbers of an observation's state, in the policy's order."""
    described = policy.metadata.get("observation", {})
    vectors = {
        key: np.asarray(value)
        for key, value in observation.items()
        if not isinstance(value, str | Mapping) and np.ndim(value) <= 1
    }
    known = [key for key in described if key in vectors]
    dims: list[StateDim] = []
    for key in (*known, *(key for key in vectors if key not in known)):
        names = described.get(key, {}).get("names")
        for position in range(vectors[key].size):
            name = names[position] if names else f"state_{len(dims)}"
            dims.append(StateDim(name, key, position))
    return dims


def camera_names(policy: Policy) -> dict[str, str]:
    """Return the robot's name of the camera in each slot of the model; unknown ones are left out.

    Slots without a camera of this robot are not among them.
    """
    return {slot: path.removeprefix("images/") for slot, path in camera_paths(policy).items()}


def camera_paths(policy: Policy) -> dict[str, str]:
    """Return where the camera of each slot is in the robot's observation, as `images/cam_high`."""
    described = flatten_dict(policy.metadata.get("observation", {}))
    return {
        slot: path.removesuffix("/slot")
        for path, slot in described.items()
        if path.endswith("/slot")
    }
