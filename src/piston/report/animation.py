"""One small animation of an evaluation's videos side by side, for pages that play no videos."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

from piston.report.evaluations import EvaluationResult

# Of one video, in the animation.
_WIDTH, _HEIGHT = 240, 180
_ONE_ROW, _COLUMNS = 4, 3
_BORDER, _STRIP = 3, 24
# Every so-many-th frame is shown, at the videos' own frame rate: as many times faster.
_SPEED = 2
_SECONDS_AT_THE_END = 1.5
_SUCCESS, _FAILURE, _PAPER, _INK = (46, 139, 87), (200, 60, 50), (255, 255, 255), (40, 40, 40)
MAX_BYTES = 1_000_000
_QUALITIES = (70, 50, 35, 20, 10)


def write_animation(path: Path, evaluations: Sequence[EvaluationResult]) -> None:
    """Every video once, green where the task was fulfilled; at most a million bytes of WebP."""
    videos = [(result, video) for result in evaluations for video in result.videos]
    if not videos:
        raise ValueError("There are no videos to animate. Run: piston eval … --video")
    films = [(_frames(video), result.outcome_of(video).success) for result, video in videos]
    fps = _frame_rate(videos[0][1])
    title = "   ".join(f"{result.task}: {result.success}" for result in evaluations)
    length = max(len(frames) for frames, _ in films)
    pages = [_page(films, index, f"{title}   {_SPEED} times as fast") for index in range(length)]
    durations = [round(1000 / fps)] * (len(pages) - 1) + [round(1000 * _SECONDS_AT_THE_END)]
    for quality in _QUALITIES:
        pages[0].save(
            path,
            "WEBP",
            save_all=True,
            append_images=pages[1:],
            duration=durations,
            loop=0,
            quality=quality,
            method=4,
        )
        if path.stat().st_size <= MAX_BYTES:
            return
    raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}.")


def _frames(video: Path) -> list[Image.Image]:
    with av.open(str(video)) as container:
        chosen = itertools.islice(container.decode(video=0), 0, None, _SPEED)
        return [frame.to_image().resize((_WIDTH, _HEIGHT)) for frame in chosen]


def _frame_rate(video: Path) -> float:
    with av.open(str(video)) as container:
        return float(container.streams.video[0].average_rate or 10)


def _page(films: list[tuple[list[Image.Image], bool]], index: int, title: str) -> Image.Image:
    """All videos at one moment; one that is over shows its last frame."""
    columns = len(films) if len(films) <= _ONE_ROW else _COLUMNS
    rows = -(-len(films) // columns)
    page = Image.new("RGB", (columns * _WIDTH, rows * _HEIGHT + _STRIP), _PAPER)
    for place, (frames, is_success) in enumerate(films):
        row, column = divmod(place, columns)
        tile = np.array(frames[min(index, len(frames) - 1)])
        colour = _SUCCESS if is_success else _FAILURE
        tile[:_BORDER] = tile[-_BORDER:] = colour
        tile[:, :_BORDER] = tile[:, -_BORDER:] = colour
        page.paste(Image.fromarray(tile), (column * _WIDTH, row * _HEIGHT))
    ImageDraw.Draw(page).text((6, rows * _HEIGHT + 6), title, fill=_INK)
    return page
