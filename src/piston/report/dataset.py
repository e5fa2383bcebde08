"""The data sets of a run, and the section on them: episodes, tasks, lengths and first frames."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from piston.data.dataset import LeRobotDataset
from piston.data.pipeline import open_sources, split_sources
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

_MAX_TASKS, _LONGEST_TASK = 12, 120
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


def open_sets(run: Run) -> list[LeRobotDataset]:
    pipeline = run.config.data_config()
    if pipeline.fake:
        raise Missing("the run trained on random samples, which cannot be shown.")
    with data_may_be_missing():
        return open_sources(pipeline, run.config.model)


def held_out_episodes(run: Run, sets: Sequence[LeRobotDataset]) -> list[list[int]]:
    """Return the episodes of each data set that the model did not train on."""
    config = run.config
    return [held for _, held in split_sources(sets, config.validation_episodes, seed=config.seed)]


def dataset(run: Run, sets: Sequence[LeRobotDataset]) -> Markup:
    """Return the section on the data that the run was trained on."""
    names = [one.repo_id for one in run.config.data_config().each_set()]
    with data_may_be_missing():
        held_out = held_out_episodes(run, sets)
        rows = [_facts(*one) for one in zip(names, sets, held_out)]
        first_frames = [
            _first_frames(one, f" of {name}" if len(sets) > 1 else "")
            for name, one in zip(names, sets)
        ]
    header = ("data set", "episodes", "held out", "frames", "time", "frames/s", "robot", "format")
    return join(
        [table(header, rows, class_="numbers names"), _tasks(sets), _lengths(sets), *first_frames]
    )


def _facts(name: str | None, source: LeRobotDataset, held_out: Sequence[int]) -> list[str]:
    metadata, used = source.metadata, len(source.episodes)
    episodes, declared = f"{used:,}", len(metadata.episodes)
    return [
        str(name),
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
    rows = [(shortened(task, _LONGEST_TASK), n) for task, n in counts.most_common(_MAX_TASKS)]
    if len(counts) > _MAX_TASKS:
        rest = counts.most_common()[_MAX_TASKS:]
        rows.append((f"{len(rest):,} other tasks", sum(n for _, n in rest)))
    title = tag("h3", f"{len(counts):,} task{'s' * (len(counts) != 1)}")
    return join([title, table(("task", "episodes"), rows, class_="numbers")])


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
