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
from jaxtyping import UInt8
from markupsafe import Markup

from piston.config import DataConfig
from piston.data.dataset import LeRobotDataset
from piston.data.image_text import DatasetQuestions
from piston.data.pipeline import open_sources, split_sources
from piston.data.protocol import Dataset
from piston.inspection.results import evenly
from piston.progress import shortened
from piston.report.document import Missing, render
from piston.report.figures import Line, duration
from piston.report.training import Run

logger = logging.getLogger(__name__)

_MAX_TEXTS, _LONGEST_TEXT = 12, 120
_NUM_FIRST_FRAMES = 4
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


def open_sets(run: Run) -> list[Dataset]:
    """Open all data sets: those of robots, and pictures with questions."""
    pipelines = run.config.pipelines()
    if any(one.fake for one in pipelines):
        raise Missing("the run trained on random samples, which cannot be shown.")
    with data_may_be_missing():
        return open_sources(pipelines, run.config.model)


def robot_sets(run: Run, sets: Sequence[Dataset]) -> list[RobotSet]:
    """Return those of the open sets that have actions. Raises Missing if there is none to show."""
    config = run.config
    pipelines = config.pipelines()
    parts = split_sources(pipelines, sets, config.validation_episodes, seed=config.seed)
    robots = [
        RobotSet(pipeline, source, held_out)
        for pipeline, source, (_, held_out) in zip(pipelines, sets, parts)
        if pipeline.has_actions and isinstance(source, LeRobotDataset)
    ]
    if not robots:
        raise Missing("the run has no LeRobot data set with actions; other formats are not shown.")
    return robots


def dataset(run: Run, sets: Sequence[Dataset]) -> Markup:
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
            (f" of {one.name}" if len(robots) > 1 else "", *_first_frames(one.source))
            for one in robots
            if one.source.cameras
        ]
    recorded = [one.source for one in robots]
    tasks = Counter(task for one in recorded for episode in one.episodes for task in episode.tasks)
    labelled = [one.source for one in robots if one.pipeline.subtasks]
    subtasks: Counter[str] = Counter()
    for source in labelled:
        subtasks.update(source.frames_per_subtask)
    return render(
        "dataset.html",
        rows=rows,
        tasks=_most_common("task", tasks),
        subtasks=_most_common("subtask", subtasks) if labelled else None,
        unlabelled=sum(map(len, labelled)) - subtasks.total(),
        num_questions=sum(len(source.questions) for source in labelled),
        lengths=_lengths(recorded),
        first_frames=first_frames,
    )


def _name(pipeline: DataConfig) -> str:
    return f"{pipeline.entry}: {pipeline.repo_id}" if pipeline.entry else str(pipeline.repo_id)


def _pictures(pipeline: DataConfig, source: Dataset) -> list[str]:
    """Return the row of pictures with questions."""
    questions = len(source)
    pictures = source.num_pictures if isinstance(source, DatasetQuestions) else questions
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


def _most_common(unit: str, counts: Counter[str]) -> tuple[int, list[tuple[str, str]]]:
    """Return how many texts there are, and rows of those that occur most often."""
    rows = [
        (shortened(text, _LONGEST_TEXT), f"{n:,}") for text, n in counts.most_common(_MAX_TEXTS)
    ]
    if len(counts) > _MAX_TEXTS:
        rest = counts.most_common()[_MAX_TEXTS:]
        rows.append((f"{len(rest):,} other {unit}s", f"{sum(n for _, n in rest):,}"))
    return len(counts), rows


def _lengths(sets: Sequence[LeRobotDataset]) -> tuple[list[float], Line | None]:
    """Return the shortest, median and longest episode, and a histogram if they differ."""
    seconds = np.array([episode.length / one.fps for one in sets for episode in one.episodes])
    quantiles = np.percentile(seconds, (0, 50, 100)).tolist()
    if quantiles[0] == quantiles[-1]:
        return quantiles, None
    counts, edges = np.histogram(seconds, bins=min(_MAX_BINS, max(5, len(seconds) // 3)))
    # The outline of the bars, from the axis and back to it.
    outline = np.concatenate([[0], np.repeat(counts, 2), [0]])
    return quantiles, Line(np.repeat(edges, 2), outline, "bars")


def _first_frames(
    source: LeRobotDataset,
) -> tuple[int, list[tuple[str, UInt8[np.ndarray, "_ _ 3"]]]]:
    """Return how many episodes are shown, and their first frames with a text each."""
    count = min(_NUM_FIRST_FRAMES, len(source.episodes))
    frames = []
    for position in evenly(len(source.episodes), count):
        index = source.episodes[position].index
        images = source.frame(int(source.episode_bounds[position, 0]))
        frames += [
            (f"{camera.removeprefix(_PREFIX)}, episode {index}", pixels)
            for camera, pixels in images.items()
        ]
    source.close()
    return count, frames
