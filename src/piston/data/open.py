"""A location becomes a dataset: one row of `FORMATS` per format.

open_at("folder or owner/name")                  the whole dataset
FORMATS.append(Format("mine", is_mine, MySet))   a format of your own; see docs/extending.md
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from piston.config import DataConfig
from piston.data.dataset import open_dataset
from piston.data.format import DERIVED, INFO, read_info
from piston.data.image_text import DatasetQuestions, ImageTextSet, is_table
from piston.data.location import locate
from piston.data.metadata import Metadata
from piston.data.problems import advising, unknown_key
from piston.data.protocol import Dataset
from piston.data.view import View
from piston.transforms import RepackTransform, flatten_dict

PADDING_KEY = "action_is_pad"


@dataclasses.dataclass(frozen=True)
class Format:
    """How a folder is recognised, and opened.

    `read` opens only what a pipeline uses, in chunks of this many steps; None: the dataset is
    opened as a whole and seen through a `View`.
    """

    name: str
    is_at: Callable[[Path], bool]
    open: Callable[[Path], Dataset]
    read: Callable[[Path, DataConfig, int], Dataset] | None = None


def format_at(root: Path) -> Format | None:
    """Return the format of a folder; None if it has none that is known."""
    return next((one for one in FORMATS if one.is_at(root)), None)


def open_at(path_or_repo_id: str | os.PathLike[str]) -> Dataset:
    """Open a whole dataset. What is no other format is opened as LeRobot's, whose error says why.

    Datasets of a format of its own have single values in place of chunks of actions.
    """
    root = locate(path_or_repo_id)
    return (format_at(root) or LEROBOT).open(root)


def read_for_pipeline(root: Path, config: DataConfig, num_steps: int) -> Dataset:
    """Open what a pipeline reads of a folder, with chunks of `num_steps` actions."""
    found = format_at(root) or (LEROBOT if config.has_actions else IMAGE_TEXT)
    if found.read is not None:
        return found.read(root, config, num_steps)
    with advising(config):
        whole = found.open(root)
        if not config.has_actions and "answer" not in whole.texts:
            raise ValueError(f"{root} has no questions: expected texts of the name 'answer'.")
        if not whole.episodes:
            return whole
        used, sequences = keys_used(config), dict.fromkeys(config.action_sequence_keys, num_steps)
        if config.has_actions:
            known = (*whole.cameras, *whole.keys, *whole.texts)
            require_keys(config, root, whole.cameras, whole.keys, known)
        cameras = [camera for camera in whole.cameras if used is None or camera in used]
        return View(whole, sequences if config.has_actions else {}, config.episodes, cameras)


def _read_lerobot(root: Path, config: DataConfig, num_steps: int) -> Dataset:
    """Open the frames of a robot, or the questions about them."""
    if not config.has_actions:
        with advising(config):
            dataset = open_dataset(root, episodes=config.episodes, language="questions")
            if not dataset.questions:
                raise ValueError(
                    f"{root} has no questions: expected rows of style vqa in language_events."
                )
            return DatasetQuestions(dataset)
    with advising(config):
        metadata = Metadata.read(root)
    features, used = metadata.features, keys_used(config)
    columns = [name for name, one in features.items() if not one.is_camera]
    # Cameras without files are left to `open_dataset`, which names the files.
    require_keys(config, root, metadata.cameras, columns, (*features, *DERIVED))
    with advising(config):
        dataset = open_dataset(
            metadata,
            sequences=dict.fromkeys(config.action_sequence_keys, num_steps),
            episodes=config.episodes,
            cameras=used and [key for key in used if key in features and features[key].is_camera],
            language="subtasks" if config.subtasks else False,
        )
    # What is declared may have no data.
    known = (*dataset.cameras, *dataset.keys)
    require_keys(config, root, metadata.cameras, dataset.keys, known)
    return dataset


def _read_image_text(root: Path, config: DataConfig, num_steps: int) -> Dataset:  # noqa: ARG001
    with advising(config):
        if config.has_actions:
            read_info(root)  # raises the error for a folder that is no robot's dataset
        if config.episodes is not None:
            raise ValueError(
                f"{config.flag('episodes')} is set, but {root} is a table without episodes."
            )
        return ImageTextSet(root)


LEROBOT = Format("LeRobot", lambda root: (root / INFO).is_file(), open_dataset, _read_lerobot)
IMAGE_TEXT = Format("image-text", is_table, ImageTextSet, _read_image_text)
FORMATS = [LEROBOT, IMAGE_TEXT]


def require_keys(
    config: DataConfig,
    root: Path,
    cameras: Sequence[str],
    columns: Sequence[str],
    known: Iterable[str],
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
                *(str(root), key, cameras, columns),
                is_camera="image" in path,
                used=[source for _, source in taken],
            )


def keys_used(config: DataConfig) -> list[str] | None:
    """Return the data set's keys that the repack transform names; None if they are not known."""
    names = repacked(config)
    return None if names is None else list(dict.fromkeys(names.values()))


def repacked(config: DataConfig) -> dict[str, str] | None:
    """Return the data set's keys by the names that the repack transform gives them."""
    first = next(iter(config.repack_transforms.inputs), None)
    return flatten_dict(first.structure) if isinstance(first, RepackTransform) else None
