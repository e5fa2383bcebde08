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
from piston.data.dataset import LeRobotDataset, open_dataset
from piston.data.format import DERIVED, INFO, Episode, Feature, dimension_names, locate
from piston.data.image_text import ImageTextSet, questions_of
from piston.data.metadata import Metadata
from piston.data.mixture import EpisodeChoice, Samples, shorten, split_episodes
from piston.data.problems import advising, unknown_key
from piston.data.samples import PADDING_KEY, FakeDataset, TrainingData, check_cache
from piston.models.configs import ModelConfig
from piston.transforms import RepackTransform, flatten_dict
from piston.transforms.prompts import TokenizePrompt

logger = logging.getLogger(__name__)

# What a pipeline reads: a LeRobot data set, or a table of pictures with questions.
Source = LeRobotDataset | ImageTextSet


def open_training_data(
    config: DataConfig,
    model: ModelConfig,
    *,
    source: Source | None = None,
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
    if not isinstance(source, LeRobotDataset):
        return TrainingData(source, config, model)
    dataset = source.select(episodes)
    if not config.has_actions:
        questions = questions_of(dataset)
        if not questions:
            raise ValueError(
                f"The episodes of {config.title} that are not held out have no questions. Choose "
                f"others with {config.flag('episodes')}, or hold out fewer."
            )
        return TrainingData(questions, config, model)
    plain = TrainingData(dataset, config, model)
    if not cache_frames:
        return plain
    frames = CachedFrames(dataset, model.image_size)
    with advising(config):
        frames.build()
    cached = TrainingData(frames, config, model)
    check_cache(plain, cached)
    return cached


def open_sources(pipelines: Sequence[DataConfig], model: ModelConfig) -> list[Source]:
    """Open all data sets. Raise ValueError if those of one robot differ in features or rates."""
    sources: list[Source] = []
    for one in pipelines:
        try:
            sources.append(open_source(one, model) if one.has_actions else open_questions(one))
        except (OSError, KeyError) as error:  # `advising` adds to others where they are from
            if one.entry:
                error.add_note(f"in the data of {one.entry}")
            raise
    firsts: dict[str, tuple[DataConfig, LeRobotDataset]] = {}
    for one, source in zip(pipelines, sources):
        if not isinstance(source, LeRobotDataset) or not one.has_actions:
            continue
        config, first = firsts.setdefault(one.entry, (one, source))
        if differences := _differences(first.metadata, source.metadata, keys_used(config)):
            raise ValueError(
                f"{one.title} was not recorded like {config.repo_id}: {'; '.join(differences)}. "
                "Data sets that are used together need the same features and control rate; convert "
                f"the one that differs, or remove it from {one.flag('extra-datasets')}."
            )
    _require_subtasks(pipelines, sources)
    return sources


def _require_subtasks(pipelines: Sequence[DataConfig], sources: Sequence[Source]) -> None:
    """Raise ValueError if no set of a robot with subtasks has labels; warn of single ones."""
    labelled: dict[str, list[tuple[DataConfig, bool]]] = {}
    for one, source in zip(pipelines, sources):
        if one.subtasks and isinstance(source, LeRobotDataset):
            labelled.setdefault(one.entry, []).append((one, bool(source.subtasks)))
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


def episodes_of(source: Source) -> Sequence[Episode]:
    """Return the episodes of a data set; a table of pictures has none."""
    return source.episodes if isinstance(source, LeRobotDataset) else ()


def split_sources(
    pipelines: Sequence[DataConfig], sources: Sequence[Source], num_held_out: int, *, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Return the episodes of each data set to train on and to validate on, which may be none.

    If a data set occurs twice, an episode is held out of both, and validated on in the first robot
    only. A table of pictures has no episodes; all of it is trained on.
    """
    recorded = [source for source in sources if isinstance(source, LeRobotDataset)]
    if not num_held_out:
        return [([one.index for one in episodes_of(source)], []) for source in sources]
    roots = [source.metadata.root.resolve() for source in recorded]
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
        if not isinstance(one, LeRobotDataset):
            parts.append(([], []))
            continue
        root, own = one.metadata.root.resolve(), {episode.index for episode in one.episodes}
        if not (kept := own.difference(held_out[root])):
            raise ValueError(f"All episodes chosen of {root} ({shorten(own)}) are held out.")
        chosen = own & remaining[root] if pipeline.has_actions else set()
        parts.append((sorted(kept), sorted(chosen)))
        remaining[root] -= chosen
    return parts


def open_source(config: DataConfig, model: ModelConfig) -> LeRobotDataset:
    """Open the data set of a robot's pipeline, with actions as chunks of the model's horizon."""
    if config.not_readable is not None:
        raise ValueError(config.not_readable)
    root = _located(config)
    with advising(config):
        metadata = Metadata.read(root)
    rate = config.robot_metadata.get("control_hz", metadata.fps)
    if not math.isclose(rate, metadata.fps, rel_tol=1e-3):
        logger.warning(
            "%s has %g frames per second, the robot %g control steps: a chunk lasts longer or "
            "shorter on the robot than in the data.",
            *(config.title, metadata.fps, rate),
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
            language="subtasks" if config.subtasks else False,
        )
    # What is declared may have no data.
    _require_keys(config, metadata, dataset.keys, known=(*dataset.cameras, *dataset.keys))
    return dataset


def _located(config: DataConfig) -> Path:
    if config.repo_id is None:
        flag = config.flag("repo-id")
        raise ValueError(f"No data set is named: give {flag}, a folder or owner/name.")
    return locate(config.repo_id)


def open_questions(config: DataConfig) -> Source:
    """Open a table of pictures with questions, or a LeRobot data set that has such labels."""
    root = _located(config)
    with advising(config):
        if not (root / INFO).is_file():
            if config.episodes is not None:
                raise ValueError(
                    f"{config.flag('episodes')} is set, but {root} is a table without episodes."
                )
            return ImageTextSet(root)
        dataset = open_dataset(root, episodes=config.episodes, language="questions")
        if not dataset.questions:
            raise ValueError(
                f"{root} has no questions: expected rows of style vqa in language_events."
            )
    return dataset


def require_short_texts(source: Source, config: DataConfig) -> None:
    """Raise ValueError if a subtask or an answer has more tokens than the model keeps for it."""
    if config.has_actions:
        texts = source.subtasks if isinstance(source, LeRobotDataset) and config.subtasks else ()
    elif isinstance(source, LeRobotDataset):
        texts = tuple(dict.fromkeys(question.answer for _, question in source.questions))
    else:
        texts = source.answers
    for one in config.model_transforms.inputs:
        if isinstance(one, TokenizePrompt) and one.response is not None:
            with advising(config):
                for text in texts:
                    one.response.text(
                        one.tokenizer, text, "subtask" if config.has_actions else "answer"
                    )


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


def keys_used(config: DataConfig) -> list[str] | None:
    """Return the data set's keys that the repack transform names; None if they are not known."""
    names = repacked(config)
    return None if names is None else list(dict.fromkeys(names.values()))


def repacked(config: DataConfig) -> dict[str, str] | None:
    """Return the data set's keys by the names that the repack transform gives them."""
    first = next(iter(config.repack_transforms.inputs), None)
    return flatten_dict(first.structure) if isinstance(first, RepackTransform) else None
