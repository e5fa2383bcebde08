"""`check_dataset` (`piston data check`) finds everything that is wrong with a data set.

Beyond what is found whenever a data set is opened (`findings`), it looks at the values and decodes
every frame, by the code that training uses. An `error` would stop training. A damaged episode that
readers leave out is a `warning`, unless no episode remains. For formats other than LeRobot's, it
checks values, texts, frames and blocks.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from piston.data import protocol
from piston.data.columns import Columns, ImageRows, fits
from piston.data.findings import Findings, inspect_files, left_out
from piston.data.format import DERIVED, PERSISTENT, Episode, dimension_names, list_files
from piston.data.image_text import ImageTextSet
from piston.data.location import locate
from piston.data.metadata import CAMERA_IGNORED, Metadata
from piston.data.open import IMAGE_TEXT, LEROBOT, format_at
from piston.data.problems import Problem, Severity, episode_problem, ranges
from piston.data.video import VideoError, VideoHeader, VideoReader, num_usable_cpus
from piston.progress import Progress, no_progress

BLACK = 20  # the brightest gray value of a frame that shows nothing (video black is 16)
STOPS = "training stops there; leave out the episode (--data.episodes '!N') or write it again"
LABEL_STOPS = "training with {} stops there; leave out the episode or correct the label"
_ROWS_AT_ONCE = 64  # pictures of a table
TIME_TOLERANCE_S = 1e-3  # recorded times are informative only: frames are found by number


def check_dataset(
    path_or_repo_id: str | os.PathLike[str], *, progress: Progress = no_progress
) -> list[Problem]:
    """Return every problem, the worst first. Raise an error only if there is no data set.

    A folder with a table of pictures and questions (`image_text`) is checked as well.
    """
    root = locate(path_or_repo_id)
    found = format_at(root)
    if found is IMAGE_TEXT:
        return _table_problems(root, progress)
    if found is not None and found is not LEROBOT:
        return _worst_first(_dataset_problems(found.open(root), progress))
    metadata = Metadata.read(root)
    findings = inspect_files(metadata, metadata.episodes, language=True)
    problems = [*findings.problems, *_unused_files(metadata)]
    episodes = readable_episodes(metadata, problems, [])
    problems += _label_problems(findings, episodes)
    filmed = [(e, c) for c in findings.cameras for e in readable_episodes(metadata, problems, [c])]
    total = sum(e.length for e in episodes) + sum(e.length for e, _ in filmed)
    done, lock = 0, threading.Lock()

    def count(number: int) -> None:
        nonlocal done
        with lock:
            done += number
            progress(done, total)

    first: Columns = {}
    for episode in episodes:
        rows = findings.data.rows[episode.index]
        problems += _unlike_others(metadata, episode, rows, first)
        names = findings.data.names[episode.data_path]
        stored = {key: array for key, array in rows.items() if key in names}
        problems += _not_finite(episode.index, stored)
        for severity, what, consequence in _row_problems(metadata, episode, stored):
            problems.append(episode_problem(episode.index, what, None, consequence, severity))
        count(episode.length)
    problems += _standing_still(metadata, {e.index: findings.data.rows[e.index] for e in episodes})
    problems += _frame_problems(findings, filmed, count)
    reasons = []
    if not readable_episodes(metadata, problems):
        reasons.append("no episode can be read with all cameras")
    declared = any(feature.is_camera for feature in metadata.features.values())
    if declared and not readable_cameras(metadata, problems):
        reasons.append("cameras are declared, none of them has files")
    problems += [Problem("error", "data set", why, "training cannot use it") for why in reasons]
    return _worst_first(problems)


def _worst_first(problems: Iterable[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda one: ("error", "warning", "note").index(one.severity))


def _table_problems(root: Path, progress: Progress) -> list[Problem]:
    """Find rows of a table of pictures that lack a text, and decode every picture."""
    try:
        table = ImageTextSet(root, complete=False)
    except ValueError as error:
        return [Problem("error", "table", str(error), "training cannot use it")]
    stops = "training stops there; complete the row or remove it"
    problems = [Problem("error", f"row {row}", what, stops) for row, what in table.incomplete]

    def check(row: int) -> Problem | None:
        try:
            is_black = table.picture(row).max() <= BLACK
        except ValueError as error:
            return Problem("error", f"row {row}", str(error), stops)
        what, consequence = "the picture is black", "it is used as it is"
        return Problem("warning", f"row {row}", what, consequence) if is_black else None

    without = {row for row, what in table.incomplete if what.startswith("image ")}
    with worker_threads() as (pool, _):
        for start in range(0, len(table), _ROWS_AT_ONCE):
            rows = range(start, min(start + _ROWS_AT_ONCE, len(table)))
            problems += filter(None, pool.map(check, (r for r in rows if r not in without)))
            progress(rows.stop, len(table))
    return _worst_first(problems)


def _dataset_problems(dataset: protocol.Dataset, progress: Progress) -> Iterator[Problem]:
    """Read all columns and decode every frame."""
    try:
        protocol.blocks_of(dataset)
    except ValueError as error:
        yield Problem("error", "blocks", str(error), "training cannot order its samples")
    columns = {}
    for key in dataset.keys:
        columns[key] = column = dataset.column(key)
        if len(column) != len(dataset):
            what = f"it has {len(column)} rows, the dataset {len(dataset)} frames"
            yield Problem("error", key, what, "training cannot use it")
    if not dataset.episodes or sum(one.length for one in dataset.episodes) != len(dataset):
        what = f"{len(dataset.episodes)} episodes do not have the {len(dataset)} frames together"
        yield Problem("error", "episodes", what, "training cannot use it")
        return
    for episode, (start, stop) in zip(dataset.episodes, protocol.episode_bounds(dataset).tolist()):
        rows = {key: column[start:stop] for key, column in columns.items()}
        yield from _not_finite(episode.index, rows)
        if "task" in dataset.texts and (dataset.texts["task"].numbers[start:stop] < 0).any():
            what = "some frames have no task"
            yield episode_problem(episode.index, what, None, "their prompt is empty")
        black: dict[str, list[int]] = {camera: [] for camera in dataset.cameras}
        for row in range(start, stop):
            try:
                item = dataset[row]
            except (ValueError, OSError) as error:
                what = f"frame {row - start}: {error}"
                yield episode_problem(episode.index, what, None, STOPS, "error")
                break
            for camera, frames in black.items():
                if np.max(item[camera]) <= BLACK:
                    frames.append(row - start)
            progress(row + 1, len(dataset))
        for camera, frames in black.items():
            yield from _black_frames(episode, camera, frames)


def usable(problems: Iterable[Problem]) -> bool:
    """Return whether training can use the data set."""
    return all(problem.severity != "error" for problem in problems)


def readable_episodes(
    metadata: Metadata, problems: Iterable[Problem], cameras: Iterable[str] | None = None
) -> list[Episode]:
    """Return the episodes that a reader of these cameras gets (None: of all)."""
    gone = left_out(problems, metadata.cameras if cameras is None else cameras)
    return [episode for episode in metadata.episodes if episode.index not in gone]


def readable_cameras(metadata: Metadata, problems: Iterable[Problem]) -> list[str]:
    """Return the cameras that have files."""
    ignored = {problem.where for problem in problems if problem.consequence == CAMERA_IGNORED}
    return [camera for camera in metadata.cameras if camera not in ignored]


def _unused_files(metadata: Metadata) -> Iterator[Problem]:
    """Find files of undeclared cameras and of episodes that are not listed."""
    known = {episode.data_path for episode in metadata.episodes}
    known |= {span.path for episode in metadata.episodes for span in episode.videos.values()}
    unknown = (Path(path) for path in sorted(list_files(metadata.root) - known))
    folders = collections.Counter(
        str(path.parent)
        for path in unknown
        if path.suffix in (".mp4", ".parquet") and not path.name.startswith(".")
    )
    for folder, count in folders.items():
        what = f"{count} files that no listed episode and no declared camera refers to"
        yield Problem("note", folder, what, "they are not read")


def _unlike_others(
    metadata: Metadata, episode: Episode, rows: Columns, first: Columns
) -> Iterator[Problem]:
    """Compare shapes and types with the declaration and with the first episode (in `first`)."""
    for key, array in rows.items():
        found = f"{key} is {array.dtype}{list(array.shape[1:])}"
        before = first.setdefault(key, array)
        if before is array:
            declared = metadata.features.get(key)
            # A plain value is declared with shape [1].
            if declared and (array.shape[1:] or (1,)) != (declared.shape or (1,)):
                what = f"{found}, declared is {list(declared.shape)}"
                yield Problem("warning", key, what, "the shape in the files is used")
        elif not fits(array, before):
            what = f"{found}, in other files {before.dtype}{list(before.shape[1:])}"
            yield episode_problem(episode.index, what, None, STOPS, "error")


def _label_problems(findings: Findings, episodes: Iterable[Episode]) -> Iterator[Problem]:
    """Report what is wrong with subtasks and questions."""
    for episode in episodes:
        labels = (findings.labels or {})[episode.index]
        for kind, wrong in labels.wrong.items():
            for what in wrong:  # no error: other training does not read labels
                yield episode_problem(episode.index, what, None, LABEL_STOPS.format(kind))
        if labels.differs:
            what = f"{PERSISTENT} is not the same in all its frames"
            yield episode_problem(episode.index, what, None, "that of the first frame is used")
        for what in sorted(labels.unknown_styles):
            yield episode_problem(episode.index, what, None, "they are not read", "note")


def _standing_still(metadata: Metadata, rows: Mapping[int, Columns]) -> Iterator[Problem]:
    """Find numbers that never change: dimensions in the whole set, whole vectors in an episode."""
    for key, feature in metadata.features.items():
        arrays = {index: one[key] for index, one in rows.items() if key in one}
        first = next(iter(arrays.values()), np.empty(0, object))
        if key in DERIVED or key.startswith("next.") or first.dtype.kind != "f" or first.ndim > 2:
            continue
        alike = {index: array for index, array in arrays.items() if fits(array, first)}
        low = np.stack([array.min(axis=0).reshape(-1) for array in alike.values()])
        high = np.stack([array.max(axis=0).reshape(-1) for array in alike.values()])
        constant = low.min(axis=0) == high.max(axis=0)
        consequence = "the values are used as they are"
        if constant.any():
            names = dimension_names([feature], len(constant), otherwise=key)
            listed = ", ".join(names[dim] for dim in np.flatnonzero(constant))
            yield Problem("note", f"{key} ({listed})", "never changes in the set", consequence)
        if not constant.all():
            still = (low == high)[:, ~constant].all(axis=1)
            for index, array in (one for one, is_still in zip(alike.items(), still) if is_still):
                if len(array) > 1:
                    what = f"{key} does not change in the whole episode, in others it does"
                    yield episode_problem(index, what, None, consequence)


def _row_problems(
    metadata: Metadata, episode: Episode, rows: Columns
) -> Iterator[tuple[Severity, str, str]]:
    """Yield severity, what is wrong, and the consequence."""
    steps = np.arange(episode.length)
    for key, numbers in {"frame_index": steps, "index": steps + episode.start}.items():
        if key in rows and not np.array_equal(rows[key].reshape(-1), numbers):
            what = f"{key} does not count up from {numbers[0]}"
            yield "note", what, "rows are used in the order of the file"
    if "episode_index" in rows and (rows["episode_index"] != episode.index).any():
        what = f"its rows say that they are of episode {rows['episode_index'].reshape(-1)[0]}"
        yield "warning", what, "the list of episodes is used, the column stays as it is"
    if "timestamp" in rows:
        seconds = rows["timestamp"].reshape(-1).astype(np.float64)
        if abs(seconds[0]) > TIME_TOLERANCE_S:
            what = f"its clock begins at {seconds[0]:.4g} s, not at 0"
            yield "note", what, "frames are found by number"
        errors = np.abs(seconds - seconds[0] - steps / metadata.fps)
        if (worst := errors.max()) > TIME_TOLERANCE_S:
            what = f"recorded times differ from {metadata.fps:g} fps by up to {worst:.4g} s"
            yield "warning", f"{what} (row {errors.argmax()})", "frames are found by number"
    column = rows.get("task_index", np.empty(0, int)).reshape(-1)
    unknown = set(column.tolist()) - metadata.tasks.keys()
    if unknown and metadata.tasks:
        what = f"task_index {sorted(unknown)} is not in the list of tasks"
        yield "warning", what, "the episode's first task is used"
    if not episode.tasks and (unknown or not len(column)):
        yield "warning", "no task is known", "its prompt is empty"


def _not_finite(episode: int, rows: Columns) -> Iterator[Problem]:
    for key, array in rows.items():
        if len(bad := bad_rows(array)):
            what = f"{key} is NaN or infinite in {len(bad)} rows, the first is {bad[0]}"
            yield episode_problem(episode, what, None, STOPS, "error")


def bad_rows(array: np.ndarray) -> np.ndarray:
    """Return the rows in which a floating-point number is NaN or infinite."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return np.empty(0, np.int64)
    return np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))


@contextlib.contextmanager
def worker_threads(
    num_threads: int | None = None,
) -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """Yield threads, by default one per CPU, and an event that tells them to stop after an error.

    So Ctrl-C does not have to wait until a long video is decoded.
    """
    stopped = threading.Event()
    with ThreadPoolExecutor(num_threads or num_usable_cpus()) as pool:
        try:
            yield pool, stopped
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def _frame_problems(
    findings: Findings, filmed: Iterable[tuple[Episode, str]], count: Callable[[int], None]
) -> list[Problem]:
    """Decode every frame, several files at once."""
    metadata, images = findings.metadata, ImageRows(findings.metadata.root)
    by_file: dict[str, list[tuple[Episode, str]]] = collections.defaultdict(list)
    for episode, camera in filmed:
        by_file[episode.file_of(camera)].append((episode, camera))

    def check_file(path: str) -> Iterator[Problem]:
        inside, reader = by_file[path], None
        if path in findings.headers:  # else the images are in the rows of a data file
            try:
                reader = VideoReader(metadata.root / path)
            except VideoError as error:
                for episode, camera in inside:
                    yield episode_problem(episode.index, str(error), camera, STOPS, "error")
                return
            yield from _unlike_declared(findings, reader, path, inside)
        for episode, camera in inside:
            steps, black, number = np.arange(episode.length), [], 0
            if reader is not None:
                times = episode.videos[camera].start + steps / metadata.fps
                frames = reader.brightness(times.tolist())
            else:
                rows = (findings.data.first_rows[episode.index] + steps).tolist()
                frames = (images.read(path, camera, row) for row in rows)
            try:
                for number, frame in enumerate(frames, 1):
                    if stopped.is_set():
                        return
                    if frame.max() <= BLACK:
                        black.append(number - 1)
                    count(1)
            except ValueError as error:
                count(episode.length - number)
                what = f"frame {number}: {error}"
                yield episode_problem(episode.index, what, camera, STOPS, "error")
            else:
                yield from _black_frames(episode, camera, black)
        if reader is not None:
            reader.close()

    with worker_threads() as (pool, stopped):
        found = pool.map(lambda path: list(check_file(path)), by_file)
        return list(itertools.chain.from_iterable(found))


def _black_frames(
    episode: protocol.Episode, camera: str, black: Sequence[int]
) -> Iterator[Problem]:
    if black:
        what = f"{len(black)} of {episode.length} frames are black: {ranges(black)}"
        yield episode_problem(episode.index, what, camera, "they are used as they are")


def _unlike_declared(
    findings: Findings, reader: VideoReader, path: str, inside: Sequence[tuple[Episode, str]]
) -> Iterator[Problem]:
    header, fps = findings.headers[path], findings.metadata.fps
    feature = findings.metadata.features[inside[0][1]]
    codec = feature.video.get("video.codec")
    if codec is not None and codec != reader.codec:
        what = f"the codec is {reader.codec}, declared is {codec}"
        yield Problem("note", path, what, "the file's own codec is used")
    if len(feature.shape) == 3 and set(reader.size) - set(feature.shape):
        what = f"frames are {reader.size[0]}×{reader.size[1]}, declared is {feature.shape}"
        yield Problem("warning", path, what, "frames keep the size that they have in the file")
    needed = max(round(e.videos[camera].start * fps) + e.length for e, camera in inside)
    if isinstance(header, VideoHeader) and header.num_frames > needed:
        what = f"{header.num_frames} frames, the episodes have {needed}"
        yield Problem("note", path, what, "the frames at the end are not used")
