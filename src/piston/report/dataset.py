"""The data sets of a run, and the section on them: episodes, tasks, lengths and first frames.

Of labelled sets also the subtasks and questions; pictures with questions are only counted.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from piston.config import DataConfig
from piston.data.dataset import LeRobotDataset
from piston.data.pipeline import Source, open_sources, split_sources
from piston.progress import shortened
from piston.report.markup import (
    Line,
    Markup,
    Missing,
    duration,
    figure,
    join,
    note,
    picture,
    plot,
    table,
    tag,
)
from piston.report.training import Run

logger = logging.getLogger(__name__)

_MAX_TEXTS, _LONGEST_TEXT = 12, 120
_NUM_FIRST_FRAMES, _THUMBNAIL = 4, 160
_MAX_BINS = 30
_PREFIX = "observation.images."  # of LeRobot's names of cameras


@contextlib.contextmanager
def data_may_be_missing() -> Iterator[None]:
    """Turn errors of reading into Missing: everything else of the run can still be shown."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        logger.warning("The run's data set cannot be shown: %s", error)
        raise Missing(f"the run's data set cannot be read. {error}") from error


class RobotSet(NamedTuple):
    """A data set of a robot, and its episodes that the model did not train on."""

    pipeline: DataConfig
    source: LeRobotDataset
    held_out: list[int]

    @property
    def name(self) -> str:
        return _name(self.pipeline)


def open_sets(run: Run) -> list[Source]:
    """Open all data sets: those of robots, and pictures with questions."""
    pipelines = run.config.pipelines()
    if any(one.fake for one in pipelines):
        raise Missing("the run trained on random samples, which cannot be shown.")
    with data_may_be_missing():
        return open_sources(pipelines, run.config.model)


def robot_sets(run: Run, sets: Sequence[Source]) -> list[RobotSet]:
    """Return those of the open sets that have actions."""
    config = run.config
    pipelines = config.pipelines()
    parts = split_sources(pipelines, sets, config.validation_episodes, seed=config.seed)
    return [
        RobotSet(pipeline, source, held_out)
        for pipeline, source, (_, held_out) in zip(pipelines, sets, parts)
        if pipeline.has_actions and isinstance(source, LeRobotDataset)
    ]


def dataset(run: Run, sets: Sequence[Source]) -> Markup:
    """Return the section on the data that the run was trained on."""
    with data_may_be_missing():
        robots = robot_sets(run, sets)
        rows = [_facts(one) for one in robots]
        rows += [
            _pictures(pipeline, source)
            for pipeline, source in zip(run.config.pipelines(), sets)
            if not pipeline.has_actions
        ]
        first_frames = [
            _first_frames(one.source, f" of {one.name}" if len(robots) > 1 else "")
            for one in robots
        ]
    header = ("data set", "episodes", "held out", "frames", "time", "frames/s", "robot", "format")
    recorded = [one.source for one in robots]
    shown = [table(header, rows, class_="numbers names"), _tasks(recorded), _subtasks(robots)]
    return join([*shown, _lengths(recorded), *first_frames])


def _name(pipeline: DataConfig) -> str:
    return f"{pipeline.entry}: {pipeline.repo_id}" if pipeline.entry else str(pipeline.repo_id)


def _pictures(pipeline: DataConfig, source: Source) -> list[str]:
    """Return the row of pictures with questions."""
    questions, pictures = len(source), len(source)
    if isinstance(source, LeRobotDataset):
        asked = source.questions
        questions, pictures = len(asked), len({(frame, one.camera) for frame, one in asked})
    text = f"{pictures:,} picture{'s' * (pictures != 1)}"
    about = f"{questions:,} question{'s' * (questions != 1)}"
    return [_name(pipeline), "–", "–", text, "–", "–", about, "–"]


def _facts(one: RobotSet) -> list[str]:
    source, held_out = one.source, one.held_out
    metadata, used = source.metadata, len(source.episodes)
    episodes, declared = f"{used:,}", len(metadata.episodes)
    return [
        one.name,
        episodes if used == declared else f"{episodes} of {declared:,}",
        f"{len(held_out):,}",
        f"{len(source):,}",
        duration(len(source) / source.fps),
        f"{source.fps:g}",
        metadata.robot_type or "–",
        metadata.version,
    ]


def _tasks(sets: Sequence[LeRobotDataset]) -> Markup:
    counts = Counter(task for one in sets for episode in one.episodes for task in episode.tasks)
    return _counted("task", "episodes", counts)


def _subtasks(sets: Sequence[RobotSet]) -> Markup | None:
    """Return the subtasks that the policy learns to write, if it does, and how many questions."""
    labelled = [one.source for one in sets if one.pipeline.subtasks]
    if not labelled:
        return None
    counts: Counter[str] = Counter()
    for source in labelled:
        counts.update(source.frames_per_subtask)
    unlabelled = sum(map(len, labelled)) - counts.total()
    text = f"{unlabelled:,} frames have no subtask; the policy learns no text from them. "
    asked = sum(len(source.questions) for source in labelled)
    more = f"The sets with subtasks also have {asked:,} questions about their pictures."
    notes = text * bool(unlabelled) + more * bool(asked)
    return join([_counted("subtask", "frames", counts), note(notes) if notes else None])


def _counted(what: str, unit: str, counts: Counter[str]) -> Markup:
    """Return a table of the texts that occur most often."""
    rows = [
        (shortened(text, _LONGEST_TEXT), f"{n:,}") for text, n in counts.most_common(_MAX_TEXTS)
    ]
    if len(counts) > _MAX_TEXTS:
        rest = counts.most_common()[_MAX_TEXTS:]
        rows.append((f"{len(rest):,} other {what}s", f"{sum(n for _, n in rest):,}"))
    title = tag("h3", f"{len(counts):,} {what}{'s' * (len(counts) != 1)}")
    return join([title, table((what, unit), rows, class_="numbers")])


def _lengths(sets: Sequence[LeRobotDataset]) -> Markup:
    """Return a histogram of the episodes' lengths, or the length if all have the same."""
    seconds = np.array([episode.length / one.fps for one in sets for episode in one.episodes])
    low, middle, high = np.percentile(seconds, (0, 50, 100))
    if low == high:
        return note(f"Every episode lasts {duration(low)}.")
    counts, edges = np.histogram(seconds, bins=min(_MAX_BINS, max(5, len(seconds) // 3)))
    # The outline of the bars, from the axis and back to it.
    x, y = np.repeat(edges, 2), np.concatenate([[0], np.repeat(counts, 2), [0]])
    caption = (
        f"How long the episodes are: from {duration(low)} to {duration(high)}, half of them at "
        f"most {duration(middle)}. The height of a bar is the number of episodes. Single very "
        "short or long episodes may be failed recordings: watch them before you train on them."
    )
    drawn = plot([Line(x, y, "bars")], 960, 160, "length in seconds", "episodes", num_ticks=(8, 3))
    return join([tag("h3", "Lengths"), figure(caption, tag("div", drawn, class_="scrolls wide"))])


def _first_frames(source: LeRobotDataset, of: str) -> Markup | None:
    if not source.cameras:
        return None
    count = min(_NUM_FIRST_FRAMES, len(source.episodes))
    pictures = []
    for position in np.linspace(0, len(source.episodes) - 1, count).round().astype(int).tolist():
        index = source.episodes[position].index
        frames = source.frame(int(source.episode_bounds[position, 0]))
        pictures += [
            picture(pixels, f"{camera.removeprefix(_PREFIX)}, episode {index}", _THUMBNAIL)
            for camera, pixels in frames.items()
        ]
    source.close()
    caption = (
        f"The first frame of {count} episode{'s' * (count > 1)}{of}, from each camera that the "
        "policy uses. The scene should differ between episodes as much as the policy has to cope "
        "with."
    )
    strip = tag("div", *pictures, class_="thumbnails")
    return join([tag("h3", f"First frames{of}"), figure(caption, strip)])
