"""What can be wrong in the rows of a data file: values, times, numbering, tasks.

One file at a time, with the code that training reads with. Part of `check`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from piston.data.columns import Rows, read_rows
from piston.data.episodes import Episode, Problem, Severity, episode_problem
from piston.data.metadata import DERIVED, Metadata

STOPS = "training stops there; leave the episode out (--data.episodes '!N') or write it anew"
TIME_TOLERANCE_S = 1e-3  # recorded times are for people; frames are found by number

ProblemOf = Callable[[Severity, str, str], Problem]  # severity, what, consequence; of one episode


def check_rows(
    metadata: Metadata, episodes: Iterable[Episode], columns: Iterable[str]
) -> Iterator[tuple[list[Problem], int]]:
    """For each data file its problems and how many rows were read."""
    by_file: dict[str, list[Episode]] = collections.defaultdict(list)
    for episode in episodes:
        by_file[episode.data_path].append(episode)
    keys = [
        key
        for key in columns
        if key in DERIVED or (key in metadata.features and not metadata.features[key].is_camera)
    ]
    first: dict[str, np.ndarray] = {}
    for path, inside in by_file.items():
        count = sum(episode.length for episode in inside)
        rows, wrong = read_rows(metadata, metadata.root / path, inside, keys)
        problems = [episode_problem(index, what) for index, what in wrong.items()]
        for episode in inside:
            if episode.index in rows:
                problems += _unlike_others(metadata, episode.index, rows[episode.index], first)
                problems += _check_episode(metadata, episode, rows[episode.index])
        yield problems, count


def _unlike_others(
    metadata: Metadata, episode: int, rows: Rows, first: dict[str, np.ndarray]
) -> Iterator[Problem]:
    for key, array in rows.items():
        found = f"{key} is {array.dtype}{list(array.shape[1:])}"
        before = first.get(key)
        if before is None:
            first[key] = array[:0].copy()  # a copy: it keeps nothing in memory
            declared = metadata.features.get(key)
            # A plain value is declared with shape [1].
            if declared and (array.shape[1:] or (1,)) != (declared.shape or (1,)):
                what = f"{found}, declared is {list(declared.shape)}"
                yield Problem("warning", key, what, "read as the files have it")
        elif before.shape[1:] != array.shape[1:] or not np.can_cast(
            array.dtype, before.dtype, "same_kind"
        ):
            what = f"{found}, in other files {before.dtype}{list(before.shape[1:])}"
            yield Problem("error", f"episode {episode}", what, STOPS, episode)


def _check_episode(metadata: Metadata, episode: Episode, own: Rows) -> Iterator[Problem]:
    def problem(severity: Severity, what: str, consequence: str) -> Problem:
        return Problem(severity, f"episode {episode.index}", what, consequence, episode.index)

    for key, array in own.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            axes = tuple(range(1, array.ndim))
            bad = np.flatnonzero(~np.isfinite(array).all(axis=axes))
            what = f"{key} is not a finite number in {len(bad)} rows, the first is {bad[0]}"
            yield problem("error", what, STOPS)
    steps = np.arange(episode.length)
    expected = {"frame_index": steps, "index": steps + episode.start}
    for key, numbers in expected.items():
        if key in own and not np.array_equal(own[key].reshape(-1), numbers):
            what = f"{key} does not count up from {numbers[0]}"
            yield problem("note", what, "rows are taken in the order of the file")
    if "episode_index" in own and (own["episode_index"] != episode.index).any():
        other = own["episode_index"].reshape(-1)[0]
        what = f"its rows say that they are of episode {other}"
        yield problem("warning", what, "the list of episodes is believed, the column is kept")
    if "timestamp" in own:
        yield from _check_times(metadata, own["timestamp"].reshape(-1), problem)
    yield from _check_tasks(metadata, episode, own.get("task_index"), problem)


def _check_times(metadata: Metadata, times: np.ndarray, problem: ProblemOf) -> Iterator[Problem]:
    seconds = times.astype(np.float64)
    if abs(seconds[0]) > TIME_TOLERANCE_S:
        what = f"its clock begins at {seconds[0]:.4g} s, not at 0"
        yield problem("note", what, "frames are taken by number")
    ideal = seconds[0] + np.arange(len(seconds)) / metadata.fps
    worst = int(np.abs(seconds - ideal).argmax())
    error = abs(seconds[worst] - ideal[worst])
    if error > TIME_TOLERANCE_S:
        what = f"recorded times are off {metadata.fps:g} fps by up to {error:.4g} s (row {worst})"
        yield problem("warning", what, "frames are taken by number")


def _check_tasks(
    metadata: Metadata, episode: Episode, column: np.ndarray | None, problem: ProblemOf
) -> Iterator[Problem]:
    unknown = set() if column is None else set(column.reshape(-1).tolist()) - set(metadata.tasks)
    if unknown and metadata.tasks:
        what = f"task_index {sorted(unknown)} is not in the list of tasks"
        yield problem("warning", what, "the episode's first task is used")
    if not episode.tasks and (column is None or unknown):
        yield problem("warning", "no task is known", "its prompt is empty")
