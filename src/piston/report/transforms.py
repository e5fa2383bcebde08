"""One real frame of the run's data set, followed through every transform to the model and back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from markupsafe import Markup

from piston.config import DataConfig
from piston.data.protocol import Dataset
from piston.data.samples import PromptFromItem
from piston.inspection.frames import Frame, Frames
from piston.progress import shortened
from piston.report.dataset import data_may_be_missing, robot_sets
from piston.report.document import Missing, render
from piston.report.training import Run
from piston.transforms import Data, Transform, flatten_dict, name_of
from piston.transforms.normalize import read_norm_stats

# Into its episode, where something happens in most.
_SHARE_OF_EPISODE = 0.25
_LONGEST_TEXT = 80


class TraceStep(NamedTuple):
    """The data after one transform: which list of the pipeline it stands in, and its settings."""

    stage: str
    name: str
    settings: str
    data: Data


@dataclasses.dataclass(frozen=True)
class Sample:
    # The run's, with the statistics of its checkpoint.
    pipeline: DataConfig
    # What a robot would send to the policy, and what it did from there on.
    at: Frame
    fps: float
    # The model did not train on it.
    held_out: bool
    # From the item of the data set to what the model sees.
    trace: tuple[TraceStep, ...]
    # Of the actions' dimensions.
    names: tuple[str, ...]

    @property
    def seen_by_model(self) -> Data:
        return self.trace[-1].data

    def __str__(self) -> str:
        robot = f" (robot {self.pipeline.entry})" if self.pipeline.entry else ""
        place = f"Episode {self.at.episode}, frame {self.at.frame}"
        return f"{place} of {self.pipeline.repo_id}{robot}"


def choose_sample(run: Run, sets: Sequence[Dataset]) -> Sample:
    """Return a frame of the first robot, of its first held-out episode or of the middle one."""
    if run.checkpoint is None:
        raise Missing(
            "the run has no whole checkpoint yet. Train on, with --resume; the last step is saved."
        )
    with data_may_be_missing():
        pipeline, dataset, held_out = robot_sets(run, sets)[0]
        saved = run.checkpoint / "assets" / (pipeline.asset_id or "")
        if pipeline.asset_id is not None and saved.is_dir():
            pipeline = dataclasses.replace(pipeline, norm_stats=read_norm_stats(saved))
        else:
            pipeline = pipeline.with_norm_stats(run.config.name)
        frames = Frames(dataset, pipeline)
        episode = held_out[0] if held_out else list(frames.episodes)[len(frames.episodes) // 2]
        item = frames.item(episode, int(_SHARE_OF_EPISODE * frames.episodes[episode]))
        dataset.close()
        tasks = (PromptFromItem(),) if pipeline.prompt_from_task else ()
        stages = {"data set": (), "prompt": tasks, **pipeline.input_stages(training=True)}
        return Sample(
            pipeline=pipeline,
            at=frames.frame_of(item),
            fps=frames.fps,
            held_out=bool(held_out),
            trace=follow(stages, item),
            names=frames.action_names,
        )


def follow(stages: Mapping[str, Iterable[Transform]], data: Data) -> tuple[TraceStep, ...]:
    """Return the data itself, then the data after each transform."""
    steps = [TraceStep(next(iter(stages)), "", "", data)]
    for stage, transforms in stages.items():
        for transform in transforms:
            data = transform(data)
            steps.append(TraceStep(stage, name_of(transform), _settings(transform), data))
    return tuple(steps)


def _settings(transform: Transform) -> str:
    """Return the transform's plain settings, as people would write them."""
    if not dataclasses.is_dataclass(transform):
        return ""
    values = {field.name: getattr(transform, field.name) for field in dataclasses.fields(transform)}
    return ", ".join(
        f"{key}={value}" if isinstance(value, bool) else f"{key}={value:g}"
        for key, value in values.items()
        if isinstance(value, bool | int | float)
    )


def transforms(sample: Sample, back: Sequence[TraceStep]) -> Markup:
    """Return the section with the sample after each transform, and the actions after those back."""
    forth = _changes(sample.trace, "an item of the data set")
    return render(
        "transforms.html", sample=sample, forth=forth, back=_changes(back, "the model's actions")
    )


def _changes(trace: Sequence[TraceStep], first: str) -> list[dict[str, Any]]:
    """Return for each step what it changes, as the template shows it."""
    contents = [{}, *(flatten_dict(step.data) for step in trace)]
    return [
        {"step": step, "name": step.name or first, **_changed(before, after)}
        for step, (before, after) in zip(trace, itertools.pairwise(contents))
    ]


def _changed(before: Data, after: Data) -> dict[str, Any]:
    changed = [key for key in after if key not in before or not _same(before[key], after[key])]
    images = ((key, _as_image(after[key])) for key in changed)
    return {
        "changed": [_row(key, after[key]) for key in changed],
        "unchanged": [_row(key, after[key]) for key in after if key not in changed],
        "dropped": [key for key in before if key not in after],
        "images": [(key, pixels) for key, pixels in images if pixels is not None],
    }


def _as_image(value: Any) -> UInt8[np.ndarray, "h w 3"] | None:
    """Return an image with its channels last, None for anything else."""
    pixels = np.asarray(value)
    if pixels.dtype != np.uint8 or pixels.ndim != 3:
        return None
    if pixels.shape[-1] == 3:
        return np.ascontiguousarray(pixels)
    return np.ascontiguousarray(np.moveaxis(pixels, 0, -1)) if pixels.shape[0] == 3 else None


def _row(key: str, value: Any) -> tuple[str, str, str, str]:
    """Return the key with type, shape and range of values."""
    array = np.asarray(value)
    kind, text = str(array.dtype), repr(value)
    if array.dtype.kind in "US":
        kind, text = "text", repr(str(array) if array.ndim == 0 else array.tolist())
    elif array.dtype.kind == "b":
        text = str(bool(array)) if array.ndim == 0 else f"{array.sum()} of {array.size} true"
    elif array.dtype.kind in "iuf" and array.size:
        text = f"{array.min():.4g} … {array.max():.4g}" if array.ndim else f"{array.item():.5g}"
    shape = " × ".join(map(str, array.shape)) or "–"
    return Markup("<code>{}</code>").format(key), kind, shape, shortened(text, _LONGEST_TEXT)


def _same(one: Any, other: Any) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))
