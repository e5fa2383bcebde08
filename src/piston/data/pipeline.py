"""From a frame of a data set to what the model sees: the data set's item through all transforms.

    item → prompt from the task → repack → robot → normalize → model transforms → sample

Opens the data set that a configuration names, with the cameras that its repack transform uses and
no others. Knows nothing of batches or of order.

Dims: h horizon, a action dim, s state dim, l prompt length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from piston.config import DataConfig
from piston.data.cache import CachedFrames
from piston.data.dataset import LeRobotDataset, open_dataset
from piston.data.episodes import EpisodeError
from piston.data.location import locate
from piston.data.metadata import DERIVED, Metadata
from piston.data.subsets import (
    EpisodeChoice,
    Samples,
    choose_episodes,
    split_sets,
    without_episodes,
)
from piston.models.configs import ModelConfig, Pi0FASTConfig
from piston.transforms.base import Data, Transform, compose
from piston.transforms.keys import RepackTransform, flatten_dict
from piston.transforms.prompts import PromptFromLeRobotTask

logger = logging.getLogger(__name__)

PADDING_KEY = "action_is_pad"
# What a sample holds of an item: what models take, and where it came from.
MODEL_KEYS = (
    "image",
    "image_mask",
    "state",
    "actions",
    PADDING_KEY,
    "tokenized_prompt",
    "tokenized_prompt_mask",
    "token_ar_mask",
    "token_loss_mask",
)
PLACE_KEYS = ("set_index", "episode_index", "frame_index", "index")


class Items(Protocol):
    """What is needed of a data set: its items, and the table of its tasks."""

    metadata: Any

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


def open_training_data(
    config: DataConfig,
    model: ModelConfig,
    *,
    episodes: EpisodeChoice = None,
    cache_frames: bool = False,
) -> Samples:
    """What a model sees of one data set. `cache_frames` builds the cache where needed."""
    if config.fake:
        return FakeDataset(model)
    dataset = open_source(config, model, episodes=episodes)
    plain = TrainingData(dataset, config)
    if not cache_frames:
        return plain
    same = [episode.index for episode in dataset.episodes]
    numbers = open_source(config, model, episodes=same, images=False)
    frames = CachedFrames(dataset, numbers, model.image_size)
    with advising(config):
        frames.build()
    cached = TrainingData(frames, config)
    check_cache(plain, cached)
    return cached


def open_sources(config: DataConfig, model: ModelConfig) -> list[LeRobotDataset]:
    """All data sets of a pipeline. They have to be of one robot, at one rate."""
    sets = config.each_set()
    first, *others = sources = [open_source(one, model) for one in sets]
    for one, other in zip(sets[1:], others):
        if differences := _differences(first.metadata, other.metadata, keys_used(config)):
            raise ValueError(
                f"{one.repo_id} was not recorded like {config.repo_id}: {'; '.join(differences)}. "
                "Sets that are trained on together share the robot's transforms and one control "
                "rate; convert the one that differs, or leave it out of --data.more-sets."
            )
    return sources


def _differences(first: Metadata, other: Metadata, used: Iterable[str] | None) -> list[str]:
    """What keeps two sets from being read alike; what may only be named otherwise is logged."""
    found = []
    if other.fps != first.fps:
        found.append(f"its rate is {other.fps:g} frames per second, expected is {first.fps:g}")
    if other.robot_type != first.robot_type:
        logger.warning(
            "%s was recorded with %s, %s with %s: are they the same robot?",
            *(other.root, other.robot_type, first.root, first.robot_type),
        )
    for key in first.features if used is None else used:
        ours, theirs = first.features.get(key), other.features.get(key)
        if ours is None or key in DERIVED:
            continue
        if theirs is None:
            found.append(f"it has no {key!r}")
        elif not ours.is_camera and theirs.shape != ours.shape:
            found.append(f"{key!r} has the shape {theirs.shape}, expected is {ours.shape}")
        elif not ours.is_camera and ours.names and theirs.names and theirs.names != ours.names:
            logger.warning(
                "%s calls the dimensions of %r %s, %s calls them %s: do they mean the same?",
                *(other.root, key, theirs.names, first.root, ours.names),
            )
    return found


def split_sources(
    sources: Sequence[LeRobotDataset], held_out: int, *, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Episodes of each source to train on and to validate on."""
    named = [(source.metadata.root.resolve(), source.episodes) for source in sources]
    return split_sets(named, held_out, seed=seed)


def open_source(
    config: DataConfig, model: ModelConfig, *, episodes: EpisodeChoice = None, images: bool = True
) -> LeRobotDataset:
    """The data set of a pipeline, its actions as chunks of the model's horizon."""
    if config.not_readable is not None:
        raise ValueError(config.not_readable)
    if config.repo_id is None:
        raise ValueError("No data set is named: give --data.repo-id, a folder or owner/name.")
    root = locate(config.repo_id)
    metadata = Metadata.read(root)
    try:
        chosen = _chosen(metadata, config, episodes)
    except ValueError as error:
        error.add_note(f"in {config.repo_id}")
        raise
    return open_dataset(
        root,
        sequences=dict.fromkeys(
            config.action_sequence_keys, config.steps_read(model.action_horizon)
        ),
        episodes=chosen,
        cameras=_cameras_used(metadata, config) if images else (),
    )


def leave_out(config: DataConfig, episodes: Iterable[int | str]) -> str:
    """The option that leaves these episodes out as well, for a message."""
    episodes = list(episodes)
    choice = without_episodes(config.episodes, episodes)
    if config.set_index:
        return f"'{config.repo_id}#{choice}' in --data.more-sets"
    option = f"--data.episodes '{choice}'"
    if config.more_sets:  # it may be any of them
        others = without_episodes(None, episodes)
        option += f", or of another set 'SET#{others}' in --data.more-sets"
    return option


@contextlib.contextmanager
def advising(config: DataConfig) -> Iterator[None]:
    """Adds to an error inside an episode which set it is, and how to do without the episode."""
    try:
        yield
    except EpisodeError as error:
        option = leave_out(config, [error.episode])
        error.add_note(f"in {config.repo_id}. To leave the episode out: {option}")
        raise


def _chosen(metadata: Metadata, config: DataConfig, episodes: EpisodeChoice) -> EpisodeChoice:
    """Of the episodes that the configuration names, those asked for."""
    if config.episodes is None:
        return episodes
    named = choose_episodes(metadata.episodes, config.episodes)
    return [episode.index for episode in choose_episodes(named, episodes)]


def _cameras_used(metadata: Metadata, config: DataConfig) -> list[str] | None:
    features, used = metadata.features, keys_used(config)
    if used is None:
        return None
    return [key for key in used if key in features and features[key].is_camera]


def keys_used(config: DataConfig) -> list[str] | None:
    """The data set's keys that the repack transform names; None where it is not known."""
    first = next(iter(config.repack_transforms.inputs), None)
    if not isinstance(first, RepackTransform):
        return None
    return list(dict.fromkeys(flatten_dict(first.structure).values()))


class TrainingData:
    """`data[i]` is frame i as the model sees it: NumPy arrays, images uint8.

    `action_is_pad` (h,) marks steps beyond the end of the episode. An error names the data set, the
    episode and the frame.
    """

    def __init__(self, dataset: Items, config: DataConfig) -> None:
        self._dataset = dataset
        self._config, self._name = config, str(config.repo_id)
        tasks: tuple[Transform, ...] = ()
        if config.prompt_from_task:
            tasks = (PromptFromItem(PromptFromLeRobotTask(dataset.metadata.tasks)),)
        self._transform = compose((*tasks, *config.input_transforms(repack=True)))
        self._padding = f"{config.action_sequence_keys[0]}_is_pad"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with advising(self._config):
            item = self._dataset[index]
        try:
            padding = np.asarray(item[self._padding])
            sample = self._transform({**item, PADDING_KEY: padding})
            place = {**item, "set_index": self._config.set_index}
            return _checked(sample, padding) | {key: np.int64(place[key]) for key in PLACE_KEYS}
        except Exception as error:
            error.add_note(
                f"in frame {item['frame_index']} of episode {item['episode_index']} of {self._name}"
            )
            raise

    def preload(self) -> None:
        """Read what all workers share, before they are forked."""
        with advising(self._config):
            for key in getattr(self._dataset, "keys", ()):
                self._dataset.column(key)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class PromptFromItem:
    """A data set says the task of an item also where its table of tasks does not know it."""

    otherwise: PromptFromLeRobotTask

    def __call__(self, data: Data) -> Data:
        return {**data, "prompt": data["task"]} if "task" in data else self.otherwise(data)


def _checked(sample: Data, padding: np.ndarray) -> dict[str, Any]:
    """Only what models take; floating-point numbers as float32; the padding mask always there."""
    if PADDING_KEY not in sample and np.shape(sample["actions"])[-2] != len(padding):
        raise ValueError(
            f"The robot's transforms changed the chunk from {len(padding)} steps to "
            f"{np.shape(sample['actions'])[-2]} and dropped {PADDING_KEY!r}: return it with the "
            "actions, thinned out like them."
        )
    sample = {PADDING_KEY: padding, **sample}
    kept = {key: sample[key] for key in MODEL_KEYS if key in sample}
    for key in ("state", "actions"):
        kept[key] = np.asarray(kept[key], np.float32)
    return kept


def check_cache(plain: TrainingData, cached: TrainingData) -> None:
    """Cached frames are resized before the robot's transforms: those must not mind."""
    for index in sorted({0, len(plain) // 2, len(plain) - 1}):
        expected, found = plain[index]["image"], cached[index]["image"]
        for name, image in expected.items():
            if not np.array_equal(found[name], image):
                raise ValueError(
                    f"With cached frames, camera {name!r} of frame {index} looks different: the "
                    "robot's transforms change images (crop, turn) before they are resized. Train "
                    "without the cache, or do that when recording."
                )


@dataclasses.dataclass(frozen=True)
class FakeDataset:
    """Random samples in the model's shapes; sample i is always the same."""

    model: ModelConfig
    length: int = 1024

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(f"There is no sample {index}; there are {self.length}.")
        model, random = self.model, np.random.default_rng([2024, index])
        pixels = (model.image_size, model.image_size, 3)
        chunk = (model.action_horizon, model.action_dim)
        return {
            "image": {
                name: random.integers(256, size=pixels, dtype=np.uint8) for name in model.cameras
            },
            "image_mask": dict.fromkeys(model.cameras, np.True_),
            "state": random.uniform(-1, 1, model.action_dim).astype(np.float32),
            "actions": random.uniform(-1, 1, chunk).astype(np.float32),
            PADDING_KEY: np.zeros(model.action_horizon, bool),
            **self._prompt(random),
            **dict.fromkeys(PLACE_KEYS, np.int64(0))
            | dict.fromkeys(("frame_index", "index"), np.int64(index)),
        }

    def _prompt(self, random: np.random.Generator) -> Mapping[str, np.ndarray]:
        """Random tokens up to a random length; for π0-FAST the second half of them is written."""
        longest = self.model.prompt_length
        length = int(random.integers(longest // 2, longest + 1))
        mask = np.arange(longest) < length
        tokens = random.integers(1, self.model.vocab_size, longest).astype(np.int32)
        prompt = {"tokenized_prompt": np.where(mask, tokens, 0), "tokenized_prompt_mask": mask}
        if isinstance(self.model, Pi0FASTConfig):
            written = mask & (np.arange(longest) >= length // 2)
            prompt |= {"token_ar_mask": written.astype(np.int32), "token_loss_mask": written}
        return prompt
