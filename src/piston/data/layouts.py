"""How v2.x and v3.0 write down episodes and tasks: lines of JSON, or parquet tables.

    v2.x  one data file and one video per episode; meta/episodes.jsonl, meta/tasks.jsonl
    v3.0  several episodes per file; meta/episodes/*/*.parquet says where each begins

Knows the fields and the names of files. Damaged lines and tables cost their own episodes only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from piston.data.episodes import Episode, FileListing, Problem, VideoSpan, episode_problem

DATA_PATH_V2 = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_PATH_V2 = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
DATA_PATH_V3 = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH_V3 = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
CHUNK_SIZE = 1000  # episodes per folder, where info.json does not say

Tables = tuple[dict[int, str], list[Episode]]  # task texts, episodes


@dataclasses.dataclass(frozen=True)
class Reading:
    """What both layouts need; oddities are added to `problems`. Without `files` none is missed."""

    root: Path
    info: dict[str, Any]
    fps: float
    files: FileListing | None
    problems: list[Problem]

    @property
    def video_keys(self) -> list[str]:
        features = self.info["features"]
        return [name for name, feature in features.items() if feature["dtype"] == "video"]

    def path(self, field: str, default: str, **fields: Any) -> str:
        template = self.info.get(field) or default
        try:
            return str(template.format(**fields))
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            raise ValueError(
                f"meta/info.json: {field} is {template!r}, which cannot be filled in ({error!r}); "
                f"expected is something like {default!r}."
            ) from None

    def find_video(self, path: str) -> str | None:
        return path if self.files is None else self.files.find(path)

    def note(self, where: str, what: str, consequence: str) -> None:
        self.problems.append(Problem("note", where, what, consequence))

    def warn(self, where: str, what: str, consequence: str) -> None:
        self.problems.append(Problem("warning", where, what, consequence))


def read_v2(reading: Reading) -> Tables:
    path = reading.root / "meta" / "episodes.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; a v2.x data set lists its episodes in it.")
    episodes: dict[int, Episode] = {}
    start = 0
    for line, row in _json_lines(path, reading):
        index, length = row.get("episode_index"), row.get("length")
        if not isinstance(index, int) or not isinstance(length, int) or length < 1:
            reading.warn(f"episodes.jsonl:{line}", f"no usable episode: {row}", "it is left out")
        elif index in episodes:
            reading.warn(f"episodes.jsonl:{line}", f"episode {index} again", "the first one counts")
        else:
            episodes[index] = _episode_v2(reading, index, start, length, _texts(row.get("tasks")))
            start += length
    return _tasks_v2(reading), list(episodes.values())


def _episode_v2(
    reading: Reading, index: int, start: int, length: int, tasks: tuple[str, ...]
) -> Episode:
    chunk = index // int(reading.info.get("chunks_size") or CHUNK_SIZE)
    fields = {"episode_chunk": chunk, "episode_index": index}
    videos = {}
    for camera in reading.video_keys:
        declared = reading.path("video_path", VIDEO_PATH_V2, video_key=camera, **fields)
        if (found := reading.find_video(declared)) is not None:
            videos[camera] = VideoSpan(found, 0.0, length / reading.fps)
    data_path = reading.path("data_path", DATA_PATH_V2, **fields)
    return Episode(index, start, length, tasks, data_path, videos)


def _tasks_v2(reading: Reading) -> dict[int, str]:
    path = reading.root / "meta" / "tasks.jsonl"
    if not path.is_file():
        return _no_tasks(reading, "tasks.jsonl", "is not there")
    tasks = {}
    for line, row in _json_lines(path, reading):
        if isinstance(row.get("task_index"), int) and isinstance(row.get("task"), str):
            tasks[row["task_index"]] = row["task"]
        else:
            reading.warn(f"tasks.jsonl:{line}", f"no usable task: {row}", "it is left out")
    return tasks


def read_v3(reading: Reading) -> Tables:
    folder = reading.root / "meta" / "episodes"
    paths = sorted(folder.glob("*/*.parquet"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no parquet file; a v3.0 set has its episodes there."
        )
    episodes: dict[int, Episode] = {}
    start = 0
    for path in paths:
        for row in _table_rows(path, reading):
            episode = _episode_v3(reading, row, start)
            if episode is None or episode.index in episodes:
                what = "no usable episode" if episode is None else f"episode {episode.index} again"
                reading.warn(path.name, f"{what}: {str(row)[:80]}", "it is left out")
                continue
            episodes[episode.index] = episode
            start = episode.start + episode.length
    return _tasks_v3(reading), list(episodes.values())


def _table_rows(path: Path, reading: Reading) -> Iterator[dict[str, Any]]:
    try:
        schema = pq.read_schema(path)
        # Statistics are most of the table and none of our business.
        names = [name for name in schema.names if not name.startswith("stats/")]
        yield from pq.read_table(path, columns=names).to_pylist()
    except (pa.ArrowException, OSError) as error:
        name = path.relative_to(reading.root)
        reading.warn(str(name), f"cannot be read: {error}", "the episodes it lists are left out")


def _episode_v3(reading: Reading, row: dict[str, Any], start: int) -> Episode | None:
    index, length = row.get("episode_index"), row.get("length")
    if not isinstance(index, int) or not isinstance(length, int) or length < 1:
        return None
    chunk, file = row.get("data/chunk_index"), row.get("data/file_index")
    if not isinstance(chunk, int) or not isinstance(file, int):
        return None
    if isinstance(row.get("dataset_from_index"), int):
        start = row["dataset_from_index"]
    data_path = reading.path("data_path", DATA_PATH_V3, chunk_index=chunk, file_index=file)
    videos = {}
    for camera in reading.video_keys:
        span = _span(reading, row, camera)
        if span is not None and _holds(reading, index, length, camera, span):
            videos[camera] = span
    return Episode(index, start, length, _texts(row.get("tasks")), data_path, videos)


def _span(reading: Reading, row: dict[str, Any], camera: str) -> VideoSpan | None:
    prefix = f"videos/{camera}/"
    chunk, file = row.get(prefix + "chunk_index"), row.get(prefix + "file_index")
    start, stop = row.get(prefix + "from_timestamp"), row.get(prefix + "to_timestamp")
    if chunk is None or file is None or start is None or stop is None:
        return None
    fields = {"video_key": camera, "chunk_index": int(chunk), "file_index": int(file)}
    found = reading.find_video(reading.path("video_path", VIDEO_PATH_V3, **fields))
    return VideoSpan(found, float(start), float(stop)) if found is not None else None


def _holds(reading: Reading, index: int, length: int, camera: str, span: VideoSpan) -> bool:
    """A span too short would hand out the next episode's frames."""
    frames = (span.stop - span.start) * reading.fps
    if frames > length - 0.5:
        return True
    what = f"{length} rows, but its video spans {frames:.1f} frames ({span.start}…{span.stop} s)"
    reading.problems.append(episode_problem(index, what, camera))
    return False


def _tasks_v3(reading: Reading) -> dict[int, str]:
    path = reading.root / "meta" / "tasks.parquet"
    if not path.is_file():
        return _no_tasks(reading, "tasks.parquet", "is not there")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        return _no_tasks(reading, "tasks.parquet", f"cannot be read: {error}")
    # pandas keeps the texts as the index, under its name or, without one, under this.
    text = next(
        (name for name in ("task", "__index_level_0__") if name in table.column_names), None
    )
    if text is None or "task_index" not in table.column_names:
        what = f"has columns {table.column_names}; expected: task_index, task"
        return _no_tasks(reading, "tasks.parquet", what)
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist()))


def _no_tasks(reading: Reading, name: str, what: str) -> dict[int, str]:
    # Numbering the episodes' texts would be a guess at what the rows' task_index means.
    reading.warn(f"meta/{name}", what, "each episode's first task is used for all its rows")
    return {}


def _texts(tasks: Any) -> tuple[str, ...]:
    if isinstance(tasks, str):
        return (tasks,)
    return tuple(str(task) for task in tasks or ())


def _json_lines(path: Path, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield number, row
            else:
                shown = line.strip()[:60]
                reading.warn(
                    f"{path.name}:{number}", f"not JSON: {shown!r}", "the line is left out"
                )
