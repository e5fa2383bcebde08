"""From a frame of a data set to what the model sees: the data set's item through all transforms.

    item → prompt from the task → repack → robot → normalize → model transforms → sample

Opens the data sets that a configuration names, with the cameras that its repack transform uses and
no others. Batches and their order are left to `loader`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from piston.config import DataConfig
from piston.data.cache import CachedFrames
from piston.data.dataset import LeRobotDataset, open_dataset
from piston.data.format import DERIVED, Episode, Feature, dimension_names, locate
from piston.data.metadata import Metadata
from piston.data.mixture import EpisodeChoice, Samples, shorten, split_episodes
from piston.data.problems import EpisodeError, unknown_key
from piston.models.configs import ModelConfig
from piston.transforms import Data, RepackTransform, compose, flatten_dict

logger = logging.getLogger(__name__)

PADDING_KEY = "action_is_pad"
# What a sample holds of an item: what models take, and where it came from.
MODEL_KEYS = (
    *("image", "image_mask", "state", "actions", PADDING_KEY),
    *("tokenized_prompt", "tokenized_prompt_mask", "token_ar_mask", "token_loss_mask"),
)
PLACE_KEYS = ("set_index", "episode_index", "frame_index", "index")


def open_training_data(
    config: DataConfig,
    model: ModelConfig,
    *,
    source: LeRobotDataset | None = None,
    episodes: EpisodeChoice = None,
    cache_frames: bool = False,
) -> Samples:
    """Return what a model sees of some episodes of one data set.

    `source` is the data set of `config` if it is open already. With `cache_frames`, frames that the
    cache lacks are decoded now.
    """
    if config.fake:
        return FakeDataset(model)
    dataset = (source or open_source(config, model)).select(episodes)
    plain = TrainingData(dataset, config)
    if not cache_frames:
        return plain
    frames = CachedFrames(dataset, model.image_size)
    with advising(config):
        frames.build()
    cached = TrainingData(frames, config)
    check_cache(plain, cached)
    return cached


def open_sources(config: DataConfig, model: ModelConfig) -> list[LeRobotDataset]:
    """Open all data sets of a pipeline. Raise ValueError if their robots or rates differ."""
    sets = config.each_set()
    first, *others = sources = [open_source(one, model) for one in sets]
    for one, other in zip(sets[1:], others):
        if differences := _differences(first.metadata, other.metadata, keys_used(config)):
            raise ValueError(
                f"{one.repo_id} was not recorded like {config.repo_id}: {'; '.join(differences)}. "
                "Data sets that are used together need the same features and control rate; convert "
                "the one that differs, or remove it from --data.extra-datasets."
            )
    return sources


def _differences(first: Metadata, other: Metadata, used: Iterable[str] | None) -> list[str]:
    """Return why two data sets cannot be used together; differences in names are only logged."""
    found = []
    if other.fps != first.fps:
        found.append(f"its rate is {other.fps:g} frames per second, expected {first.fps:g}")
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
            found.append(f"{key!r} has the shape {theirs.shape}, expected {ours.shape}")
        elif not ours.is_camera and ours.names and theirs.names and theirs.names != ours.names:
            logger.warning(
                "%s names the dimensions of %r %s, %s names them %s: do they mean the same?",
                *(other.root, key, theirs.names, first.root, ours.names),
            )
    return found


def split_sources(
    sources: Sequence[LeRobotDataset], num_held_out: int, *, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Return the episodes of each data set to train on and to validate on, which may be none.

    If a data set occurs twice, an episode is held out of both, and validated on in the first only.
    """
    if not num_held_out:
        return [([episode.index for episode in source.episodes], []) for source in sources]
    roots = [source.metadata.root.resolve() for source in sources]
    known: dict[Path, dict[int, Episode]] = {root: {} for root in roots}
    for source, root in zip(sources, roots):
        known[root] |= {episode.index: episode for episode in source.episodes}
    held_out: dict[Path, list[int]] = {}
    for root, episodes in known.items():
        try:
            held_out[root] = split_episodes([*episodes.values()], num_held_out, seed=seed)[1]
        except ValueError as error:
            error.add_note(f"in {root}")
            raise
    remaining = {root: set(episodes) for root, episodes in held_out.items()}
    parts = []
    for source, root in zip(sources, roots):
        own = {episode.index for episode in source.episodes}
        if not (kept := own.difference(held_out[root])):
            raise ValueError(f"All episodes chosen of {root} ({shorten(own)}) are held out.")
        parts.append((sorted(kept), sorted(own & remaining[root])))
        remaining[root] -= own
    return parts


def open_source(config: DataConfig, model: ModelConfig) -> LeRobotDataset:
    """Open the data set of a pipeline, with actions as chunks of the model's horizon."""
    if config.not_readable is not None:
        raise ValueError(config.not_readable)
    if config.repo_id is None:
        raise ValueError("No data set is named: give --data.repo-id, a folder or owner/name.")
    metadata = Metadata.read(locate(config.repo_id))
    rate = config.robot_metadata.get("control_hz", metadata.fps)
    if not math.isclose(rate, metadata.fps, rel_tol=1e-3):
        logger.warning(
            "%s has %g frames per second, the robot %g control steps: a chunk lasts longer or "
            "shorter on the robot than in the data.",
            *(config.repo_id, metadata.fps, rate),
        )
    features, used = metadata.features, keys_used(config)
    steps = config.steps_read(model.action_horizon)
    columns = [name for name, one in features.items() if not one.is_camera]
    # Cameras without files are left to `open_dataset`, which names the files.
    _require_keys(config, metadata, columns, known=(*features, *DERIVED))
    with advising(config):
        dataset = open_dataset(
            metadata,
            sequences=dict.fromkeys(config.action_sequence_keys, steps),
            episodes=config.episodes,
            cameras=used and [key for key in used if key in features and features[key].is_camera],
        )
    # What is declared may have no data.
    _require_keys(config, metadata, dataset.keys, known=(*dataset.cameras, *dataset.keys))
    return dataset


def _require_keys(
    config: DataConfig, metadata: Metadata, columns: Sequence[str], known: Iterable[str]
) -> None:
    """Raise KeyError if a key that the pipeline takes from the data set is not known."""
    actions = config.action_sequence_keys
    # What is added to the items of a data set.
    added = {"task", "prompt", PADDING_KEY, *(f"{key}_is_pad" for key in actions)}
    found = {*known, *added}
    taken = [*zip(actions, actions), *(repacked(config) or {}).items()]
    for path, key in taken:
        if key not in found:
            raise unknown_key(
                *(str(metadata.root), key, metadata.cameras, columns),
                is_camera="image" in path,
                used=[source for _, source in taken],
            )


def leave_out(config: DataConfig, episodes: Iterable[int | str]) -> str:
    """Return the option that also leaves out these episodes, for a message."""
    exclusions = ",".join(f"!{episode}" for episode in episodes)
    choice = f"{config.episodes},{exclusions}" if config.episodes else exclusions
    if config.set_index:
        return f"'{config.repo_id}#{choice}' in --data.extra-datasets"
    option = f"--data.episodes '{choice}'"
    if config.extra_datasets:  # which of the sets is not known
        option += f", or of another set 'SET#{exclusions}' in --data.extra-datasets"
    return option


def action_names(source: LeRobotDataset, config: DataConfig, dim: int) -> tuple[str, ...]:
    """Return names of the actions' dimensions: the data set's, else the robot's, else numbers."""
    features = [source.metadata.features[key] for key in config.action_sequence_keys]
    robot = Feature(
        "actions", "float32", (dim,), config.robot_metadata.get("actions", {}).get("names")
    )
    numbered, declared, known = (
        dimension_names(those, dim, "action") for those in ([], features, [robot])
    )
    return tuple(known if declared == numbered else declared)


@contextlib.contextmanager
def advising(config: DataConfig) -> Iterator[None]:
    """Add to an error which data set it is about, and how to leave out an episode."""
    try:
        yield
    except ValueError as error:
        advice = ""
        if isinstance(error, EpisodeError):
            advice = f". To leave the episode out: {leave_out(config, [error.episode])}"
        error.add_note(f"in {config.repo_id}{advice}")
        raise


def keys_used(config: DataConfig) -> list[str] | None:
    """Return the data set's keys that the repack transform names; None if they are not known."""
    names = repacked(config)
    return None if names is None else list(dict.fromkeys(names.values()))


def repacked(config: DataConfig) -> dict[str, str] | None:
    """Return the data set's keys by the names that the repack transform gives them."""
    first = next(iter(config.repack_transforms.inputs), None)
    return flatten_dict(first.structure) if isinstance(first, RepackTransform) else None


class TrainingData:
    """`data[i]` is frame i as the model sees it: NumPy arrays, images uint8.

    `action_is_pad` (horizon,) marks steps beyond the end of the episode. Errors name the data set,
    the episode and the frame.
    """

    def __init__(self, dataset: LeRobotDataset | CachedFrames, config: DataConfig) -> None:
        self._dataset = dataset
        self._config = config
        tasks = (PromptFromItem(),) if config.prompt_from_task else ()
        self._transform = compose((*tasks, *config.input_transforms(training=True)))
        self._padding = f"{config.action_sequence_keys[0]}_is_pad"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with advising(self._config):
            item = self._dataset[index]
        try:
            padding = np.asarray(item[self._padding])
            sample = self._transform({**item, PADDING_KEY: padding})
            num_steps = np.shape(sample["actions"])[-2]
            if PADDING_KEY not in sample and num_steps != len(padding):
                raise ValueError(
                    f"The robot's transforms changed the chunk from {len(padding)} steps to "
                    f"{num_steps} and dropped {PADDING_KEY!r}: return it with the actions, with "
                    "the same steps."
                )
            sample = {PADDING_KEY: padding, **sample}
            kept = {key: sample[key] for key in MODEL_KEYS if key in sample}
            for key in ("state", "actions"):
                kept[key] = np.asarray(kept[key], np.float32)
            place = {**item, "set_index": self._config.set_index}
            return kept | {key: np.int64(place[key]) for key in PLACE_KEYS}
        except Exception as error:
            error.add_note(
                f"in frame {item['frame_index']} of episode {item['episode_index']} of "
                f"{self._config.repo_id}"
            )
            raise


@dataclasses.dataclass(frozen=True)
class PromptFromItem:
    """Take the task of an item as its prompt."""

    def __call__(self, data: Data) -> Data:
        return {**data, "prompt": data["task"]}


def check_cache(plain: TrainingData, cached: TrainingData) -> None:
    """Raise ValueError if it matters that cached frames are resized before other transforms."""
    for index in sorted({0, len(plain) // 2, len(plain) - 1}):
        expected, found = plain[index]["image"], cached[index]["image"]
        for name, image in expected.items():
            if not np.array_equal(found[name], image):
                raise ValueError(
                    f"With cached frames, camera {name!r} of frame {index} looks different: the "
                    "robot's transforms crop or rotate images before they are resized. Train "
                    "without the cache, or crop and rotate when recording."
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
        images = {name: random.integers(256, size=pixels, dtype=np.uint8) for name in model.cameras}
        state = random.uniform(-1, 1, model.action_dim).astype(np.float32)
        actions = random.uniform(-1, 1, chunk).astype(np.float32)
        # Random tokens up to a random length; a model may have to write the second half.
        longest = model.prompt_length
        length = int(random.integers(longest // 2, longest + 1))
        mask = np.arange(longest) < length
        tokens = random.integers(1, model.vocab_size, longest).astype(np.int32)
        prompt = {"tokenized_prompt": np.where(mask, tokens, 0), "tokenized_prompt_mask": mask}
        if model.action_tokenizer is not None:
            written = mask & (np.arange(longest) >= length // 2)
            prompt |= {"token_ar_mask": written.astype(np.int32), "token_loss_mask": written}
        return {
            "image": images,
            "image_mask": dict.fromkeys(model.cameras, np.True_),
            "state": state,
            "actions": actions,
            PADDING_KEY: np.zeros(model.action_horizon, bool),
            **prompt,
            **dict.fromkeys(("set_index", "episode_index"), np.int64(0)),
            **dict.fromkeys(("frame_index", "index"), np.int64(index)),
        }
