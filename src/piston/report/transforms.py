"""One real frame of the run's data set, followed through every transform to the model and back.

Dims: h steps read, a action dim.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from piston.config import DataConfig, TrainConfig
from piston.data.format import dimension_names
from piston.data.pipeline import PADDING_KEY, PromptFromItem, open_sources, split_sources
from piston.report.markup import Markup, image, join, note, png, scrolling, table, tag
from piston.transforms import Data, Transform, flatten_dict, name_of
from piston.transforms.normalize import read_norm_stats

# Into its episode, where something happens in most.
_SHARE_OF_EPISODE = 0.25
_THUMBNAIL = 112
_LONGEST_TEXT = 80


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
    """Return the run's pipeline with the statistics of its checkpoint."""
    pipeline = config.data_config()
    if pipeline.asset_id is not None:
        inside = checkpoint / "assets" / pipeline.asset_id
        if inside.is_dir():
            return dataclasses.replace(pipeline, norm_stats=read_norm_stats(inside))
    return pipeline.with_norm_stats(config.name)


def choose_sample(config: TrainConfig, pipeline: DataConfig) -> Sample:
    """Return a frame of the first held-out episode; without any, of the one in the middle."""
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
    tasks = (PromptFromItem(),) if pipeline.prompt_from_task else ()
    stages = {"data set": (), "prompt": tasks, **pipeline.input_stages(training=True)}
    trace = follow(stages, {**item, PADDING_KEY: padding})
    repacked = [step for step in trace if step.stage in ("data set", "prompt", "repack")][-1].data
    recorded = np.asarray(repacked["actions"], np.float32)
    actions = [dataset.metadata.features[key] for key in pipeline.action_sequence_keys]
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
        names=tuple(dimension_names(actions, recorded.shape[-1], "action")),
    )


def follow(stages: Mapping[str, Iterable[Transform]], data: Data) -> tuple[TraceStep, ...]:
    """Return the data itself, then the data after each transform."""
    first = next(iter(stages))
    steps = [TraceStep(first, "", "", data)]
    for stage, transforms in stages.items():
        for transform in transforms:
            data = transform(data)
            steps.append(TraceStep(stage, name_of(transform), _settings(transform), data))
    return tuple(steps)


def _settings(transform: Transform) -> str:
    if not dataclasses.is_dataclass(transform):
        return ""
    values = {field.name: getattr(transform, field.name) for field in dataclasses.fields(transform)}
    plain = {key: value for key, value in values.items() if isinstance(value, bool | int | float)}
    return ", ".join(
        f"{key}={value}" if isinstance(value, bool) else f"{key}={value:g}"
        for key, value in plain.items()
    )


def transforms(sample: Sample, back: Sequence[TraceStep]) -> Markup:
    """Return the section with the sample after each transform, and the actions after those back."""
    text = (
        f"Episode {sample.episode}, frame {sample.frame} of {sample.repo_id}, from the data set to "
        "what the model sees. Shown are the keys that a transform changes or adds; the others are "
        "folded away."
    )
    parts = [note(text), _chain(sample.trace, "an item of the data set")]
    if back:
        parts += [tag("h3", "And back to the robot"), _chain(back, "the model's actions")]
    return join(parts)


def _chain(trace: Sequence[TraceStep], first: str) -> Markup:
    contents = [{}, *(flatten_dict(step.data) for step in trace)]
    steps = [
        _step(step, step.name or first, before, after)
        for step, (before, after) in zip(trace, itertools.pairwise(contents))
    ]
    return tag("ol", *steps, class_="chain")


def _step(step: TraceStep, name: str, before: Data, after: Data) -> Markup:
    changed = [key for key in after if key not in before or not _same(before[key], after[key])]
    unchanged = [key for key in after if key not in changed]
    gone = [key for key in before if key not in after]
    settings = tag("code", step.settings) if step.settings else None
    title = tag("h4", name, " ", settings, tag("span", step.stage, class_="stage"))
    thumbnails = [_thumbnail(key, after[key]) for key in changed if _is_image(after[key])]
    folded = None
    if unchanged:
        count = f"{len(unchanged)} unchanged key{'s' * (len(unchanged) > 1)}"
        folded = tag("details", tag("summary", count), _keys(unchanged, after))
    return tag(
        "li",
        title,
        _keys(changed, after) if changed else note("changes nothing here"),
        tag("div", *thumbnails, class_="thumbnails") if thumbnails else None,
        note(f"dropped: {', '.join(gone)}") if gone else None,
        folded,
    )


def _keys(names: Sequence[str], data: Data) -> Markup:
    rows = ((tag("code", name), *_described(data[name])) for name in names)
    return scrolling(table(("key", "type", "shape", "values"), rows))


def _described(value: Any) -> tuple[str, str, str]:
    """Return type, shape and range of values."""
    array = np.asarray(value)
    shape = " × ".join(map(str, array.shape)) or "–"
    if array.dtype.kind in "US":
        return "text", shape, _shortened(repr(str(array) if array.ndim == 0 else array.tolist()))
    if array.dtype.kind == "b":
        text = str(bool(array)) if array.ndim == 0 else f"{array.sum()} of {array.size} true"
        return "bool", shape, text
    if array.dtype.kind not in "iuf" or not array.size:
        return str(array.dtype), shape, _shortened(repr(value))
    if array.ndim == 0:
        return str(array.dtype), shape, f"{array.item():.5g}"
    return str(array.dtype), shape, f"{array.min():.4g} … {array.max():.4g}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _same(one: Any, other: Any) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))


def _is_image(value: Any) -> bool:
    array = np.asarray(value)
    return array.dtype == np.uint8 and array.ndim == 3 and 3 in (array.shape[0], array.shape[-1])


def _thumbnail(key: str, value: Any) -> Markup:
    pixels = np.asarray(value)
    pixels = pixels if pixels.shape[-1] == 3 else np.moveaxis(pixels, 0, -1)
    source = png(np.ascontiguousarray(pixels), longest=_THUMBNAIL)
    height, width = pixels.shape[:2]
    text = f"{key}, {height} × {width}"
    return tag("figure", image(source, text), tag("figcaption", text))
