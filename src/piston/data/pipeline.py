"""The data sets of a run: opened, checked against their pipelines, split, and as training data.

Data sets are opened with the cameras that the pipeline's repack transform uses and no others. What
a model sees of a frame is left to `samples`, batches and their order to `loader`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from piston.config import DataConfig
from piston.data.cache import CachedFrames
from piston.data.format import DERIVED, Feature, dimension_names
from piston.data.location import locate
from piston.data.mixture import EpisodeChoice, shorten, split_episodes
from piston.data.open import keys_used, read_for_pipeline
from piston.data.problems import advising
from piston.data.protocol import Dataset, Episode, Samples
from piston.data.samples import FakeDataset, TrainingData, check_cache
from piston.data.view import features_of, select
from piston.models.configs import ModelConfig
from piston.transforms.prompts import TokenizePrompt

logger = logging.getLogger(__name__)


def open_training_data(
    config: DataConfig,
    model: ModelConfig,
    *,
    source: Dataset | None = None,
    episodes: EpisodeChoice = None,
    cache_frames: bool = False,
) -> Samples:
    """Return what a model sees of some episodes of one data set.

    `source` is the data set of `config` if it is open already. With `cache_frames`, frames that the
    cache lacks are decoded now; pictures with questions are decoded when they are used.
    """
    if config.fake:
        return FakeDataset(model)
    if source is None:
        [source] = open_sources([config], model)
    dataset = select(source, episodes)
    if not len(dataset):
        raise ValueError(
            f"The episodes of {config.title} that are not held out have no questions. Choose "
            f"others with {config.flag('episodes')}, or hold out fewer."
        )
    plain = TrainingData(dataset, config, model)
    if not cache_frames or not config.has_actions:
        return plain
    frames = CachedFrames(dataset, model.image_size)
    with advising(config):
        frames.build()
    cached = TrainingData(frames, config, model)
    check_cache(plain, cached)
    return cached


def open_sources(pipelines: Sequence[DataConfig], model: ModelConfig) -> list[Dataset]:
    """Open all data sets. Raise ValueError if those of one robot differ in features or rates."""
    sources: list[Dataset] = []
    for one in pipelines:
        try:
            sources.append(open_source(one, model))
        except (OSError, KeyError) as error:  # `advising` adds to others where they are from
            if one.entry:
                error.add_note(f"in the data of {one.entry}")
            raise
    firsts: dict[str, tuple[DataConfig, Dataset]] = {}
    for one, source in zip(pipelines, sources):
        if not one.has_actions:
            continue
        config, first = firsts.setdefault(one.entry, (one, source))
        if differences := _differences(first, source, keys_used(config)):
            raise ValueError(
                f"{one.title} was not recorded like {config.repo_id}: {'; '.join(differences)}. "
                "Data sets that are used together need the same features and control rate; convert "
                f"the one that differs, or remove it from {one.flag('extra-datasets')}."
            )
    _require_subtasks(pipelines, sources)
    return sources


def _require_subtasks(pipelines: Sequence[DataConfig], sources: Sequence[Dataset]) -> None:
    """Raise ValueError if no set of a robot with subtasks has labels; warn of single ones."""
    labelled: dict[str, list[tuple[DataConfig, bool]]] = {}
    for one, source in zip(pipelines, sources):
        if one.subtasks:
            has_labels = "subtask" in source.texts and bool(source.texts["subtask"].values)
            labelled.setdefault(one.entry, []).append((one, has_labels))
    for sets in labelled.values():
        first, without = sets[0][0], [one.title for one, has_labels in sets if not has_labels]
        if len(without) == len(sets):
            raise ValueError(
                f"{', '.join(without)}: there are no labels of subtasks (neither "
                f"language_persistent nor subtask_index), but {first.flag('subtasks')} is set. "
                f"Label them, or set {first.flag('no-subtasks')}."
            )
        if without:
            logger.warning("%s: no labels of subtasks; trained without text", ", ".join(without))


def _differences(first: Dataset, other: Dataset, used: Iterable[str] | None) -> list[str]:
    """Return why two data sets cannot be used together; differences in names are only logged."""
    found = []
    our_features, their_features = features_of(first), features_of(other)
    our_robot, their_robot = (getattr(one, "robot_type", None) for one in (first, other))
    if other.fps != first.fps:
        found.append(f"its rate is {other.fps:g} frames per second, expected {first.fps:g}")
    if their_robot != our_robot:
        logger.warning(
            "%s was recorded with %s, %s with %s: are they the same robot?",
            *(other.root, their_robot, first.root, our_robot),
        )
    for key in our_features if used is None else used:
        ours, theirs = our_features.get(key), their_features.get(key)
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
    pipelines: Sequence[DataConfig], sources: Sequence[Dataset], num_held_out: int, *, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Return the episodes of each data set to train on and to validate on, which may be none.

    If a data set occurs twice, an episode is held out of both, and validated on in the first robot
    only. A table of pictures has no episodes; all of it is trained on.
    """
    if not num_held_out:
        return [([one.index for one in source.episodes], []) for source in sources]
    recorded = [source for source in sources if source.episodes]
    roots = [source.root.resolve() for source in recorded]
    known: dict[Path, dict[int, Episode]] = {root: {} for root in roots}
    for source, root in zip(recorded, roots):
        known[root] |= {episode.index: episode for episode in source.episodes}
    held_out: dict[Path, list[int]] = {}
    for root, episodes in known.items():
        try:
            held_out[root] = split_episodes([*episodes.values()], num_held_out, seed=seed)[1]
        except ValueError as error:
            error.add_note(f"in {root}")
            raise
    remaining = {root: set(episodes) for root, episodes in held_out.items()}
    parts: list[tuple[list[int], list[int]]] = []
    for pipeline, one in zip(pipelines, sources, strict=True):
        if not one.episodes:
            parts.append(([], []))
            continue
        root, own = one.root.resolve(), {episode.index for episode in one.episodes}
        if not (kept := own.difference(held_out[root])):
            raise ValueError(f"All episodes chosen of {root} ({shorten(own)}) are held out.")
        chosen = own & remaining[root] if pipeline.has_actions else set()
        parts.append((sorted(kept), sorted(chosen)))
        remaining[root] -= chosen
    return parts


def open_source(config: DataConfig, model: ModelConfig) -> Dataset:
    """Open what a pipeline reads, with actions as chunks of the model's horizon."""
    if config.not_readable is not None:
        raise ValueError(config.not_readable)
    if config.repo_id is None:
        flag = config.flag("repo-id")
        raise ValueError(f"No data set is named: give {flag}, a folder or owner/name.")
    root, num_steps = locate(config.repo_id), config.steps_read(model.action_horizon)
    dataset = read_for_pipeline(root, config, num_steps)
    rate = config.robot_metadata.get("control_hz", dataset.fps)
    if config.has_actions and not math.isclose(rate, dataset.fps, rel_tol=1e-3):
        logger.warning(
            "%s has %g frames per second, the robot %g control steps: a chunk lasts longer or "
            "shorter on the robot than in the data.",
            *(config.title, dataset.fps, rate),
        )
    return dataset


def require_short_texts(source: Dataset, config: DataConfig) -> None:
    """Raise ValueError if a subtask or an answer has more tokens than the model keeps for it."""
    if config.has_actions and not config.subtasks:
        return
    kind = "subtask" if config.has_actions else "answer"
    texts = source.texts[kind].values if kind in source.texts else ()
    for one in config.model_transforms.inputs:
        if isinstance(one, TokenizePrompt) and one.response is not None:
            with advising(config):
                for text in texts:
                    one.response.text(one.tokenizer, text, kind)


def action_names(source: Dataset, config: DataConfig, dim: int) -> tuple[str, ...]:
    """Return names of the actions' dimensions: the data set's, else the robot's, else numbers."""
    known = features_of(source)
    features = [known[key] for key in config.action_sequence_keys]
    robot = Feature(
        "actions", "float32", (dim,), config.robot_metadata.get("actions", {}).get("names")
    )
    numbered, declared, stated = (
        dimension_names(those, dim, "action") for those in ([], features, [robot])
    )
    return tuple(stated if declared == numbered else declared)
