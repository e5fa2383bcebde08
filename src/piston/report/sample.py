"""One real frame of the run's data set, followed through every transform to the model.

Dims: h steps read, a action dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from piston.config import DataConfig, TrainConfig
from piston.data.dataset import LeRobotDataset
from piston.data.pipeline import PADDING_KEY, PromptFromItem, open_sources, split_sources
from piston.transforms.base import Data, Transform, name_of
from piston.transforms.normalize import read_norm_stats

# Into its episode, where something happens in most.
_SHARE_OF_EPISODE = 0.25


@dataclasses.dataclass(frozen=True)
class TraceStep:
    """The data after one transform."""

    # Which list of the pipeline it stands in.
    stage: str
    name: str
    # The transform's plain settings, as people would write them.
    settings: str
    data: Data


@dataclasses.dataclass(frozen=True)
class Sample:
    repo_id: str
    episode: int
    frame: int
    fps: float
    # The model did not train on it.
    held_out: bool
    # From the item of the data set to what the model sees.
    trace: tuple[TraceStep, ...]
    # What a robot would send to the policy.
    observation: Data
    # What the robot did from this frame on, in its own space; past the episode's end it is made up.
    recorded: Float[np.ndarray, "h a"]
    is_real: Bool[np.ndarray, " h"]
    # Of the actions' dimensions.
    names: tuple[str, ...]

    @property
    def seen_by_model(self) -> Data:
        return self.trace[-1].data


def read_pipeline(config: TrainConfig, checkpoint: Path) -> DataConfig:
    """With the statistics that the checkpoint carries."""
    pipeline = config.data_config()
    if pipeline.asset_id is not None:
        inside = checkpoint / "assets" / pipeline.asset_id
        if inside.is_dir():
            return dataclasses.replace(pipeline, norm_stats=read_norm_stats(inside))
    return pipeline.with_norm_stats(config.name)


def choose_sample(config: TrainConfig, pipeline: DataConfig) -> Sample:
    """A quarter into the first held-out episode; without any, into the one in the middle."""
    dataset, *others = sources = open_sources(pipeline, config.model)
    position, held_out = len(dataset.episodes) // 2, False
    if config.validation_episodes:
        (_, chosen), *_ = split_sources(sources, config.validation_episodes, seed=config.seed)
        held_out = bool(chosen)
        if held_out:
            position = [episode.index for episode in dataset.episodes].index(chosen[0])
    begin, end = dataset.episode_bounds[position]
    item = dataset[int(begin + _SHARE_OF_EPISODE * (end - begin))]
    for source in (dataset, *others):
        source.close()
    padding = np.asarray(item[f"{pipeline.action_sequence_keys[0]}_is_pad"])
    trace = follow(_stages(pipeline), {**item, PADDING_KEY: padding})
    repacked = [step for step in trace if step.stage in ("data set", "prompt", "repack")][-1].data
    recorded = np.asarray(repacked["actions"], np.float32)
    return Sample(
        repo_id=str(pipeline.repo_id),
        episode=int(item["episode_index"]),
        frame=int(item["frame_index"]),
        fps=float(dataset.fps),
        held_out=held_out,
        trace=trace,
        observation={k: v for k, v in repacked.items() if k not in ("actions", PADDING_KEY)},
        recorded=recorded,
        is_real=~padding,
        names=_names(dataset, pipeline, recorded.shape[-1]),
    )


def follow(stages: Mapping[str, Iterable[Transform]], data: Data) -> tuple[TraceStep, ...]:
    """The data itself, then after each transform."""
    first = next(iter(stages))
    steps = [TraceStep(first, "", "", data)]
    for stage, transforms in stages.items():
        for transform in transforms:
            data = transform(data)
            steps.append(TraceStep(stage, name_of(transform), _settings(transform), data))
    return tuple(steps)


def _stages(pipeline: DataConfig) -> dict[str, tuple[Transform, ...]]:
    """The transforms of training, in the order and under the names of the pipeline."""
    tasks = (PromptFromItem(),) if pipeline.prompt_from_task else ()
    return {"data set": (), "prompt": tasks, **pipeline.input_stages(training=True)}


def _settings(transform: Transform) -> str:
    if not dataclasses.is_dataclass(transform):
        return ""
    values = {field.name: getattr(transform, field.name) for field in dataclasses.fields(transform)}
    plain = {key: value for key, value in values.items() if isinstance(value, bool | int | float)}
    return ", ".join(
        f"{key}={value:g}" if value is not True and value is not False else f"{key}={value}"
        for key, value in plain.items()
    )


def _names(dataset: LeRobotDataset, pipeline: DataConfig, dim: int) -> tuple[str, ...]:
    """The data set's, where they fit in number."""
    known = [
        name
        for key in pipeline.action_sequence_keys
        for name in _flat(dataset.metadata.features[key].names)
    ]
    return tuple(known) if len(known) == dim else tuple(f"action[{i}]" for i in range(dim))


def _flat(names: Any) -> list[str]:
    """Names are a list, or lists by group, or missing."""
    if isinstance(names, str):
        return [names]
    parts = names.values() if isinstance(names, Mapping) else names or ()
    return [name for part in parts for name in _flat(part)]
